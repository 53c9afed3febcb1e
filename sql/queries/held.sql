-- Purpose: which leases still hold their running job, without waiting for a lock.
-- Parameters: ids, run_leases (bigint[], same order).
-- Index: jobs_hot_running.
-- Trap: none; it reads committed rows only.
SELECT j.id, j.run_lease
FROM {schema}.jobs_hot j
JOIN unnest(%(ids)s::bigint[], %(run_leases)s::bigint[]) AS b (id, run_lease)
    ON j.id = b.id AND j.run_lease = b.run_lease
WHERE j.state = 'running'
