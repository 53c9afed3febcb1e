-- Purpose: answer a callback with an error, which fails its job.
-- Parameters: callback_id, error.
-- Index: jobs_hot_pkey, scheduled_jobs_pkey, jobs_hot_task_id_key, scheduled_jobs_task_id_key.
-- Trap: repeated, it is refused: it was answered before.
SELECT {schema}.fail_callback(%(callback_id)s::text, %(error)s::text) AS answer
