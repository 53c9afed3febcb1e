"""Ends of attempts: what each state keeps, and that only its own attempt can end a job, once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

from celery_awa.errors import StoreRefused
from celery_awa.model import (
    Answer,
    Beat,
    Claim,
    Ended,
    Envelope,
    JobState,
    Lease,
    Snapshot,
    Transition,
    Verdict,
)
from celery_awa.progress import ProgressBuffer
from celery_awa.store.canonical import CanonicalStore

from .jobs import (
    FINISHED,
    Database,
    OpenStore,
    attempt,
    claimed,
    retried_job,
    running,
    snapshot,
    stored,
)

pytest_plugins = ["tests.integration.stores"]

End = Callable[[CanonicalStore, Transition], Ended]


def end_by_lease(store: CanonicalStore, transition: Transition) -> Ended:
    """The end of an attempt that knows its lease."""
    return store.end(running(store), "first", transition)


def end_without_claim(store: CanonicalStore, transition: Transition) -> Ended:
    """The end of an attempt that never claimed."""
    return store.end_unclaimed(attempt(), transition)


def end_after_lost_answer(store: CanonicalStore, transition: Transition) -> Ended:
    """The end of an attempt that claimed and never heard of it."""
    running(store)
    return store.end_unclaimed(attempt(), transition)


ways = pytest.mark.parametrize("end", [end_by_lease, end_without_claim, end_after_lost_answer])


@dataclass(frozen=True)
class Kept:
    """What an end in one state leaves of a job."""

    table: str
    progress: bool = True
    envelope: bool = True
    finished: bool = False


TABLE = {
    JobState.COMPLETED: Kept("jobs_hot", progress=False, envelope=False, finished=True),
    JobState.FAILED: Kept("jobs_hot", finished=True),
    JobState.CANCELLED: Kept("jobs_hot", finished=True),
    JobState.RETRYABLE: Kept("scheduled_jobs"),
    JobState.SCHEDULED: Kept("scheduled_jobs"),
    JobState.AVAILABLE: Kept("jobs_hot"),
    JobState.WAITING_EXTERNAL: Kept("jobs_hot"),
}


@ways
@pytest.mark.parametrize("state", TABLE)
def test_what_each_state_keeps_and_where_its_row_lies(
    store: CanonicalStore, database: Database, end: End, state: JobState
) -> None:
    kept = TABLE[state]

    ended = end(store, Transition(state, snapshot(), envelope=Envelope(b"whole", whole=True)))

    job = database.row()
    assert ended.answer is Answer.DONE
    assert ended.lease == Lease(job["id"], 1)
    assert (job["table"], job["state"], job["attempt"]) == (kept.table, state.value, 1)
    assert job["progress"] == (stored() if kept.progress else None)
    assert job["envelope"] == (b"whole" if kept.envelope else None)
    assert (job["finalized_at"] is not None) is kept.finished
    assert (job["run_at"], job["send_after"], job["errors"]) == (None, None, [])


@ways
def test_a_message_that_is_to_come_has_its_time_and_its_guard(
    store: CanonicalStore, database: Database, end: End
) -> None:
    end(store, Transition(JobState.RETRYABLE, run_in=5.5, unsent=True))

    now = database.execute("SELECT now()")[0]["now"]
    job = database.row()
    assert timedelta(seconds=4) < job["run_at"] - now <= timedelta(seconds=5.5)
    assert timedelta(seconds=8) < job["send_after"] - now <= timedelta(seconds=10)


@ways
def test_the_row_of_a_replaced_task_goes_away(
    store: CanonicalStore, database: Database, end: End
) -> None:
    assert end(store, Transition(None)).answer is Answer.DONE
    assert database.rows() == []


def test_an_end_without_an_envelope_keeps_the_one_that_is_there(
    store: CanonicalStore, database: Database
) -> None:
    _, lease = claimed(store, attempt(envelope=Envelope(b"whole", whole=True)))

    store.end(lease, "first", Transition(JobState.RETRYABLE))

    assert database.row()["envelope"] == b"whole"


def test_an_end_that_reports_nothing_keeps_what_was_flushed(
    store: CanonicalStore, database: Database
) -> None:
    lease = running(store)
    store.heartbeat_with_progress([Beat(lease, snapshot())])

    store.end(lease, "first", Transition(JobState.FAILED, Snapshot(2, None)))

    assert database.row()["progress"] == stored()


def test_an_end_with_an_older_snapshot_keeps_the_newer_one(
    store: CanonicalStore, database: Database
) -> None:
    lease = running(store)
    store.heartbeat_with_progress([Beat(lease, snapshot(5, percent=50))])
    before = database.row()

    store.end(lease, "first", Transition(JobState.FAILED, snapshot(5, percent=49)))

    job = database.row()
    assert job["progress"] == stored(50)
    assert job["progress_at"] == before["progress_at"]


KEPT = {"percent": 40, "message": "x", "metadata": {"last_id": 7, "seen": {"a": 1}}}
BRIEF = {"percent": 40, "message": "x"}


@pytest.mark.parametrize(
    ("kept", "reported", "left"),
    [
        (KEPT, {"percent": 1}, {"percent": 1, "metadata": KEPT["metadata"]}),
        (
            KEPT,
            {"metadata": {"seen": {"b": 2}, "new": None}},
            BRIEF | {"metadata": {"last_id": 7, "seen": {"b": 2}, "new": None}},
        ),
        (
            KEPT,
            {"percent": 1, "metadata": {"last_id": 8}},
            {"percent": 1, "metadata": {"last_id": 8, "seen": {"a": 1}}},
        ),
        (BRIEF, {"metadata": {"a": 1}}, BRIEF | {"metadata": {"a": 1}}),
        (BRIEF, {"percent": 1}, {"percent": 1}),
        (KEPT, {}, KEPT),
        (None, {"metadata": {"a": 1}}, {"metadata": {"a": 1}}),
        (7, {"percent": 1, "metadata": {"a": 1}}, {"percent": 1, "metadata": {"a": 1}}),
        (BRIEF | {"metadata": [1]}, {"percent": 1}, {"percent": 1}),
    ],
)
@pytest.mark.parametrize("way", ["no claim", "answer lost"])
def test_an_attempt_that_has_not_read_what_was_kept_does_not_wipe_it_out(
    store: CanonicalStore,
    database: Database,
    way: str,
    kept: object,
    reported: dict[str, Any],
    left: dict[str, Any],
) -> None:
    first = running(store)
    before = Snapshot(1, json.dumps(kept)) if kept is not None else None
    store.end(first, "first", Transition(JobState.RETRYABLE, before))
    second = attempt("second", retries=1)
    transition = Transition(JobState.FAILED, Snapshot(3, json.dumps(reported)))

    if way != "no claim":
        assert claimed(store, second)[0].progress == kept
    store.end_unclaimed(second, transition)

    assert database.row()["progress"] == left


def test_what_was_reported_is_laid_over_as_the_worker_does_it(
    store: CanonicalStore, database: Database
) -> None:
    for number, reported in enumerate(({"percent": 1}, {"metadata": {"last_id": 8}})):
        buffer = ProgressBuffer()
        if "percent" in reported:
            buffer.set_progress(1)
        else:
            buffer.update_metadata({"last_id": 8})
        snapshots = [buffer.snapshot()]
        buffer.lay_over(KEPT)
        snapshots.append(buffer.snapshot())
        for which, last in enumerate(snapshots):
            task_id = f"{number} {which}"
            lease = running(store, task_id)
            store.end(lease, "first", Transition(JobState.RETRYABLE, Snapshot(1, json.dumps(KEPT))))
            store.end_unclaimed(
                attempt("second", task_id, retries=1), Transition(JobState.FAILED, last)
            )
            assert database.row(task_id)["progress"] == buffer.value()


def test_an_attempt_that_has_written_before_leaves_exactly_its_last_snapshot(
    store: CanonicalStore, database: Database
) -> None:
    lease = running(store)
    store.heartbeat_with_progress([Beat(lease, snapshot())])

    store.end(lease, "first", Transition(JobState.FAILED, Snapshot(2, '{"metadata": {"b": 1}}')))

    assert database.row()["progress"] == {"metadata": {"b": 1}}


@pytest.mark.parametrize(
    "left", [{}, {"percent": 1}, {"metadata": {"a": 1}}], ids=["nothing", "percent", "metadata"]
)
def test_an_attempt_that_knows_its_lease_may_have_discarded_what_was_kept(
    store: CanonicalStore, database: Database, left: dict[str, Any]
) -> None:
    first = running(store)
    store.end(first, "first", Transition(JobState.RETRYABLE, Snapshot(1, json.dumps(KEPT))))
    _, lease = claimed(store, attempt("second", retries=1))

    store.end(lease, "second", Transition(JobState.FAILED, Snapshot(1, json.dumps(left))))

    assert database.row()["progress"] == left


def test_a_fresh_run_that_ends_without_claim_has_only_what_it_reported(
    store: CanonicalStore, database: Database
) -> None:
    store.end(running(store), "first", Transition(JobState.FAILED, snapshot()))

    store.end_unclaimed(
        attempt("again", run_token="run 2"),
        Transition(JobState.FAILED, Snapshot(1, '{"metadata": {"a": 1}}')),
    )

    assert database.row()["progress"] == {"metadata": {"a": 1}}


def test_a_snoozed_attempt_is_not_counted(store: CanonicalStore, database: Database) -> None:
    store.end(running(store), "first", Transition(JobState.SCHEDULED, uncounted=True))

    assert database.row()["attempt"] == 0


def test_a_time_beyond_every_calendar_can_still_be_read(store: CanonicalStore) -> None:
    store.end(running(store), "first", Transition(JobState.RETRYABLE, run_in=1e300))

    job = store.get_job("task")
    assert job is not None
    assert job.run_at is not None
    assert job.run_at.year < 9999


def test_the_last_20_errors_are_kept_in_order_with_their_attempts(
    store: CanonicalStore, database: Database
) -> None:
    for number in range(1, 26):
        _, lease = claimed(store, attempt(f"{number}", retries=number - 1))
        store.end(lease, f"{number}", Transition(JobState.RETRYABLE, error=f"boom {number}"))

    job = store.get_job("task")
    assert job is not None
    assert [(e.attempt, e.error) for e in job.errors] == [
        (number, f"boom {number}") for number in range(6, 26)
    ]
    assert job.errors[0].at <= job.errors[-1].at
    assert job.errors[0].at.tzinfo is not None


def test_an_error_of_four_kilobytes_is_stored_as_it_is(store: CanonicalStore) -> None:
    text = "\N{PARTY POPPER}" * 1024
    store.end(running(store), "first", Transition(JobState.FAILED, error=text))

    job = store.get_job("task")
    assert job is not None
    assert [e.error for e in job.errors] == [text]


@pytest.mark.parametrize(
    "transition",
    [
        Transition(JobState.FAILED, error="nul \0"),
        Transition(JobState.FAILED, error="surrogate \ud800"),
        Transition(JobState.FAILED, Snapshot(1, '{"message": "\\u0000"}')),
        Transition(JobState.FAILED, Snapshot(1, "no json")),
    ],
    ids=["nul", "surrogate", "nul in progress", "no json"],
)
def test_an_end_with_what_cannot_be_stored_is_refused_and_changes_nothing(
    store: CanonicalStore, database: Database, transition: Transition
) -> None:
    lease = running(store)
    before = database.row()

    with pytest.raises(StoreRefused):
        store.end(lease, "first", transition)
    with pytest.raises(StoreRefused):
        store.end_unclaimed(attempt("other", "other"), transition)

    assert database.row() == before
    assert database.rows("other") == []


@pytest.mark.parametrize("state", TABLE)
def test_an_end_whose_answer_was_lost_is_repeated_over_a_new_connection_without_effect(
    store: CanonicalStore, open_another: OpenStore, database: Database, state: JobState
) -> None:
    transition = Transition(state, snapshot(), error="boom", run_in=5, unsent=True)
    lease = running(store)
    store.end(lease, "first", transition)
    before = database.row()
    store.close()

    again = open_another()

    assert again.end(lease, "first", transition) == Ended(Answer.REPEATED, lease)
    assert again.end_unclaimed(attempt(), transition) == Ended(Answer.REPEATED, lease, "run")
    assert database.row() == before


def test_the_deletion_of_a_row_whose_answer_was_lost_is_repeated(store: CanonicalStore) -> None:
    lease = running(store)
    store.end(lease, "first", Transition(None))

    assert store.end(lease, "first", Transition(None)).answer is Answer.REPEATED


def test_a_job_that_ended_otherwise_is_gone(store: CanonicalStore, database: Database) -> None:
    lease = running(store)
    store.end(lease, "first", Transition(JobState.CANCELLED, snapshot()))
    before = database.row()

    for state in (JobState.COMPLETED, JobState.RETRYABLE, None):
        assert store.end(lease, "first", Transition(state)).answer is Answer.GONE
    assert store.end(lease, "other", Transition(JobState.CANCELLED)).answer is Answer.GONE
    assert store.end_unclaimed(attempt(), Transition(JobState.COMPLETED)).answer is Answer.GONE
    assert database.row() == before


@pytest.mark.parametrize("state", [*TABLE, None])
def test_an_old_attempt_that_finishes_first_does_not_touch_the_new_ones_row(
    store: CanonicalStore, database: Database, state: JobState | None
) -> None:
    old = running(store)
    claimed(store, attempt("second", redelivered=True))
    before = database.row()

    ended = store.end(old, "first", Transition(state, snapshot(9, percent=99), error="late"))

    assert ended.answer is Answer.GONE
    assert database.row() == before


def test_nothing_that_an_old_attempt_sends_late_reaches_the_row(
    store: CanonicalStore, database: Database
) -> None:
    old = running(store)
    store.end(old, "first", Transition(JobState.RETRYABLE, snapshot(), unsent=True))
    claimed(store, attempt("second", retries=1))
    before = database.row()

    assert store.heartbeat([old]) == {}
    assert store.heartbeat_with_progress([Beat(old, snapshot(9, percent=99))]) == {}
    assert not store.owns(old)
    store.sent(old)
    assert store.end(old, "first", Transition(JobState.RETRYABLE)).answer is Answer.GONE
    assert database.row() == before


@pytest.mark.parametrize("state", TABLE)
def test_a_claim_that_arrives_after_its_attempts_end_leaves_no_running_ghost(
    store: CanonicalStore, database: Database, state: JobState
) -> None:
    store.end_unclaimed(attempt(), Transition(state, snapshot()))
    before = database.row()

    assert store.claim(attempt()) == Claim(Verdict.ENDED)
    assert database.row() == before


def test_an_end_without_claim_goes_by_the_same_rules_as_a_claim(
    store: CanonicalStore, database: Database
) -> None:
    for state in FINISHED:
        retried_job(store, state.value, state)
    retried_job(store, "waiting", JobState.RETRYABLE)
    running(store, "held")
    before = {task_id: database.row(task_id) for task_id in (*FINISHED, "waiting", "held")}

    for task_id in before:
        late_copy = attempt("copy", task_id, began_at=time.monotonic() - 60)
        assert store.end_unclaimed(late_copy, Transition(JobState.FAILED)) == Ended(Answer.GONE)

    assert before == {task_id: database.row(task_id) for task_id in before}


def test_an_end_without_claim_continues_its_run_and_tells_its_name(
    store: CanonicalStore, database: Database
) -> None:
    retried_job(store, "task", JobState.RETRYABLE)

    ended = store.end_unclaimed(
        attempt("third", retries=2, run_named=False, run_token="delivery"),
        Transition(JobState.RETRYABLE, error="boom again"),
    )

    job = database.row()
    assert (ended.answer, ended.run_token) == (Answer.DONE, "run")
    assert ended.lease == Lease(job["id"], 3)
    assert (job["attempt"], job["progress"], len(job["errors"])) == (3, stored(), 2)


@pytest.mark.parametrize("state", [JobState.RETRYABLE, JobState.AVAILABLE])
def test_a_published_message_ends_the_guard(
    store: CanonicalStore, database: Database, state: JobState
) -> None:
    lease = running(store)
    store.end(lease, "first", Transition(state, unsent=True))
    assert database.row()["send_after"] is not None

    store.sent(lease)

    assert database.row()["send_after"] is None


@pytest.mark.parametrize("state", [JobState.RETRYABLE, JobState.AVAILABLE])
def test_a_guard_that_a_newer_attempt_set_is_not_ended_by_an_older_message(
    store: CanonicalStore, database: Database, state: JobState
) -> None:
    old = running(store)
    store.end(old, "first", Transition(JobState.RETRYABLE, unsent=True))
    _, lease = claimed(store, attempt("second", retries=1))
    store.end(lease, "second", Transition(state, unsent=True))

    store.sent(old)

    assert database.row()["send_after"] is not None
