-- What becomes of jobs whose attempt died, what is to be published, and what operators ask for.
--
-- Nothing here publishes: a job that needs a message, or whose end the result backend is to be
-- told, is unsent (send_after is not null) until somebody has done so and says it.

-- Seconds since an attempt reported anything, or began; the view jobs reckons in the same way.
CREATE FUNCTION {schema}.reported_ago(p_progress_at timestamptz, p_attempted_at timestamptz)
RETURNS double precision LANGUAGE sql STABLE AS $$
    SELECT extract(epoch FROM now() - greatest(p_progress_at, p_attempted_at))::double precision
$$;

-- Why a job is lost, in words; null where it is not. Above 1e8 seconds of p_stale_after no silence
-- counts: what an attempt reported may not have been written for as long, so it is not stalled.
CREATE FUNCTION {schema}.lost_reason(
    j {schema}.jobs_hot, p_stale_after double precision, p_duplicate_after double precision
) RETURNS text LANGUAGE sql STABLE AS $$
    SELECT CASE
        WHEN j.state = 'waiting_external' AND j.callback_timeout_at <= now()
            THEN 'TimeoutError: no callback came in time'
        WHEN j.state <> 'running' THEN NULL
        WHEN j.heartbeat_at <= now() - make_interval(secs => p_stale_after)
            OR j.duplicate_at IS NOT NULL
                AND j.heartbeat_at <= now() - make_interval(secs => p_duplicate_after)
            THEN format('WorkerLostError: no heartbeat from worker %s for %s s',
                coalesce(j.worker, ''), round(extract(epoch FROM now() - j.heartbeat_at), 1))
        WHEN j.deadline_at <= now()
            THEN format('TimeLimitExceeded: the deadline of %s s is over',
                round(extract(epoch FROM j.deadline_at - j.attempted_at), 1))
        -- A claim sets it, so somebody took it away who saw the attempt's process dead. Or, after
        -- its deadline, the attempt itself gave up: that was named above.
        WHEN j.heartbeat_at IS NULL
            THEN format('WorkerLostError: worker %s died', coalesce(j.worker, ''))
        WHEN j.stall_policy = 'stop' AND p_stale_after < 1e8
            AND {schema}.reported_ago(j.progress_at, j.attempted_at) >= j.stall_after
            THEN format('TimeLimitExceeded: nothing was reported for %s s',
                round({schema}.reported_ago(j.progress_at, j.attempted_at)::numeric, 1))
    END
$$;

-- Take what is still lost of these jobs, and requeue or fail them by their policy. What others
-- hold is left out: they are at it, or it is alive. So this waits for no row, and holding many
-- it is in nobody's circle.
CREATE FUNCTION {schema}.rescue(
    p_ids bigint[], p_run_leases bigint[],
    p_stale_after double precision, p_duplicate_after double precision
) RETURNS TABLE (id bigint, run_lease bigint, rescue text)
LANGUAGE plpgsql SET lock_timeout = '500ms' AS $$
#variable_conflict use_column
DECLARE
    job {schema}.jobs_hot;
    reason text;
    why_not text;
BEGIN
    FOR job IN
        SELECT j.* FROM {schema}.jobs_hot j
        JOIN unnest(p_ids, p_run_leases) AS b (id, run_lease) USING (id, run_lease)
        WHERE j.state IN ('running', 'waiting_external')
        FOR UPDATE OF j SKIP LOCKED
    LOOP
        -- Of the row as it is locked now: its attempt may have sent a heartbeat since the look.
        reason := {schema}.lost_reason(job, p_stale_after, p_duplicate_after);
        CONTINUE WHEN reason IS NULL;
        job := {schema}.advanced(job);
        why_not := {schema}.why_not_requeued(job);
        job.errors := {schema}.with_error(job, reason || coalesce(why_not, ''));
        job.state := CASE
            WHEN job.cancel_requested THEN 'cancelled'
            WHEN why_not IS NULL THEN 'retryable'
            ELSE 'failed' END;
        IF job.state = 'retryable' THEN
            job.rescues := job.rescues + 1;
            job.rescues_in_place := job.rescues_in_place + 1;
            job.run_at := now();
        END IF;
        job.send_after := now();
        job.taken_by := 'rescue';
        PERFORM {schema}.put(job);
        RETURN QUERY SELECT job.id, job.run_lease,
            CASE job.state WHEN 'retryable' THEN 'requeued' ELSE job.state END;
    END LOOP;
