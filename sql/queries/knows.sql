-- Purpose: whether a task has a row, finished or not.
-- Parameters: task_id.
-- Index: jobs_hot_task_id_key, scheduled_jobs_task_id_key.
-- Trap: a row between the tables is in one of them for every snapshot.
SELECT EXISTS (SELECT FROM {schema}.jobs_hot WHERE task_id = %(task_id)s)
    OR EXISTS (SELECT FROM {schema}.scheduled_jobs WHERE task_id = %(task_id)s) AS known
