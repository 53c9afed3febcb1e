-- Purpose: give an attempt its row and a new lease, or say why not.
-- Parameters: attempt (jsonb, type new_attempt), envelope (bytea or null).
-- Index: jobs_hot_task_id_key, scheduled_jobs_task_id_key, jobs_hot_pkey, scheduled_jobs_pkey.
-- Trap: safe only as a volatile function; see docs/adr/0003 before inlining it.
SELECT verdict, id, run_lease, attempt, progress, run_token, committed, callbacks
FROM {schema}.claim(%(attempt)s::jsonb, %(envelope)s::bytea)
