-- Purpose: end an attempt whose lease is known.
-- Parameters: id, run_lease, token, transition (jsonb, type transition), envelope (bytea or null).
-- Index: jobs_hot_running, jobs_hot_pkey, scheduled_jobs_pkey.
-- Trap: "repeated" is success: the first answer was lost.
SELECT {schema}.end_attempt(
    %(id)s::bigint, %(run_lease)s::bigint, %(token)s::text, %(transition)s::jsonb, %(envelope)s::bytea
) AS answer
