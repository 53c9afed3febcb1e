-- The tables of jobs, their view, and the functions that create, move and end a job.
--
-- The jobs_hot row is the mutex of a task: whoever creates or moves a row takes the hot row
-- first, and looks into scheduled_jobs in a LATER statement of the same transaction. Under READ
-- COMMITTED each statement of a volatile function has a snapshot of its own, taken after the
-- lock; one statement that does both would look with the older one (docs/adr/0003).

CREATE SEQUENCE {schema}.jobs_id_seq AS bigint;

CREATE TABLE {schema}.jobs_hot (
    id bigint PRIMARY KEY DEFAULT nextval('{schema}.jobs_id_seq'),
    task_id text NOT NULL CONSTRAINT jobs_hot_task_id_key UNIQUE
        CHECK (char_length(task_id) <= 512),
    kind text NOT NULL,
    queue text,
    state text NOT NULL CONSTRAINT jobs_hot_state_check CHECK (
        state IN ('available', 'running', 'completed', 'failed', 'cancelled', 'waiting_external')
    ),
    attempt integer NOT NULL DEFAULT 0,
    max_attempts integer,
    args_repr text NOT NULL DEFAULT '',
    kwargs_repr text NOT NULL DEFAULT '',
    envelope bytea,
    envelope_whole boolean NOT NULL DEFAULT false,
    run_token text NOT NULL,
    retries integer NOT NULL DEFAULT 0,
    run_lease bigint NOT NULL DEFAULT 1,
    from_lease bigint,
    attempt_token text,
    worker text,
    progress jsonb,
    progress_generation bigint NOT NULL DEFAULT 0,
    progress_at timestamptz,
    -- Of the checkpoint what the task wrote in transactions of its own: no heartbeat touches it, so
    -- no snapshot that comes late can undo it.
    committed jsonb,
    heartbeat_at timestamptz,
    deadline_at timestamptz,
    -- Seconds without a report after which a running attempt is stalled.
    stall_after double precision,
    stall_policy text NOT NULL DEFAULT 'show' CHECK (stall_policy IN ('show', 'stop')),
    run_at timestamptz,
    -- Not null: unsent, and due to be published then.
    send_after timestamptz,
    -- When the message that it waits for was published; null unless it waits for one that was.
    sent_at timestamptz,
    created_at timestamptz NOT NULL DEFAULT now(),
    attempted_at timestamptz,
    finalized_at timestamptz,
    errors jsonb[] NOT NULL DEFAULT '{}',
    lost_policy text NOT NULL DEFAULT 'fail' CHECK (lost_policy IN ('requeue', 'fail')),
    max_rescues integer NOT NULL DEFAULT 3,
    rescues integer NOT NULL DEFAULT 0,
    rescues_in_place integer NOT NULL DEFAULT 0,
    rescue_mark text,
    -- Who took the job from the attempt of attempt_token, if it did not end by itself.
    taken_by text CHECK (taken_by IN ('rescue', 'backend', 'operator')),
    -- How often an operator had it sent again since its claim.
    resends integer NOT NULL DEFAULT 0,
    cancel_requested boolean NOT NULL DEFAULT false,
    duplicate_at timestamptz,
    -- What the callback that may come is known by; null once it was answered.
    callback_id text,
    -- Which callback of the task it is. Kept until the next claim if the attempt ended to wait for
    -- it: it tells that end from others when the job has gone on since.
    callback_name text,
    callback_timeout_at timestamptz,
    -- Answers of this run's callbacks: name -> {"payload": …} or {"error": …}.
    callbacks jsonb,
    root_id text,
    parent_id text,
    group_id text,
    group_index integer
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05);

-- Waiting jobs change rarely, so their table is packed. The columns and their order are those of
-- jobs_hot: rows move as they are.
CREATE TABLE {schema}.scheduled_jobs (
    LIKE {schema}.jobs_hot INCLUDING DEFAULTS,
    PRIMARY KEY (id),
    CONSTRAINT scheduled_jobs_task_id_key UNIQUE (task_id),
    CONSTRAINT scheduled_jobs_state_check CHECK (state IN ('scheduled', 'retryable'))
);

-- For the look at what runs. A heartbeat changes no column of it, so heartbeats stay HOT.
CREATE INDEX jobs_hot_running ON {schema}.jobs_hot (id) WHERE state = 'running';

-- For the look at what is to be published, and at callbacks that do not come; rarely changed.
CREATE INDEX jobs_hot_unsent ON {schema}.jobs_hot (send_after) WHERE send_after IS NOT NULL;
CREATE INDEX scheduled_jobs_unsent ON {schema}.scheduled_jobs (send_after)
    WHERE send_after IS NOT NULL;
