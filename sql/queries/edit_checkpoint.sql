-- Purpose: replace the checkpoint of a job that is to run again.
-- Parameters: task_id, metadata (JSON text or null).
-- Index: jobs_hot_task_id_key, scheduled_jobs_task_id_key, jobs_hot_pkey, scheduled_jobs_pkey.
-- Trap: null where there is no such job, false where it runs or was completed.
SELECT {schema}.edit_checkpoint(%(task_id)s::text, %(metadata)s::jsonb) AS edited
