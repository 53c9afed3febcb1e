-- Purpose: requeue or fail jobs by their policy, if they are lost still.
-- Parameters: ids, run_leases (bigint[], same order), stale_after, duplicate_after (seconds).
-- Index: jobs_hot_pkey, scheduled_jobs_pkey.
-- Trap: what is not in the answer was locked, went on or came back to life.
SELECT id, run_lease, rescue
FROM {schema}.rescue(
    %(ids)s::bigint[], %(run_leases)s::bigint[],
    %(stale_after)s::double precision, %(duplicate_after)s::double precision
)
