-- Purpose: have a job's message sent again, with its progress or without.
-- Parameters: task_id, keep_progress.
-- Index: jobs_hot_task_id_key, scheduled_jobs_task_id_key, jobs_hot_pkey, scheduled_jobs_pkey.
-- Trap: the next pass of a rescuer publishes it.
SELECT {schema}.resend(%(task_id)s::text, %(keep_progress)s::boolean) AS answer
