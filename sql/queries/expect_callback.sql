-- Purpose: note what the callback that an attempt is going to wait for will be known by.
-- Parameters: id, run_lease, token, callback_id, callback_name.
-- Index: jobs_hot_running, jobs_hot_pkey.
-- Trap: it forgets an earlier answer of that name; hand the callback_id out after it only.
SELECT {schema}.expect_callback(
    %(id)s::bigint, %(run_lease)s::bigint, %(token)s::text, %(callback_id)s::text,
    %(callback_name)s::text
) AS expected
