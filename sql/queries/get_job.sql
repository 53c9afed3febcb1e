-- Purpose: the job of one task; state and progress from one read.
-- Parameters: task_id.
-- Index: jobs_hot_task_id_key, scheduled_jobs_task_id_key.
-- Trap: none.
SELECT id, task_id, kind, queue, state, attempt, max_attempts, retries, lost_policy, max_rescues,
    rescues, resendable, run_lease, worker, args_repr, kwargs_repr, progress, progress_at,
    committed, heartbeat_at, duplicate_at, deadline_at, stall_after, stalled, cancel_requested,
    run_at, send_after, callback_id, callback_timeout_at, created_at, attempted_at, finalized_at,
    errors, root_id, parent_id, group_id, group_index
FROM {schema}.jobs
WHERE task_id = %(task_id)s
