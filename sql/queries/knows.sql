-- Purpose: whether a task has a row, finished or not.
-- Parameters: task_id.
-- Index: jobs_hot_task_id_key, scheduled_jobs_task_id_key.
-- Trap: a row between the tables is in one of them for every snapshot.
SELECT {schema}.known(%(task_id)s::text) AS known
