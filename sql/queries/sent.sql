-- Purpose: note that the message which a job waits for was published.
-- Parameters: id, run_lease, resends.
-- Index: jobs_hot_pkey, scheduled_jobs_pkey.
-- Trap: hitting no row is right where the message was quicker and the next attempt has claimed.
SELECT FROM {schema}.sent(%(id)s::bigint, %(run_lease)s::bigint, %(resends)s::integer)
