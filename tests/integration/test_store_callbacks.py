"""Callbacks: jobs that wait for an answer from outside; answers that come early, late or twice."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from celery_awa.errors import RowLocked
from celery_awa.model import (
    Answer,
    Callback,
    Ended,
    JobState,
    Lease,
    Rescue,
    Resend,
    Transition,
    UnsentJob,
    Verdict,
)
from celery_awa.store.canonical import CanonicalStore
from tests.conftest import SCHEMA
from tests.waiting import eventually

from .jobs import (
    HOUR,
    OLD,
    WHOLE,
    Database,
    OpenStore,
    attempt,
    claimed,
    lost_attempt,
    retried_job,
    running,
    snapshot,
    stored,
)

pytest_plugins = ["tests.integration.stores"]

Reply = Callable[[CanonicalStore, str], Callback]


def complete(store: CanonicalStore, token: str) -> Callback:
    return store.complete_callback(token, '{"paid": 7}')


def fail(store: CanonicalStore, token: str) -> Callback:
    return store.fail_callback(token, "refused by the bank")


replies = pytest.mark.parametrize("reply", [complete, fail])
PAID = {"payload": {"paid": 7}}
REFUSED = {"error": "refused by the bank"}
FAILURE = "CallbackFailed: refused by the bank"


def expecting(
    store: CanonicalStore, task_id: str = "task", *, name: str = "callback", **fields: Any
) -> tuple[Lease, str]:
    """A running attempt that expects a callback, and the token that it may be answered with."""
    _, lease = claimed(store, lost_attempt("first", task_id, **fields))
    token = f"{lease.job_id}-secret"
    assert store.expect_callback(lease, "first", token, name)
    return lease, token


def park(token: str | None, timeout: float | None = None) -> Transition:
    """The end of an attempt that waits for it."""
    return Transition(
        JobState.WAITING_EXTERNAL,
        snapshot(),
        uncounted=True,
        envelope=WHOLE,
        callback_id=token,
        callback_timeout=timeout,
    )


def parked(
    store: CanonicalStore, task_id: str = "task", *, timeout: float | None = None, **fields: Any
) -> tuple[Lease, str]:
    """A job that waits for a callback, and the token."""
    lease, token = expecting(store, task_id, **fields)
    assert store.end(lease, "first", park(token, timeout)).answer is Answer.DONE
    return lease, token


def due(store: CanonicalStore) -> list[UnsentJob]:
    return store.unsent(resend_after=HOUR)


# Waiting.


def test_a_job_that_waits_keeps_its_progress_is_not_counted_and_needs_no_message(
    store: CanonicalStore, database: Database
) -> None:
    lease, token = parked(store, timeout=60)

    job = database.row()
    assert (job["state"], job["attempt"], job["run_lease"]) == ("waiting_external", 0, 1)
    assert (job["progress"], job["callback_id"]) == (stored(), token)
    assert (job["send_after"], job["sent_at"], job["finalized_at"]) == (None, None, None)
    now = database.execute("SELECT now()")[0]["now"]
    assert timedelta(seconds=50) < job["callback_timeout_at"] - now <= timedelta(seconds=60)
    assert due(store) == []
    assert store.lost(OLD) == []
    shown = store.get_job("task")
    assert shown is not None
    assert (shown.callback_id, shown.callback_timeout_at) == (token, job["callback_timeout_at"])
    assert store.heartbeat([lease]) == {}


def test_a_job_waits_as_long_as_it_is_told_to(store: CanonicalStore, database: Database) -> None:
    for task_id, timeout in (("for ever", None), ("long", 1e300), ("unbounded", float("inf"))):
        parked(store, task_id, timeout=timeout)

    assert database.row("for ever")["callback_timeout_at"] is None
    job = store.get_job("long")
    assert job is not None
    assert job.callback_timeout_at is not None
    assert job.callback_timeout_at.year < 9999
    assert store.rescue([Lease(one.id, one.run_lease) for one in store.list_jobs()], OLD) == {}


def test_a_completed_callback_sends_the_job_on_at_once_from_its_checkpoint_with_the_payload(
    store: CanonicalStore, database: Database
) -> None:
    lease, token = parked(store, timeout=60)

    assert complete(store, token) is Callback.DONE

    job = database.row()
    assert (job["state"], job["progress"]) == ("available", stored())
    assert (job["callback_id"], job["callback_timeout_at"]) == (None, None)
    assert [(one.lease, one.state) for one in due(store)] == [(lease, JobState.AVAILABLE)]
    claim, _ = claimed(store, lost_attempt("second", from_lease=1))
    assert (claim.attempt, claim.progress) == (1, stored())
    assert claim.callbacks == {"callback": PAID}


def test_a_failed_callback_fails_the_job_and_that_is_to_be_told(
    store: CanonicalStore, database: Database
) -> None:
    lease, token = parked(store, timeout=60)

    assert fail(store, token) is Callback.DONE

    job = database.row()
    assert (job["state"], job["progress"]) == ("failed", stored())
    assert (job["callback_id"], job["callback_timeout_at"]) == (None, None)
    assert job["finalized_at"] is not None
    (told,) = due(store)
    assert (told.lease, told.state, told.error) == (lease, JobState.FAILED, FAILURE)


@pytest.mark.parametrize("payload", [None, 0, "", [], {}, "ü" * 30_000, {"a": [1, {"b": None}]}])
def test_any_payload_comes_as_it_was_given(store: CanonicalStore, payload: Any) -> None:
    _, token = parked(store, name="päy'ment")

    store.complete_callback(token, json.dumps(payload))

    claim, _ = claimed(store, lost_attempt("second", from_lease=1))
    assert claim.callbacks == {"päy'ment": {"payload": payload}}


@pytest.mark.parametrize(
    ("policy", "rescue"), [("requeue", Rescue.REQUEUED), ("fail", Rescue.FAILED)]
)
def test_a_callback_that_does_not_come_in_time_is_handled_by_policy(
    store: CanonicalStore, database: Database, policy: str, rescue: Rescue
) -> None:
    lease, token = parked(store, timeout=0.01, lost_policy=policy)
    in_time, _ = parked(store, "in time", timeout=60)
    database.execute("SELECT pg_sleep(0.02)")

    assert [job.lease for job in store.lost(OLD)] == [lease]
    assert store.rescue([lease, in_time], OLD) == {lease: rescue}

    assert complete(store, token) is fail(store, token) is Callback.REFUSED
    job = database.row()
    assert job["errors"][-1]["error"] == "TimeoutError: no callback came in time"
    if policy == "fail":
        assert (job["state"], job["progress"]) == ("failed", stored())
    else:
        claim, _ = claimed(store, lost_attempt("second", from_lease=1))
        assert (claim.progress, claim.callbacks) == (stored(), {})


# Answers that come early.


def test_an_answer_that_comes_while_the_attempt_runs_leaves_it_running(
    store: CanonicalStore, database: Database
) -> None:
    lease, token = expecting(store)

    assert complete(store, token) is Callback.DONE

    job = database.row()
    assert (job["state"], job["callback_id"], job["callbacks"]) == (
        "running",
        None,
        {"callback": PAID},
    )
    assert job["send_after"] is None
    assert set(store.heartbeat([lease])) == {lease}


def test_a_job_does_not_wait_for_what_has_come_already(
    store: CanonicalStore, database: Database
) -> None:
    lease, token = expecting(store)
    complete(store, token)

    assert store.end(lease, "first", park(token, 60)) == Ended(Answer.DONE, lease)

    job = database.row()
    assert (job["state"], job["attempt"], job["progress"]) == ("available", 0, stored())
    assert job["callback_timeout_at"] is None
    assert [one.state for one in due(store)] == [JobState.AVAILABLE]
    assert claimed(store, lost_attempt("second", from_lease=1))[0].callbacks == {"callback": PAID}


def test_a_job_fails_that_would_wait_for_what_has_failed_already(
    store: CanonicalStore, database: Database
) -> None:
    lease, token = expecting(store)
    fail(store, token)
    assert database.row()["state"] == "running"

    assert store.end(lease, "first", park(token, 60)) == Ended(Answer.DONE, lease)

    job = database.row()
    assert (job["state"], job["progress"]) == ("failed", stored())
    assert job["finalized_at"] is not None
    assert [(one.state, one.error) for one in due(store)] == [(JobState.FAILED, FAILURE)]


def test_a_job_does_not_wait_for_a_callback_that_nobody_can_answer_any_more(
    store: CanonicalStore, database: Database
) -> None:
    lease = running(store)

    assert store.end(lease, "first", park(f"{lease.job_id}-lost")).answer is Answer.DONE

    assert database.row()["state"] == "available"
    assert len(due(store)) == 1


@replies
def test_an_early_answer_reaches_the_next_attempt_however_this_one_ends(
    store: CanonicalStore, database: Database, reply: Reply
) -> None:
    lease, token = expecting(store)
    reply(store, token)
    store.end(lease, "first", Transition(JobState.RETRYABLE, unsent=True, envelope=WHOLE))

    claim, _ = claimed(store, lost_attempt("second", retries=1))

    assert claim.callbacks == {"callback": PAID if reply is complete else REFUSED}


def test_answers_are_kept_by_name_and_a_new_token_forgets_the_answer_of_its_name(
    store: CanonicalStore,
) -> None:
    lease, token = expecting(store, name="first wait")
    complete(store, token)
    again = f"{lease.job_id}-again"
    assert store.expect_callback(lease, "first", again, "second wait")
    complete(store, again)
    claim, second = claimed(store, lost_attempt("second", retries=1))
    assert claim.callbacks == {"first wait": PAID, "second wait": PAID}

    assert store.expect_callback(second, "second", f"{lease.job_id}-third", "first wait")

    claim, _ = claimed(store, lost_attempt("third", retries=2))
    assert claim.callbacks == {"second wait": PAID}


def test_only_the_newest_token_counts(store: CanonicalStore, database: Database) -> None:
    lease, token = expecting(store, name="first wait")
    newer = f"{lease.job_id}-newer"
    store.expect_callback(lease, "first", newer, "second wait")

    assert complete(store, token) is Callback.REFUSED
    assert complete(store, newer) is Callback.DONE
    assert database.row()["callbacks"] == {"second wait": PAID}


def test_who_has_lost_the_job_can_expect_no_callback(
    store: CanonicalStore, database: Database
) -> None:
    lease, token = expecting(store)
    _, newer = claimed(store, lost_attempt("second", retries=1))
    ended = running(store, "ended")
    store.end(ended, "first", Transition(JobState.FAILED))
    before = [database.row(), database.row("ended")]

    assert not store.expect_callback(lease, "first", token, "callback")
    assert not store.expect_callback(newer, "first", token, "callback")
    assert not store.expect_callback(ended, "first", f"{ended.job_id}-secret", "callback")
    assert not store.expect_callback(Lease(0, 1), "first", "0-secret", "callback")
    assert [database.row(), database.row("ended")] == before


# Answers that are too late, or none.


@pytest.mark.parametrize("state", [state for state in JobState if state is not JobState.RUNNING])
@replies
def test_a_token_of_an_attempt_that_ended_otherwise_is_refused(
    store: CanonicalStore, database: Database, reply: Reply, state: JobState
) -> None:
    lease, token = expecting(store)
    store.end(lease, "first", Transition(state, snapshot(), unsent=True, envelope=WHOLE))
    before = database.row()

    assert before["callback_id"] is None
    assert reply(store, token) is Callback.REFUSED
    assert database.row() == before


@replies
def test_a_token_of_an_older_attempt_is_refused(
    store: CanonicalStore, database: Database, reply: Reply
) -> None:
    _, token = parked(store)
    claimed(store, lost_attempt("second", retries=1))
    before = database.row()

    assert reply(store, token) is Callback.REFUSED
    assert database.row() == before


@pytest.mark.parametrize(
    "take",
    [
        lambda store: store.request_cancel("task"),
        lambda store: store.resend("task", keep_progress=False),
        lambda store: complete(store, store.get_job("task").callback_id),
        lambda store: fail(store, store.get_job("task").callback_id),
    ],
    ids=["cancelled", "restarted", "completed", "failed"],
)
@replies
def test_a_job_that_has_gone_on_refuses_the_answer(
    store: CanonicalStore, database: Database, reply: Reply, take: Callable[[CanonicalStore], Any]
) -> None:
    _, token = parked(store)
    take(store)
    before = database.row()

    assert reply(store, token) is Callback.REFUSED
    assert database.row() == before


@replies
def test_a_job_that_waits_for_a_message_refuses_the_answer(
    store: CanonicalStore, database: Database, reply: Reply
) -> None:
    lease = retried_job(store, "task", JobState.RETRYABLE)
    token = f"{lease.job_id}-secret"
    database.execute("UPDATE {schema}.scheduled_jobs SET callback_id = %s", token)
    before = database.row()

    assert reply(store, token) is Callback.REFUSED
    assert database.row() == before


@pytest.mark.parametrize(
    "token",
    [
        "",
        "secret",
        "-secret",
        "7",
        "x-secret",
        "-7-secret",
        "7.0-secret",
        " 7-secret",
        "٧-secret",
        "9223372036854775807-secret",
        "9223372036854775808-secret",
        f"{'9' * 19}-secret",
        f"{'9' * 20}-secret",
        f"{'9' * 100_000}-secret",
        "7-sec\0ret",
        "7-\ud800",
        "7-secret\n",
    ],
)
@replies
def test_what_no_job_can_have_as_its_token_is_unknown(
    store: CanonicalStore, database: Database, reply: Reply, token: str
) -> None:
    parked(store)
    before = database.row()

    assert reply(store, token) is Callback.UNKNOWN
    if token.isascii() and "\0" not in token:
        for function in ("complete_callback", "fail_callback"):
            value = "'1'::jsonb" if function == "complete_callback" else "'no'"
            found = database.execute(f"SELECT {{schema}}.{function}(%s, {value}) AS answer", token)
            assert found in ([{"answer": "unknown"}], [{"answer": "refused"}])
    assert database.row() == before


@pytest.mark.parametrize(
    "wrong",
    [
        lambda token: f"{token}x",
        lambda token: token[:-1],
        lambda token: f"0{token}",
        lambda token: f"{token.partition('-')[0]}-",
        lambda token: f"{token.partition('-')[0]}-{'x' * 200}",
    ],
)
@replies
def test_the_whole_token_counts(
    store: CanonicalStore, database: Database, reply: Reply, wrong: Callable[[str], str]
) -> None:
    _, token = parked(store)
    before = database.row()

    assert reply(store, wrong(token)) is not Callback.DONE
    assert database.row() == before


# Ends that are repeated, cancelled jobs, fresh runs.


@pytest.mark.parametrize("answered", ["not", "early", "late"])
@replies
def test_an_end_that_is_repeated_is_known_whether_the_answer_came_before_or_after_it(
    store: CanonicalStore, database: Database, reply: Reply, answered: str
) -> None:
    lease, token = expecting(store)
    if answered == "early":
        reply(store, token)
    store.end(lease, "first", park(token, 60))
    if answered == "late":
        reply(store, token)
    before = database.row()

    assert store.end(lease, "first", park(token, 60)) == Ended(Answer.REPEATED, lease)
    repeated = store.end_unclaimed(lost_attempt(), park(token, 60))
    assert repeated == Ended(Answer.REPEATED, lease, "run")
    for state in (JobState.AVAILABLE, JobState.FAILED, JobState.RETRYABLE, None):
        assert store.end(lease, "first", Transition(state)).answer is Answer.GONE
    assert store.end(lease, "other", park(token, 60)).answer is Answer.GONE
    assert store.claim(lost_attempt()).verdict is Verdict.ENDED
    assert database.row() == before


@pytest.mark.parametrize("state", [JobState.AVAILABLE, JobState.FAILED])
def test_an_attempt_that_ended_otherwise_did_not_end_to_wait(
    store: CanonicalStore, state: JobState
) -> None:
    lease, token = expecting(store)
    store.end(lease, "first", Transition(state))

    assert store.end(lease, "first", park(token)).answer is Answer.GONE
    assert store.end(lease, "first", Transition(state)).answer is Answer.REPEATED


@pytest.mark.parametrize(
    "take",
    [
        lambda store, lease: store.request_cancel("task"),
        lambda store, lease: store.rescue([lease], OLD),
        lambda store, lease: store.resend("task", keep_progress=False),
    ],
    ids=["cancelled", "out of time", "restarted"],
)
def test_an_end_that_is_repeated_after_others_took_the_job_is_gone(
    store: CanonicalStore, database: Database, take: Callable[[CanonicalStore, Lease], object]
) -> None:
    lease, token = parked(store, timeout=0.01)
    database.execute("SELECT pg_sleep(0.02)")
    assert take(store, lease)

    assert store.end(lease, "first", park(token, 0.01)).answer is Answer.GONE


@pytest.mark.parametrize(
    "answered", [None, complete, fail], ids=["not answered", "completed", "failed"]
)
@pytest.mark.parametrize(
    "state", [JobState.WAITING_EXTERNAL, JobState.SCHEDULED, JobState.AVAILABLE]
)
def test_a_job_whose_cancellation_was_asked_for_is_cancelled_instead_of_going_on(
    store: CanonicalStore, database: Database, state: JobState, answered: Reply | None
) -> None:
    lease, token = expecting(store)
    store.request_cancel("task")
    if answered is not None:
        answered(store, token)
    waits = state is JobState.WAITING_EXTERNAL
    end = park(token, 60) if waits else Transition(state, unsent=True, uncounted=True)

    assert store.end(lease, "first", end).answer is Answer.GONE

    job = database.row()
    assert (job["state"], job["callback_id"]) == ("cancelled", None)
    assert job["callback_timeout_at"] is None
    assert [one.state for one in due(store)] == [JobState.CANCELLED]
    assert complete(store, token) is Callback.REFUSED
    assert store.end(lease, "first", end).answer is Answer.GONE


def test_a_snoozed_job_goes_on_later_uncounted_from_its_checkpoint(
    store: CanonicalStore, database: Database
) -> None:
    lease = running(store)
    end = Transition(
        JobState.SCHEDULED, snapshot(), run_in=90, unsent=True, uncounted=True, envelope=WHOLE
    )

    assert store.end(lease, "first", end).answer is Answer.DONE

    job = database.row()
    now = database.execute("SELECT now()")[0]["now"]
    assert (job["table"], job["state"], job["attempt"]) == ("scheduled_jobs", "scheduled", 0)
    assert timedelta(seconds=80) < job["run_at"] - now <= timedelta(seconds=90)
    assert job["send_after"] > now
    assert claimed(store, attempt("second", from_lease=1))[0].attempt == 1


def test_a_fresh_run_knows_nothing_of_the_callbacks_of_the_last(store: CanonicalStore) -> None:
    _, token = parked(store)
    fail(store, token)
    assert claimed(store, lost_attempt("again", run_token="run 2"))[0].callbacks == {}


@pytest.mark.parametrize("keep", [True, False])
def test_an_operators_retry_keeps_payloads_and_a_restart_discards_them(
    store: CanonicalStore, keep: bool
) -> None:
    lease, token = expecting(store)
    complete(store, token)
    store.end(lease, "first", Transition(JobState.FAILED, envelope=WHOLE))
    assert store.resend("task", keep_progress=keep) is Resend.DONE

    claim, _ = claimed(store, lost_attempt("second", from_lease=1))

    assert claim.callbacks == ({"callback": {"payload": {"paid": 7}}} if keep else {})


@pytest.mark.parametrize("keep", [True, False])
def test_what_failed_outside_is_asked_for_anew_after_an_operators_retry(
    store: CanonicalStore, keep: bool
) -> None:
    _, token = parked(store)
    fail(store, token)
    assert store.resend("task", keep_progress=keep) is Resend.DONE

    claim, _ = claimed(store, lost_attempt("second", from_lease=1))

    assert claim.callbacks == {}


def test_a_completed_job_keeps_no_answers(store: CanonicalStore, database: Database) -> None:
    for task_id in ("ended", "settled"):
        lease, token = expecting(store, task_id)
        complete(store, token)
        if task_id == "ended":
            store.end(lease, "first", Transition(JobState.COMPLETED))
        else:
            store.settle(lease, JobState.COMPLETED)
        row = database.row(task_id)
        assert (row["callbacks"], row["callback_id"], row["callback_name"]) == (None, None, None)


# Against others.


@replies
def test_a_locked_row_is_told_and_nothing_is_answered(
    store: CanonicalStore, database: Database, reply: Reply
) -> None:
    _, token = parked(store)
    with database.locked(), pytest.raises(RowLocked):
        reply(store, token)

    assert reply(store, token) is Callback.DONE


@pytest.mark.parametrize("runs", [True, False], ids=["it runs", "it waits"])
def test_of_eight_answers_at_once_one_wins(
    store: CanonicalStore, database: Database, open_another: OpenStore, runs: bool
) -> None:
    _, token = (expecting if runs else parked)(store)
    together = threading.Barrier(8)
    told: list[Callback] = []

    def answer(store: CanonicalStore, number: int) -> None:
        together.wait()
        if number % 2:
            told.append(store.complete_callback(token, f"{number}"))
        else:
            told.append(store.fail_callback(token, f"{number}"))

    stores = [open_another() for _ in range(8)]
    threads = [threading.Thread(target=answer, args=(s, n)) for n, s in enumerate(stores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(told) == [Callback.DONE, *[Callback.REFUSED] * 7]
    job = database.row()
    (answered,) = job["callbacks"].values()
    assert len(answered) == 1
    if not runs:
        assert (job["state"] == "failed") == ("error" in answered)


@pytest.mark.parametrize("policy", ["requeue", "fail"])
@pytest.mark.parametrize("committed", [True, False])
def test_an_answer_that_waits_for_a_rescue_is_refused_if_that_took_the_job(
    store: CanonicalStore, database: Database, policy: str, committed: bool
) -> None:
    lease, token = parked(store, timeout=0.01, lost_policy=policy)
    database.execute("SELECT pg_sleep(0.02)")
    told: list[Callback] = []
    thread = threading.Thread(target=lambda: told.append(complete(store, token)))

    with psycopg.connect(database.url) as rescuing:
        assert set(CanonicalStore(rescuing, SCHEMA).rescue([lease], OLD)) == {lease}
        thread.start()
        eventually(
            lambda: database.execute(
                "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock' "
                "AND datname = current_database()"
            )
        )
        if not committed:
            rescuing.rollback()
    thread.join()

    assert told == [Callback.REFUSED if committed else Callback.DONE]


def test_a_rescue_leaves_a_job_alone_that_is_being_answered(
    store: CanonicalStore, database: Database
) -> None:
    lease, token = parked(store, timeout=0.01)
    database.execute("SELECT pg_sleep(0.02)")

    with psycopg.connect(database.url) as answering:
        assert complete(CanonicalStore(answering, SCHEMA), token) is Callback.DONE
        assert store.rescue([lease], OLD) == {}

    assert store.rescue([lease], OLD) == {}
    assert database.row()["state"] == "available"
