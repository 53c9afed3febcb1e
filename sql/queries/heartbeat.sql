-- Purpose: proof of life for many attempts.
-- Parameters: ids, run_leases (bigint[], same order), skip_locked.
-- Index: jobs_hot_running, and jobs_hot_pkey with skip_locked.
-- Trap: a row that is missing is gone, except with skip_locked, where it may be locked.
SELECT id, run_lease, progress_generation, cancel_requested
FROM {schema}.heartbeat(%(ids)s::bigint[], %(run_leases)s::bigint[], %(skip_locked)s::boolean)
