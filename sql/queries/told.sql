-- Purpose: note that the result backend knows of a job's end.
-- Parameters: id, run_lease, resends.
-- Index: jobs_hot_pkey.
-- Trap: hits no row where the job was sent again meanwhile, which is right.
SELECT FROM {schema}.told(%(id)s::bigint, %(run_lease)s::bigint, %(resends)s::integer)