-- For the look at messages that were published and do not come. Nor does a heartbeat change these.
CREATE INDEX jobs_hot_sent ON {schema}.jobs_hot (greatest(sent_at, run_at))
    WHERE sent_at IS NOT NULL AND envelope_whole;
CREATE INDEX scheduled_jobs_sent ON {schema}.scheduled_jobs (greatest(sent_at, run_at))
    WHERE sent_at IS NOT NULL AND envelope_whole;
CREATE INDEX jobs_hot_waiting ON {schema}.jobs_hot (callback_timeout_at)
    WHERE state = 'waiting_external';

-- For reading only, and without the envelope, which holds the arguments in the clear. No function
-- of ours is in it: a reader may call none.
CREATE VIEW {schema}.jobs AS
SELECT id, task_id, kind, queue, state, attempt, max_attempts, args_repr, kwargs_repr, retries,
    run_lease, worker, progress, progress_at, committed, heartbeat_at, deadline_at, stall_after,
    coalesce(
        state = 'running'
            AND extract(epoch FROM now() - greatest(progress_at, attempted_at)) >= stall_after,
        false
    ) AS stalled,
    run_at, send_after, sent_at, created_at, attempted_at, finalized_at, errors, lost_policy,
    max_rescues, rescues, envelope_whole AS resendable, cancel_requested, duplicate_at, callback_id,
    callback_timeout_at, root_id, parent_id, group_id, group_index
FROM {schema}.jobs_hot
UNION ALL
SELECT id, task_id, kind, queue, state, attempt, max_attempts, args_repr, kwargs_repr, retries,
    run_lease, worker, progress, progress_at, committed, heartbeat_at, deadline_at, stall_after,
    false AS stalled,
    run_at, send_after, sent_at, created_at, attempted_at, finalized_at, errors, lost_policy,
    max_rescues, rescues, envelope_whole AS resendable, cancel_requested, duplicate_at, callback_id,
    callback_timeout_at, root_id, parent_id, group_id, group_index
FROM {schema}.scheduled_jobs;

-- What a message says of its task (celery_awa.model.NewAttempt, without the envelope).
CREATE TYPE {schema}.new_attempt AS (
    token text,
    task_id text,
    kind text,
    queue text,
    worker text,
    run_token text,
    run_named boolean,
    from_lease bigint,
    retries integer,
    redelivered boolean,
    max_attempts integer,
    args_repr text,
    kwargs_repr text,
    root_id text,
    parent_id text,
    group_id text,
    group_index integer,
    envelope_whole boolean,
    lost_policy text,
    max_rescues integer,
    -- Seconds that the attempt may run.
    deadline double precision,
    stall_after double precision,
    stall_policy text,
    -- Seconds since the attempt began; null: it begins with its claim.
    began_ago double precision,
    -- True for a message that ends without having been executed.
    unstarted boolean
);

-- An end of an attempt (celery_awa.model.Transition, without the envelope).
CREATE TYPE {schema}.transition AS (
    state text,
    progress jsonb,
    generation bigint,
    error text,
    run_in double precision,
    unsent boolean,
    uncounted boolean,
    envelope_whole boolean,
    -- Of the callback that the job is to wait for, and for how many seconds; null: for ever.
    callback_id text,
    callback_timeout double precision
);

