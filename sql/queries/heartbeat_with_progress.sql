-- Purpose: proof of life and snapshot for many attempts; a flush is the same for one.
-- Parameters: ids, run_leases, progress (JSON text), generations (arrays, same order), skip_locked.
-- Index: jobs_hot_running, and jobs_hot_pkey with skip_locked.
-- Trap: acknowledge the generation that comes back, not the one that was sent.
SELECT id, run_lease, progress_generation, cancel_requested
FROM {schema}.heartbeat_with_progress(
    %(ids)s::bigint[], %(run_leases)s::bigint[], %(progress)s::text[], %(generations)s::bigint[],
    %(skip_locked)s::boolean
)
