-- Purpose: write into the checkpoint of a running attempt, in its task's own transaction.
-- Parameters: id, run_lease, token, version, values (JSON text).
-- Index: jobs_hot_running, jobs_hot_pkey.
-- Trap: runs through the caller's connection, which is not ours: it waits as long as he says.
SELECT {schema}.checkpoint_in(
    %(id)s::bigint, %(run_lease)s::bigint, %(token)s::text, %(version)s::integer, %(values)s::jsonb
) AS written