-- Which run a message belongs to, and whether it may have the job:
--   repeat    this very attempt has claimed before: the answer was lost
--   ended     this very attempt has ended
--   fresh     the message begins a new run
--   continue  the message continues this run
--   finished  a late copy of a run that is over, or a used copy while a newer message is awaited
--   older     an attempt that began later has the job
--   held      a live attempt has it which this message does not continue, and its row can bring
--             the task back; for a message that is not executed, any attempt or a run that waits
-- Messages of one run are ordered by (retries, from_lease). A row keeps the retries of the
-- attempt that claimed it last, so the message of a retry is newer than its row even if the
-- lease was not known when it was published.
-- A claim or an end that comes late, after a time without the database, say, never takes a job
-- from an attempt that began after it, whatever the run: that one is the newer.
CREATE FUNCTION {schema}.claim_decision(j {schema}.jobs_hot, a {schema}.new_attempt)
RETURNS text LANGUAGE sql STABLE AS $$
    SELECT CASE
        WHEN j.attempt_token = a.token AND j.state = 'running' THEN 'repeat'
        WHEN j.attempt_token = a.token THEN 'ended'
        WHEN j.attempted_at > now() - make_interval(secs => a.began_ago) THEN 'older'
        WHEN a.unstarted AND (
                j.state = 'running'
                OR a.run_named AND a.run_token <> j.run_token
                    AND j.state NOT IN ('completed', 'failed', 'cancelled')
            ) THEN 'held'
        WHEN a.run_named AND a.run_token <> j.run_token THEN 'fresh'
        WHEN j.state IN ('completed', 'failed', 'cancelled') THEN
            CASE WHEN a.run_named
                    OR a.redelivered
                    OR a.retries > 0
                    OR a.from_lease IS NOT NULL
                    OR a.run_token = j.run_token
                THEN 'finished' ELSE 'fresh' END
        WHEN a.retries > j.retries
            OR a.retries = j.retries AND a.from_lease >= j.run_lease THEN 'continue'
        WHEN j.state IN ('retryable', 'scheduled', 'waiting_external') THEN 'finished'
        -- What an available job waits for may be the message of its last attempt, returned, but
        -- none that was before it: that one would meet a newer attempt or be met by one.
        WHEN j.state = 'available' AND a.retries < j.retries THEN 'finished'
        -- A live attempt, and a message that does not continue it. A used copy is dropped; the
        -- message that the attempt itself came with is dropped if the row can replace it.
        WHEN j.state = 'running' AND (
                a.retries < j.retries
                OR a.from_lease IS NOT NULL
                -- The attempt came with a copy of it that was sent later.
                OR a.retries = j.retries AND j.from_lease IS NOT NULL
                OR j.lost_policy = 'requeue' AND j.envelope_whole
            ) THEN 'held'
        ELSE 'continue'
    END
$$;

-- Give an attempt its row and a new lease.
CREATE FUNCTION {schema}.claim(p_attempt jsonb, p_envelope bytea)
RETURNS TABLE (
    verdict text, id bigint, run_lease bigint, attempt integer, progress jsonb, run_token text,
    committed jsonb, callbacks jsonb
) LANGUAGE plpgsql SET lock_timeout = '500ms' AS $$
#variable_conflict use_column
DECLARE
    a {schema}.new_attempt := jsonb_populate_record(NULL::{schema}.new_attempt, p_attempt);
    job {schema}.jobs_hot;
    waiting {schema}.scheduled_jobs;
    began_at timestamptz := now() - make_interval(secs => coalesce(a.began_ago, 0));
    decision text;