END
$$;

-- The job with its rescues in place counted from its last advance: a changed checkpoint.
CREATE FUNCTION {schema}.advanced(j {schema}.jobs_hot)
RETURNS {schema}.jobs_hot LANGUAGE plpgsql STABLE AS $$
DECLARE
    mark text := md5(
        coalesce(j.progress -> 'metadata', '{}')::text || coalesce(j.committed, '{}')::text
    );
BEGIN
    IF j.rescue_mark IS DISTINCT FROM mark THEN
        j.rescue_mark := mark;
        j.rescues_in_place := 0;
    END IF;
    RETURN j;
END
$$;

-- Why a lost job is not sent again, as the end of a sentence; null where it may be.
CREATE FUNCTION {schema}.why_not_requeued(j {schema}.jobs_hot)
RETURNS text LANGUAGE sql STABLE AS $$
    SELECT CASE
        WHEN j.lost_policy <> 'requeue' THEN ''
        WHEN NOT j.envelope_whole THEN '; its message was not kept, so it cannot be sent again'
        WHEN j.rescues_in_place >= j.max_rescues
            THEN format('; max_rescues is %s and the checkpoint did not advance', j.max_rescues)
        WHEN j.rescues >= 20 THEN '; it was rescued 20 times in this run'
    END
$$;

-- Write a job whose row is locked and which runs no longer, into the table of its state and
-- without what belongs to other states.
CREATE FUNCTION {schema}.put(j {schema}.jobs_hot)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    j.deadline_at := NULL;
    j.duplicate_at := NULL;
    IF j.state <> 'waiting_external' THEN
        j.callback_id := NULL;
        j.callback_name := NULL;
        j.callback_timeout_at := NULL;
    END IF;
    IF j.state IN ('completed', 'failed', 'cancelled') THEN
        j.run_at := NULL;
        j.sent_at := NULL;
        j.finalized_at := coalesce(j.finalized_at, now());
    ELSE
        j.finalized_at := NULL;
    END IF;
    -- Not an update: the state decides on the table. Whoever waits for the row finds it gone, and
    -- looks for the task again, or has no more business with it.
    DELETE FROM {schema}.jobs_hot h WHERE h.id = j.id;
    DELETE FROM {schema}.scheduled_jobs s WHERE s.id = j.id;
    IF j.state IN ('scheduled', 'retryable') THEN
        INSERT INTO {schema}.scheduled_jobs SELECT j.*;
    ELSE
        INSERT INTO {schema}.jobs_hot SELECT j.*;
    END IF;
END
$$;

-- Take the mutex of a task and read its row, in whichever table it is; null if there is none.
CREATE FUNCTION {schema}.take(p_task_id text)
RETURNS {schema}.jobs_hot LANGUAGE plpgsql AS $$
DECLARE
    job {schema}.jobs_hot;
    mutex bigint;
BEGIN
    IF NOT {schema}.known(p_task_id) THEN
        RETURN NULL;  -- to take the mutex of no job would write one
    END IF;
    LOOP
        INSERT INTO {schema}.jobs_hot AS j (task_id, kind, state, run_token)
        VALUES (p_task_id, '', 'available', '')
        ON CONFLICT ON CONSTRAINT jobs_hot_task_id_key DO NOTHING
        RETURNING j.id INTO mutex;
        IF FOUND THEN
            SELECT s.* INTO job FROM {schema}.scheduled_jobs s
            WHERE s.task_id = p_task_id FOR UPDATE;
            -- Its index entry goes on holding others off until this transaction ends.
            DELETE FROM {schema}.jobs_hot j WHERE j.id = mutex;
            RETURN job;
        END IF;
        SELECT j.* INTO job FROM {schema}.jobs_hot j WHERE j.task_id = p_task_id FOR UPDATE;
        IF FOUND THEN
            RETURN job;
        END IF;
        -- It was moved or deleted between the two statements: again.
    END LOOP;
END
$$;

-- Whether a task has a row, finished or not.
CREATE FUNCTION {schema}.known(p_task_id text)
RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT EXISTS (SELECT FROM {schema}.jobs_hot h WHERE h.task_id = p_task_id)
        OR EXISTS (SELECT FROM {schema}.scheduled_jobs s WHERE s.task_id = p_task_id)
