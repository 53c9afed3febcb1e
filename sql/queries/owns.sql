-- Purpose: whether a lease was not lost to a newer attempt or an end.
-- Parameters: id, run_lease.
-- Index: jobs_hot_pkey, scheduled_jobs_pkey.
-- Trap: a row that is not there at all was not lost to anybody: then the answer is yes.
SELECT NOT EXISTS (
    SELECT FROM {schema}.jobs_hot
    WHERE id = %(id)s AND NOT (run_lease = %(run_lease)s AND state = 'running')
) AND NOT EXISTS (SELECT FROM {schema}.scheduled_jobs WHERE id = %(id)s) AS owned