BEGIN
    LOOP
        -- Take the mutex: a row of our own, or the lock on the one that is there.
        INSERT INTO {schema}.jobs_hot AS j (
            task_id, kind, queue, state, attempt, max_attempts, args_repr, kwargs_repr, envelope,
            envelope_whole, run_token, from_lease, retries, attempt_token, worker, heartbeat_at,
            deadline_at, stall_after, stall_policy, attempted_at, lost_policy, max_rescues, root_id,
            parent_id, group_id, group_index
        ) VALUES (
            a.task_id, a.kind, a.queue, 'running', a.retries + 1, a.max_attempts, a.args_repr,
            a.kwargs_repr, p_envelope, a.envelope_whole, a.run_token, a.from_lease, a.retries,
            a.token, a.worker, now(), began_at + make_interval(secs => a.deadline), a.stall_after,
            a.stall_policy, began_at, a.lost_policy, a.max_rescues, a.root_id, a.parent_id,
            a.group_id, a.group_index
        ) ON CONFLICT ON CONSTRAINT jobs_hot_task_id_key DO NOTHING
        RETURNING j.* INTO job;
        IF FOUND THEN
            SELECT s.* INTO waiting FROM {schema}.scheduled_jobs s
            WHERE s.task_id = a.task_id FOR UPDATE;
            IF NOT FOUND THEN
                RETURN QUERY SELECT 'yours', job.id, job.run_lease, job.attempt, job.progress,
                    job.run_token, job.committed, job.callbacks;
                RETURN;
            END IF;
            EXIT;
        END IF;
        SELECT j.* INTO job FROM {schema}.jobs_hot j WHERE j.task_id = a.task_id FOR UPDATE;
        EXIT WHEN FOUND;
        -- It was moved or deleted between the two statements: again.
    END LOOP;

    IF waiting.id IS NOT NULL THEN
        -- The row that was our mutex makes room; its index entry goes on holding others off
        -- until this transaction ends.
        DELETE FROM {schema}.jobs_hot j WHERE j.id = job.id;
        job := waiting;
        decision := {schema}.claim_decision(job, a);
        IF decision IN ('fresh', 'continue') THEN
            DELETE FROM {schema}.scheduled_jobs s WHERE s.id = waiting.id;
            job.state := 'running';
            INSERT INTO {schema}.jobs_hot SELECT job.*;
        END IF;
    ELSE
        decision := {schema}.claim_decision(job, a);
    END IF;

    IF decision = 'held' AND job.state = 'running' AND a.unstarted IS NOT TRUE THEN
        -- The copy is dropped, perhaps because its attempt died a moment ago: two missed
        -- heartbeats make the row stale now. The owner's next heartbeat takes the mark away.
        UPDATE {schema}.jobs_hot j SET duplicate_at = now() WHERE j.id = job.id;
    END IF;

    IF decision IN ('fresh', 'continue') THEN
        UPDATE {schema}.jobs_hot j SET
            kind = a.kind,
            queue = a.queue,
            state = 'running',
            attempt = CASE decision WHEN 'fresh' THEN a.retries
                ELSE greatest(j.attempt, a.retries) END + 1,
            max_attempts = a.max_attempts,
            args_repr = a.args_repr,
            kwargs_repr = a.kwargs_repr,
            envelope = p_envelope,
            envelope_whole = a.envelope_whole,
            run_token = CASE decision WHEN 'fresh' THEN a.run_token ELSE j.run_token END,
            from_lease = a.from_lease,
            retries = a.retries,
            run_lease = j.run_lease + 1,
            attempt_token = a.token,
            worker = a.worker,
            progress = CASE decision WHEN 'fresh' THEN NULL ELSE j.progress END,
            progress_generation = 0,
            progress_at = CASE decision WHEN 'fresh' THEN NULL ELSE j.progress_at END,
            committed = CASE decision WHEN 'fresh' THEN NULL ELSE j.committed END,
            heartbeat_at = now(),
            deadline_at = began_at + make_interval(secs => a.deadline),
            stall_after = a.stall_after,
            stall_policy = a.stall_policy,
            run_at = NULL,
            send_after = NULL,
            sent_at = NULL,
            created_at = CASE decision WHEN 'fresh' THEN now() ELSE j.created_at END,
            attempted_at = began_at,
            finalized_at = NULL,
            errors = CASE decision WHEN 'fresh' THEN '{}' ELSE j.errors END,
            lost_policy = a.lost_policy,
            max_rescues = a.max_rescues,
            rescues = CASE decision WHEN 'fresh' THEN 0 ELSE j.rescues END,
            rescues_in_place = CASE decision WHEN 'fresh' THEN 0 ELSE j.rescues_in_place END,
            rescue_mark = CASE decision WHEN 'fresh' THEN NULL ELSE j.rescue_mark END,
            taken_by = NULL,
            resends = 0,
            cancel_requested = decision = 'continue' AND j.cancel_requested,
            duplicate_at = NULL,
            callback_id = NULL,
            callback_name = NULL,
            callback_timeout_at = NULL,
            callbacks = CASE decision WHEN 'fresh' THEN NULL ELSE j.callbacks END,
            root_id = a.root_id,
            parent_id = a.parent_id,
            group_id = a.group_id,
            group_index = a.group_index
        WHERE j.id = job.id
        RETURNING j.* INTO job;
    END IF;
    RETURN QUERY SELECT
        CASE WHEN decision IN ('repeat', 'fresh', 'continue') THEN 'yours'
            WHEN decision = 'older' THEN 'held'
            ELSE decision END,
        job.id, job.run_lease, job.attempt, job.progress, job.run_token, job.committed,
        job.callbacks;
END
$$;

-- What an attempt reported, laid over the progress that its claim brought: metadata key by key,
-- the rest as a whole (celery_awa.progress.ProgressBuffer.lay_over does the same in the worker).
CREATE FUNCTION {schema}.laid_over(p_kept jsonb, p_reported jsonb)
RETURNS jsonb LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE
        WHEN jsonb_typeof(p_kept) IS DISTINCT FROM 'object'
            OR jsonb_typeof(p_reported) IS DISTINCT FROM 'object' THEN p_reported
        ELSE p_reported
            || CASE WHEN p_reported - 'metadata' = '{}' THEN p_kept - 'metadata' ELSE '{}' END
            || CASE WHEN jsonb_typeof(p_kept -> 'metadata') = 'object'
                THEN jsonb_build_object(
                    'metadata', (p_kept -> 'metadata') || coalesce(p_reported -> 'metadata', '{}')
                )
                ELSE '{}' END
    END
$$;