$$;

-- Note that the attempts with these leases are dead, so that they are stale at once.
CREATE FUNCTION {schema}.forsake(p_ids bigint[], p_run_leases bigint[])
RETURNS void LANGUAGE plpgsql SET lock_timeout = '500ms' AS $$
BEGIN
    UPDATE {schema}.jobs_hot j SET heartbeat_at = NULL
    FROM unnest(p_ids, p_run_leases) AS b (id, run_lease)
    WHERE j.id = b.id AND j.run_lease = b.run_lease AND j.state = 'running';
END
$$;

-- Jobs of which something is due to be published, those first that are due for longest. Each is
-- due again ten seconds later, so that one which cannot be published hides no other, and that
-- whoever dies at it leaves it to others. A message that was published and has not come
-- p_resend_after seconds later, or after it was to run, may have been lost on its way: its job is
-- unsent again (docs/adr/0015).
CREATE FUNCTION {schema}.unsent(p_limit integer, p_resend_after double precision)
RETURNS SETOF {schema}.jobs_hot LANGUAGE plpgsql SET lock_timeout = '500ms' AS $$
DECLARE
    not_for interval := make_interval(secs => p_resend_after);
BEGIN
    RETURN QUERY
    WITH hot AS MATERIALIZED (
        SELECT h.id, h.send_after AS due_at FROM {schema}.jobs_hot h WHERE h.send_after <= now()
        ORDER BY h.send_after LIMIT p_limit FOR UPDATE SKIP LOCKED
    ), waiting AS MATERIALIZED (
        SELECT s.id, s.send_after AS due_at FROM {schema}.scheduled_jobs s
        WHERE s.send_after <= now()
        ORDER BY s.send_after LIMIT p_limit FOR UPDATE SKIP LOCKED
    ), hot_again AS MATERIALIZED (
        SELECT h.id, greatest(h.sent_at, h.run_at) + not_for AS due_at FROM {schema}.jobs_hot h
        WHERE h.sent_at IS NOT NULL AND h.envelope_whole AND h.state = 'available'
            AND greatest(h.sent_at, h.run_at) <= now() - not_for
        ORDER BY greatest(h.sent_at, h.run_at) LIMIT p_limit FOR UPDATE SKIP LOCKED
    ), waiting_again AS MATERIALIZED (
        SELECT s.id, greatest(s.sent_at, s.run_at) + not_for AS due_at
        FROM {schema}.scheduled_jobs s
        WHERE s.sent_at IS NOT NULL AND s.envelope_whole
            AND greatest(s.sent_at, s.run_at) <= now() - not_for
        ORDER BY greatest(s.sent_at, s.run_at) LIMIT p_limit FOR UPDATE SKIP LOCKED
    ), due AS MATERIALIZED (
        SELECT d.id FROM (
            TABLE hot UNION ALL TABLE waiting
            UNION ALL TABLE hot_again UNION ALL TABLE waiting_again
        ) d
        ORDER BY d.due_at LIMIT p_limit
    ), from_hot AS (
        UPDATE {schema}.jobs_hot j SET send_after = now() + interval '10 seconds', sent_at = NULL
        WHERE j.id = ANY (ARRAY(TABLE due)) RETURNING j.*
    ), from_waiting AS (
        UPDATE {schema}.scheduled_jobs j
        SET send_after = now() + interval '10 seconds', sent_at = NULL
        WHERE j.id = ANY (ARRAY(TABLE due)) RETURNING j.*
    )
    TABLE from_hot UNION ALL TABLE from_waiting;
END
$$;

-- End a job that nobody is to run any more: by an error of ours, which is left to be told, or by
-- the word of the result backend (no error), which is why it may run still.
CREATE FUNCTION {schema}.settle(p_id bigint, p_run_lease bigint, p_state text, p_error text)
RETURNS boolean LANGUAGE plpgsql SET lock_timeout = '500ms' AS $$
DECLARE
    job {schema}.jobs_hot;
    known_as text := (
        SELECT h.task_id FROM {schema}.jobs_hot h WHERE h.id = p_id
        UNION ALL
        SELECT s.task_id FROM {schema}.scheduled_jobs s WHERE s.id = p_id
    );
