-- Purpose: jobs that are stale, stalled, past their deadline or their callback's time.
-- Parameters: stale_after, duplicate_after (seconds), after_id, limit.
-- Index: jobs_hot_running, jobs_hot_waiting.
-- Trap: a look only, rescue.sql takes them; late ones apart, or a planner may read all jobs by id.
WITH late AS MATERIALIZED (
    SELECT id, run_lease, task_id, kind, coalesce(attempted_at, created_at) AS attempted_at
    FROM {schema}.jobs_hot
    WHERE state = 'waiting_external' AND callback_timeout_at <= now()
)
(
    SELECT id, run_lease, task_id, kind, coalesce(attempted_at, created_at) AS attempted_at
    FROM {schema}.jobs_hot j
    WHERE state = 'running' AND id > %(after_id)s::bigint
        AND {schema}.lost_reason(j, %(stale_after)s, %(duplicate_after)s) IS NOT NULL
    ORDER BY id LIMIT %(limit)s
) UNION ALL (
    SELECT id, run_lease, task_id, kind, attempted_at FROM late WHERE id > %(after_id)s::bigint
    ORDER BY id LIMIT %(limit)s
)
ORDER BY id LIMIT %(limit)s