-- The errors of a job with one more; the last 20 are kept.
CREATE FUNCTION {schema}.with_error(j {schema}.jobs_hot, p_error text)
RETURNS jsonb[] LANGUAGE sql STABLE AS $$
    SELECT array_append(
        j.errors[greatest(1, cardinality(j.errors) - 18):],
        jsonb_build_object('attempt', j.attempt, 'at', now(), 'error', p_error)
    )
$$;

-- The guarded transition that ends an attempt: done, repeated (done before by this attempt) or
-- gone; missing where there is no such row any more. A transition without a state deletes the row.
-- What was settled by the word of the result backend ended as the attempt says; it is given what
-- the attempt alone knows, its last snapshot and its error.
-- Where cancellation was asked for, a job that would wait is cancelled instead, and the attempt is
-- told that the job is gone: it must not publish a message.
-- A job that would wait for a callback which has come already does not wait: it is sent again at
-- once, or has failed.
-- An attempt that never heard of its lease has not read what its claim brought: p_over_kept lays
-- its snapshot over that. One that has may have discarded it on purpose.
CREATE FUNCTION {schema}.end_attempt(
    p_id bigint, p_run_lease bigint, p_token text, p_transition jsonb, p_envelope bytea,
    p_over_kept boolean DEFAULT false
) RETURNS text LANGUAGE plpgsql SET lock_timeout = '500ms' AS $$
DECLARE
    t {schema}.transition := jsonb_populate_record(NULL::{schema}.transition, p_transition);
    job {schema}.jobs_hot;
    waits constant boolean := t.state = 'waiting_external';
    answered boolean;
    cancelled boolean;
BEGIN
    SELECT j.* INTO job FROM {schema}.jobs_hot j
    WHERE j.id = p_id AND j.run_lease = p_run_lease
        AND (j.state = 'running'
            OR j.taken_by = 'backend' AND j.attempt_token = p_token AND j.state = t.state)
    FOR UPDATE;
    IF NOT FOUND THEN
        RETURN {schema}.ended_before(p_id, p_run_lease, p_token, t.state);
    END IF;
    IF t.state IS NULL THEN
        DELETE FROM {schema}.jobs_hot j WHERE j.id = p_id;
        RETURN 'done';
    END IF;

    IF t.progress IS NOT NULL AND t.generation > job.progress_generation THEN
        -- With nothing of this attempt in the row yet, what is there came with the claim.
        job.progress := CASE WHEN p_over_kept AND job.progress_generation = 0
            THEN {schema}.laid_over(job.progress, t.progress) ELSE t.progress END;
        job.progress_generation := t.generation;
        job.progress_at := now();
    END IF;
    IF t.state = 'completed' THEN
        job.progress := NULL;
        job.committed := NULL;
        job.callbacks := NULL;
        job.envelope := NULL;
        job.envelope_whole := false;
    ELSIF p_envelope IS NOT NULL THEN
        job.envelope := p_envelope;
        job.envelope_whole := t.envelope_whole;
    END IF;
    cancelled := job.cancel_requested
        AND t.state IN ('available', 'retryable', 'scheduled', 'waiting_external');
    answered := waits AND t.callback_id IS DISTINCT FROM job.callback_id;
    IF answered THEN
        t.error := coalesce(
            'CallbackFailed: ' || (job.callbacks -> job.callback_name ->> 'error'), t.error
        );
        t.state := CASE WHEN t.error IS NULL THEN 'available' ELSE 'failed' END;
    END IF;
    IF t.error IS NOT NULL THEN
        job.errors := {schema}.with_error(job, t.error);
    END IF;
    IF t.uncounted THEN
        job.attempt := job.attempt - 1;
    END IF;
    job.state := CASE WHEN cancelled THEN 'cancelled' ELSE t.state END;
    -- At most a hundred years: Python has no year above 9999 to read it back with.
    job.run_at := CASE WHEN job.state NOT IN ('completed', 'failed', 'cancelled') THEN now()
        + make_interval(secs => CASE WHEN t.run_in > 3155760000 THEN 3155760000 ELSE t.run_in END)
        END;
    -- Due at once: an end that is to be told, and a message that nobody else sends, since the copy
    -- that came back was dropped.
    job.send_after := CASE
        WHEN cancelled OR answered THEN now()
        WHEN t.unsent IS NOT TRUE OR waits THEN NULL
        WHEN t.state IN ('failed', 'cancelled') THEN now()
        WHEN t.state = 'available' AND job.duplicate_at IS NOT NULL THEN now()
        ELSE now() + interval '10 seconds' END;
    -- Who does not ask for a message has published it.
    job.sent_at := CASE WHEN job.state IN ('available', 'retryable', 'scheduled')
        AND t.unsent IS NOT TRUE AND NOT waits THEN now() END;
    job.callback_id := CASE job.state WHEN 'waiting_external' THEN job.callback_id END;
    job.callback_name := CASE WHEN waits AND NOT cancelled THEN job.callback_name END;
    job.callback_timeout_at := CASE job.state WHEN 'waiting_external' THEN now() + make_interval(
        secs => CASE WHEN t.callback_timeout > 3155760000 THEN 3155760000
            ELSE t.callback_timeout END) END;
    job.taken_by := NULL;
    job.duplicate_at := NULL;
    job.deadline_at := NULL;
    job.finalized_at := CASE WHEN job.state IN ('completed', 'failed', 'cancelled') THEN now() END;

    IF job.state IN ('retryable', 'scheduled') THEN
        -- Only a row that leaves jobs_hot here enters scheduled_jobs: the lock above is held.
        WITH moved AS (DELETE FROM {schema}.jobs_hot j WHERE j.id = p_id RETURNING j.id)
        INSERT INTO {schema}.scheduled_jobs SELECT job.* FROM moved;
    ELSE
        UPDATE {schema}.jobs_hot j SET
            state = job.state, attempt = job.attempt, progress = job.progress,
            progress_generation = job.progress_generation, progress_at = job.progress_at,
            committed = job.committed, callback_id = job.callback_id,
            callback_name = job.callback_name, callback_timeout_at = job.callback_timeout_at,
            callbacks = job.callbacks, envelope = job.envelope,
            envelope_whole = job.envelope_whole, errors = job.errors,
            deadline_at = job.deadline_at, run_at = job.run_at, send_after = job.send_after,
            sent_at = job.sent_at, finalized_at = job.finalized_at,
            duplicate_at = job.duplicate_at, taken_by = job.taken_by
        WHERE j.id = p_id;
    END IF;
    IF cancelled THEN
        RETURN 'gone';
    END IF;
    RETURN 'done';