BEGIN
    IF known_as IS NULL THEN
        RETURN false;
    END IF;
    job := {schema}.take(known_as);
    IF job.id IS DISTINCT FROM p_id OR job.run_lease <> p_run_lease
        OR job.state IN ('completed', 'failed', 'cancelled')
        OR job.state = 'running' AND p_error IS NOT NULL THEN
        RETURN false;
    END IF;
    IF job.state = 'running' THEN
        job.taken_by := 'backend';
    END IF;
    job.state := p_state;
    job.send_after := NULL;
    IF p_error IS NOT NULL THEN
        job.errors := {schema}.with_error(job, p_error);
        job.send_after := now();
    END IF;
    IF p_state = 'completed' THEN
        job.progress := NULL;
        job.committed := NULL;
        job.callbacks := NULL;
        job.envelope := NULL;
        job.envelope_whole := false;
    END IF;
    PERFORM {schema}.put(job);
    RETURN true;
END
$$;

-- Note that the result backend knows of a job's end; p_resends as for sent().
CREATE FUNCTION {schema}.told(p_id bigint, p_run_lease bigint, p_resends integer)
RETURNS void LANGUAGE plpgsql SET lock_timeout = '500ms' AS $$
BEGIN
    UPDATE {schema}.jobs_hot j SET send_after = NULL
    WHERE j.id = p_id AND j.run_lease = p_run_lease AND j.resends = p_resends
        AND j.state IN ('completed', 'failed', 'cancelled');
END
$$;

-- Done, refused (the job expects no callback of this id, or no more) or unknown. An attempt that
-- runs still has it noted, and finds it when it ends to wait for it. A job that waits goes on, or
-- has failed; either way somebody is to be told, so it is unsent.
CREATE FUNCTION {schema}.answer_callback(p_callback_id text, p_answer jsonb)
RETURNS text LANGUAGE plpgsql SET lock_timeout = '500ms' AS $$
DECLARE
    job {schema}.jobs_hot;
    named text := substring(p_callback_id FROM '^([0-9]{1,19})-');
    known_as text;
BEGIN
    IF named::numeric <= 9223372036854775807 THEN
        known_as := (
            SELECT h.task_id FROM {schema}.jobs_hot h WHERE h.id = named::bigint
            UNION ALL
            SELECT s.task_id FROM {schema}.scheduled_jobs s WHERE s.id = named::bigint
        );
    END IF;
    IF known_as IS NULL THEN
        RETURN 'unknown';
    END IF;
    job := {schema}.take(known_as);
    IF job.id IS DISTINCT FROM named::bigint THEN
        RETURN 'unknown';
    END IF;
    IF job.callback_id IS DISTINCT FROM p_callback_id
        OR job.state NOT IN ('running', 'waiting_external') THEN
        RETURN 'refused';
    END IF;
    IF job.state = 'waiting_external' AND p_answer ? 'error' THEN
        job.state := 'failed';
        job.errors := {schema}.with_error(job, 'CallbackFailed: ' || (p_answer ->> 'error'));
        job.finalized_at := now();
        job.send_after := now();
    ELSIF job.state = 'waiting_external' THEN
        job.state := 'available';
        job.send_after := now();
    END IF;
    -- Not put(): the name is to stay, and so does the row.
    UPDATE {schema}.jobs_hot j SET
        state = job.state,
        errors = job.errors,
        finalized_at = job.finalized_at,
        send_after = job.send_after,
        callback_id = NULL,
        callback_timeout_at = NULL,
        callbacks = coalesce(job.callbacks, '{}')
            || jsonb_build_object(job.callback_name, p_answer)
    WHERE j.id = job.id;
    RETURN 'done';
END
$$;

-- A callback has come, with its payload; or whoever was to call says that he cannot.
CREATE FUNCTION {schema}.complete_callback(p_callback_id text, p_payload jsonb)
RETURNS text LANGUAGE sql AS $$
    SELECT {schema}.answer_callback(p_callback_id, jsonb_build_object('payload', p_payload))
$$;

CREATE FUNCTION {schema}.fail_callback(p_callback_id text, p_error text)
RETURNS text LANGUAGE sql AS $$
    SELECT {schema}.answer_callback(p_callback_id, jsonb_build_object('error', p_error))
$$;

