-- Purpose: completed rows for attempts that succeeded before they were claimed.
-- Parameters: attempts (jsonb array, type new_attempt).
-- Index: jobs_hot_task_id_key, scheduled_jobs_task_id_key, read only for the new tasks.
-- Trap: returns the tokens that it did NOT record; end those one by one.
SELECT record_completed AS token FROM {schema}.record_completed(%(attempts)s::jsonb)