END
$$;

-- Whether this attempt made this very transition before (its answer was lost), or another did. A
-- job that was to wait for a callback may have gone on since by its answer.
CREATE FUNCTION {schema}.ended_before(
    p_id bigint, p_run_lease bigint, p_token text, p_state text
) RETURNS text LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN p_state IS NULL AND count(*) = 0
        OR bool_or(j.run_lease = p_run_lease AND j.attempt_token = p_token AND j.taken_by IS NULL
            AND CASE WHEN j.callback_name IS NULL THEN j.state = p_state
                ELSE p_state = 'waiting_external' END)
        THEN 'repeated'
        -- Nobody has it: it was deleted, or a failover forgot it.
        WHEN count(*) = 0 THEN 'missing'
        ELSE 'gone' END
    FROM (
        SELECT run_lease, attempt_token, state, taken_by, callback_name
        FROM {schema}.jobs_hot WHERE id = p_id
        UNION ALL
        SELECT run_lease, attempt_token, state, taken_by, callback_name
        FROM {schema}.scheduled_jobs WHERE id = p_id
    ) j
$$;

-- Claim and end in one transaction: for attempts that never claimed, and for those whose claim
-- was never answered (it is told apart by the attempt's token).
CREATE FUNCTION {schema}.end_unclaimed(p_attempt jsonb, p_envelope bytea, p_transition jsonb)
RETURNS TABLE (answer text, id bigint, run_lease bigint, run_token text)
LANGUAGE plpgsql SET lock_timeout = '500ms' AS $$
#variable_conflict use_column
DECLARE
    claimed record;
BEGIN
    SELECT * INTO claimed FROM {schema}.claim(p_attempt, p_envelope);
    RETURN QUERY SELECT
        CASE WHEN claimed.verdict IN ('yours', 'ended')
            THEN {schema}.end_attempt(
                claimed.id, claimed.run_lease, p_attempt ->> 'token', p_transition, p_envelope,
                p_over_kept => true
            )
            ELSE 'gone' END,
        claimed.id, claimed.run_lease, claimed.run_token;
END
$$;

-- Completed rows for attempts that succeeded before they were claimed. Inserts new tasks only,
-- in the order of their ids; returns the tokens of the others, to be ended one by one: batched
-- upserts deadlock with one another and with heartbeats.
CREATE FUNCTION {schema}.record_completed(p_attempts jsonb)
RETURNS SETOF text LANGUAGE plpgsql SET lock_timeout = '500ms' AS $$
DECLARE
    recorded text[];
BEGIN
    WITH added AS (
        INSERT INTO {schema}.jobs_hot AS j (
            task_id, kind, queue, state, attempt, max_attempts, args_repr, kwargs_repr,
            run_token, retries, attempt_token, worker, attempted_at, finalized_at, lost_policy,
            max_rescues, root_id, parent_id, group_id, group_index
        )
        SELECT a.task_id, a.kind, a.queue, 'completed', a.retries + 1, a.max_attempts,
            a.args_repr, a.kwargs_repr, a.run_token, a.retries, a.token, a.worker,
            now() - make_interval(secs => coalesce(a.began_ago, 0)), now(), a.lost_policy,
            a.max_rescues, a.root_id, a.parent_id, a.group_id, a.group_index
        FROM jsonb_populate_recordset(NULL::{schema}.new_attempt, p_attempts) a
        ORDER BY a.task_id
        ON CONFLICT ON CONSTRAINT jobs_hot_task_id_key DO NOTHING
        RETURNING j.task_id
    )
    SELECT array_agg(task_id) INTO recorded FROM added;

    -- A task that waits in the other table is not new after all.
    WITH waiting AS (
        DELETE FROM {schema}.jobs_hot j
        USING {schema}.scheduled_jobs s
        WHERE j.task_id = ANY (recorded) AND s.task_id = j.task_id
        RETURNING j.task_id
    )
    SELECT array_agg(r) INTO recorded
    FROM unnest(recorded) r WHERE r NOT IN (SELECT task_id FROM waiting);

    RETURN QUERY
    SELECT a.token FROM jsonb_populate_recordset(NULL::{schema}.new_attempt, p_attempts) a
    WHERE a.task_id <> ALL (coalesce(recorded, '{}'))
        OR a.token <> (SELECT j.attempt_token FROM {schema}.jobs_hot j WHERE j.task_id = a.task_id);
END
$$;

-- Proof of life for many attempts in one statement. With p_skip_locked, rows that others hold
-- are left out instead of waited for (1.8 times the cost, so only after a lock timeout).
CREATE FUNCTION {schema}.heartbeat(
    p_ids bigint[], p_run_leases bigint[], p_skip_locked boolean
) RETURNS TABLE (
    id bigint, run_lease bigint, progress_generation bigint, cancel_requested boolean
) LANGUAGE plpgsql SET lock_timeout = '500ms' AS $$
#variable_conflict use_column
BEGIN
    IF p_skip_locked THEN
        RETURN QUERY
        UPDATE {schema}.jobs_hot j SET heartbeat_at = now(), duplicate_at = NULL
        FROM (
            SELECT l.id FROM {schema}.jobs_hot l
            JOIN unnest(p_ids, p_run_leases) AS b (id, run_lease) USING (id, run_lease)
            WHERE l.state = 'running' FOR UPDATE OF l SKIP LOCKED
        ) free
        WHERE j.id = free.id
        RETURNING j.id, j.run_lease, j.progress_generation, j.cancel_requested;
    ELSE
        RETURN QUERY
        UPDATE {schema}.jobs_hot j SET heartbeat_at = now(), duplicate_at = NULL
        FROM unnest(p_ids, p_run_leases) AS b (id, run_lease)
        WHERE j.id = b.id AND j.run_lease = b.run_lease AND j.state = 'running'
        RETURNING j.id, j.run_lease, j.progress_generation, j.cancel_requested;
    END IF;
END
$$;

-- Heartbeat and snapshot. The generation is compared in SET, never in WHERE: an older snapshot
-- must not undo a newer one, and must not read as a lost lease. The stored generation returned
-- is what the caller may take as confirmed.
CREATE FUNCTION {schema}.heartbeat_with_progress(
    p_ids bigint[], p_run_leases bigint[], p_progress text[], p_generations bigint[],
    p_skip_locked boolean
) RETURNS TABLE (
    id bigint, run_lease bigint, progress_generation bigint, cancel_requested boolean
) LANGUAGE plpgsql SET lock_timeout = '500ms' AS $$
#variable_conflict use_column
DECLARE
    free bigint[] := p_ids;
BEGIN
    IF p_skip_locked THEN
        SELECT coalesce(array_agg(f.id), '{}') INTO free FROM (
            SELECT l.id FROM {schema}.jobs_hot l
            JOIN unnest(p_ids, p_run_leases) AS b (id, run_lease) USING (id, run_lease)
            WHERE l.state = 'running' FOR UPDATE OF l SKIP LOCKED
        ) f;
    END IF;
    RETURN QUERY
    UPDATE {schema}.jobs_hot j SET
        heartbeat_at = now(),
        duplicate_at = NULL,
        progress = CASE WHEN b.generation > j.progress_generation
            THEN coalesce(b.progress::jsonb, j.progress) ELSE j.progress END,
        progress_at = CASE WHEN b.generation > j.progress_generation
            THEN now() ELSE j.progress_at END,
        progress_generation = greatest(b.generation, j.progress_generation)
    FROM unnest(p_ids, p_run_leases, p_progress, p_generations)
        AS b (id, run_lease, progress, generation)
    WHERE j.id = b.id AND j.run_lease = b.run_lease AND j.state = 'running'
        AND (NOT p_skip_locked OR j.id = ANY (free))
    RETURNING j.id, j.run_lease, j.progress_generation, j.cancel_requested;
END
$$;

-- Note what the callback that this attempt is going to wait for will be known by. An earlier answer
-- of that name counts no more, nor does an earlier callback.
CREATE FUNCTION {schema}.expect_callback(
    p_id bigint, p_run_lease bigint, p_token text, p_callback_id text, p_name text
) RETURNS boolean LANGUAGE plpgsql SET lock_timeout = '500ms' AS $$
BEGIN
    UPDATE {schema}.jobs_hot j SET
        callback_id = p_callback_id,
        callback_name = p_name,
        callbacks = nullif(j.callbacks - p_name, '{}')
    WHERE j.id = p_id AND j.run_lease = p_run_lease AND j.attempt_token = p_token
        AND j.state = 'running';
    RETURN FOUND;
END
$$;

-- Write into the checkpoint of a running attempt, in the transaction of whoever calls: his own
-- work and this are committed together, or neither is. He says how long to wait for the lock.
CREATE FUNCTION {schema}.checkpoint_in(
    p_id bigint, p_run_lease bigint, p_token text, p_version integer, p_values jsonb
) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    UPDATE {schema}.jobs_hot j
    SET committed = {schema}.committed_over(j.committed, p_version, p_values)
    WHERE j.id = p_id AND j.run_lease = p_run_lease AND j.attempt_token = p_token
        AND j.state = 'running';
    RETURN FOUND;
END
$$;

-- Who commits is alive, and has something to show: noted as the last thing before the commit, by
-- the clock. No heartbeat comes through while his transaction holds the row, however long that is.
CREATE FUNCTION {schema}.note_commit() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    UPDATE {schema}.jobs_hot j
    SET heartbeat_at = clock_timestamp(), progress_at = clock_timestamp(), duplicate_at = NULL
    WHERE j.id = NEW.id AND j.run_lease = NEW.run_lease AND j.state = 'running';
    RETURN NULL;
END
$$;
CREATE CONSTRAINT TRIGGER note_commit AFTER UPDATE OF committed ON {schema}.jobs_hot
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
    WHEN (NEW.state = 'running' AND NEW.run_lease = OLD.run_lease)
    EXECUTE FUNCTION {schema}.note_commit();

-- Values merged over those that were committed before, key by key, and the states of loops name by
-- name. What another version of the task's code committed is left behind.
CREATE FUNCTION {schema}.committed_over(p_kept jsonb, p_version integer, p_values jsonb)
RETURNS jsonb LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE
        WHEN jsonb_typeof(p_kept) IS DISTINCT FROM 'object'
            OR coalesce(p_kept -> 'awa_version', '0') <> to_jsonb(p_version) THEN p_values
        ELSE p_kept || p_values
            || CASE WHEN jsonb_typeof(p_kept -> 'awa_committed') = 'object'
                    AND jsonb_typeof(p_values -> 'awa_committed') = 'object'
                THEN jsonb_build_object(
                    'awa_committed', (p_kept -> 'awa_committed') || (p_values -> 'awa_committed')
                )
                ELSE '{}' END
    END
$$;

-- Note that the message which a job waits for was published. Hits no row where the message was
-- quicker and the next attempt has claimed. p_resends tells apart what an operator had sent again
-- after the job was finished: an earlier message, dropped meanwhile, does not stand for that.
CREATE FUNCTION {schema}.sent(p_id bigint, p_run_lease bigint, p_resends integer)
RETURNS void LANGUAGE plpgsql SET lock_timeout = '500ms' AS $$
BEGIN
    UPDATE {schema}.jobs_hot j SET send_after = NULL, sent_at = now()
    WHERE j.id = p_id AND j.run_lease = p_run_lease AND j.resends = p_resends
        AND j.state = 'available';
    IF NOT FOUND THEN
        UPDATE {schema}.scheduled_jobs s SET send_after = NULL, sent_at = now()
        WHERE s.id = p_id AND s.run_lease = p_run_lease AND s.resends = p_resends;
    END IF;
END
$$;