-- Cancel a job that waits, ask one that runs to stop. Repeated, it answers the same.
CREATE FUNCTION {schema}.request_cancel(p_task_id text)
RETURNS text LANGUAGE plpgsql SET lock_timeout = '500ms' AS $$
DECLARE
    job {schema}.jobs_hot;
BEGIN
    job := {schema}.take(p_task_id);
    CASE
        WHEN job.id IS NULL THEN
            RETURN 'unknown';
        WHEN job.state = 'cancelled' AND job.cancel_requested THEN
            RETURN 'cancelled';
        WHEN job.state IN ('completed', 'failed', 'cancelled') THEN
            RETURN 'finished';
        WHEN job.state = 'running' THEN
            UPDATE {schema}.jobs_hot j SET cancel_requested = true WHERE j.id = job.id;
            RETURN 'requested';
        ELSE
            job.state := 'cancelled';
            job.cancel_requested := true;
            job.send_after := now();
            PERFORM {schema}.put(job);
            RETURN 'cancelled';
    END CASE;
END
$$;

-- Have a job's message sent again: of one that ended, or, where its progress is to be
-- discarded, of one that waits, too.
CREATE FUNCTION {schema}.resend(p_task_id text, p_keep_progress boolean)
RETURNS text LANGUAGE plpgsql SET lock_timeout = '500ms' AS $$
DECLARE
    job {schema}.jobs_hot;
BEGIN
    job := {schema}.take(p_task_id);
    IF job.id IS NULL THEN
        RETURN 'unknown';
    END IF;
    IF job.state = 'running' OR p_keep_progress
        AND job.state NOT IN ('completed', 'failed', 'cancelled') THEN
        RETURN 'live';
    END IF;
    IF NOT job.envelope_whole THEN
        RETURN 'no_message';
    END IF;
    IF NOT p_keep_progress THEN
        job.progress := NULL;
        job.committed := NULL;
        job.callbacks := NULL;
        job.progress_at := NULL;
        job.progress_generation := 0;
    END IF;
    -- What failed outside is to be asked for anew.
    job.callbacks := (
        SELECT jsonb_object_agg(c.key, c.value) FROM jsonb_each(job.callbacks) c
        WHERE NOT c.value ? 'error'
    );
    job.state := 'available';
    job.run_at := NULL;
    job.send_after := now();
    job.sent_at := NULL;
    job.taken_by := 'operator';
    job.resends := job.resends + 1;
    job.cancel_requested := false;
    job.rescues := 0;
    job.rescues_in_place := 0;
    job.rescue_mark := NULL;
    PERFORM {schema}.put(job);
    RETURN 'done';
END
$$;

-- Replace the checkpoint of a job that is to run again, what was committed too; null takes it away.
-- False if it runs or was completed, null if there is no such job.
CREATE FUNCTION {schema}.edit_checkpoint(p_task_id text, p_metadata jsonb)
RETURNS boolean LANGUAGE plpgsql SET lock_timeout = '500ms' AS $$
DECLARE
    job {schema}.jobs_hot;
    version jsonb;
BEGIN
    IF jsonb_typeof(p_metadata) <> 'object' THEN
        RAISE invalid_parameter_value
            USING MESSAGE = 'a checkpoint is a JSON object, or null to take it away';
    END IF;
    job := {schema}.take(p_task_id);
    IF job.id IS NULL OR job.state IN ('running', 'completed') THEN
        RETURN job.state NOT IN ('running', 'completed');
    END IF;
    -- Unless it names another, it is of the version of the code that left what it replaces.
    version := coalesce(job.progress #> '{metadata,awa_version}', job.committed -> 'awa_version');
    IF version IS NOT NULL THEN
        p_metadata := jsonb_build_object('awa_version', version) || p_metadata;
    END IF;
    -- An object always: what stands there otherwise was perhaps put in by hand.
    job.progress := CASE jsonb_typeof(job.progress) WHEN 'object' THEN job.progress - 'metadata'
        ELSE '{}' END;
    IF p_metadata IS NOT NULL THEN
        job.progress := job.progress || jsonb_build_object('metadata', p_metadata);
    END IF;
    job.progress := nullif(job.progress, '{}');
    job.progress_at := now();
    job.committed := NULL;
    PERFORM {schema}.put(job);
    RETURN true;
END
$$;
