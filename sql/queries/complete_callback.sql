-- Purpose: answer a callback with its payload.
-- Parameters: callback_id, payload (JSON text).
-- Index: jobs_hot_pkey, scheduled_jobs_pkey, jobs_hot_task_id_key, scheduled_jobs_task_id_key.
-- Trap: repeated, it is refused: it was answered before.
SELECT {schema}.complete_callback(%(callback_id)s::text, %(payload)s::jsonb) AS answer
