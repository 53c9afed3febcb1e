-- Purpose: jobs of which something is due to be published; each is due again 10 s later.
-- Parameters: limit, resend_after.
-- Index: jobs_hot_unsent, jobs_hot_sent, jobs_hot_pkey, scheduled_jobs_unsent, scheduled_jobs_sent, scheduled_jobs_pkey.
-- Trap: publish after the commit, then say so with sent.sql or told.sql.
SELECT id, run_lease, resends, task_id, kind, state, run_token, envelope, envelope_whole,
    attempted_at, run_at, errors[cardinality(errors)] ->> 'error' AS error
FROM {schema}.unsent(%(limit)s::integer, %(resend_after)s::double precision)
