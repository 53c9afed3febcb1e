-- Purpose: end a job that nobody is to run any more.
-- Parameters: id, run_lease, state, error (or null).
-- Index: jobs_hot_pkey, scheduled_jobs_pkey, jobs_hot_task_id_key, scheduled_jobs_task_id_key.
-- Trap: with an error the end is left to be told; without, the backend said so.
SELECT {schema}.settle(
    %(id)s::bigint, %(run_lease)s::bigint, %(state)s::text, %(error)s::text
) AS settled
