-- Purpose: note that the attempts with these leases are dead, so that they are stale at once.
-- Parameters: ids, run_leases (bigint[], same order).
-- Index: jobs_hot_running.
-- Trap: only for attempts whose process was seen dead; a heartbeat takes it back.
SELECT FROM {schema}.forsake(%(ids)s::bigint[], %(run_leases)s::bigint[])
