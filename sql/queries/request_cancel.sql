-- Purpose: cancel a job that waits, ask one that runs to stop.
-- Parameters: task_id.
-- Index: jobs_hot_task_id_key, scheduled_jobs_task_id_key, jobs_hot_pkey, scheduled_jobs_pkey.
-- Trap: a running task stops when it looks at should_stop, not before.
SELECT {schema}.request_cancel(%(task_id)s::text) AS answer
