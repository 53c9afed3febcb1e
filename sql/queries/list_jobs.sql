-- Purpose: jobs, newest first, a page at a time.
-- Parameters: state, kind (or null), before_id (or null), limit.
-- Index: jobs_hot_pkey, scheduled_jobs_pkey, read backwards.
-- Trap: page by id, never by offset: rows move while you read.
SELECT id, task_id, kind, queue, state, attempt, max_attempts, retries, lost_policy, max_rescues,
    rescues, resendable, run_lease, worker, args_repr, kwargs_repr, progress, progress_at,
    committed, heartbeat_at, duplicate_at, deadline_at, stall_after, stalled, cancel_requested,
    run_at, send_after, callback_id, callback_timeout_at, created_at, attempted_at, finalized_at,
    errors, root_id, parent_id, group_id, group_index
FROM {schema}.jobs
WHERE (%(state)s::text IS NULL OR state = %(state)s)
    AND (%(kind)s::text IS NULL OR kind = %(kind)s)
    AND (%(before_id)s::bigint IS NULL OR id < %(before_id)s)
ORDER BY id DESC
LIMIT %(limit)s
