"""Lost jobs: which those are, what a rescue makes of them, and that it takes none that lives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from celery_awa.errors import RowLocked
from celery_awa.model import (
    Answer,
    Beat,
    Claim,
    Ended,
    JobState,
    Lease,
    Pulse,
    Rescue,
    Snapshot,
    Thresholds,
    Transition,
    UnsentJob,
    Verdict,
)
from celery_awa.store.canonical import CanonicalStore
from tests.conftest import SCHEMA

from .jobs import (
    HOUR,
    IN_PART,
    OLD,
    Database,
    OpenStore,
    claimed,
    lost_attempt,
    retried_job,
    running,
    snapshot,
    stored,
)

pytest_plugins = ["tests.integration.stores"]

LIMITS = Thresholds(stale_after=60, duplicate_after=20)


def silent(
    store: CanonicalStore, database: Database, seconds: float = 61, **fields: Any
) -> tuple[str, Lease]:
    """A job whose attempt was heard of so long ago: its task's id, and its lease."""
    new = lost_attempt(**fields)
    _, lease = claimed(store, new)
    database.silence(seconds, new.task_id)
    return new.task_id, lease


def rescued(store: CanonicalStore, lease: Lease) -> Rescue:
    """What the one rescue made of it."""
    return store.rescue([lease], LIMITS)[lease]


def last_error(database: Database, task_id: str = "task") -> str:
    """The text of the last error of a job."""
    text: str = database.row(task_id)["errors"][-1]["error"]
    return text


# Which jobs are lost.


@pytest.mark.parametrize(
    ("seconds", "marked", "lost"),
    [(0, False, False), (0, True, False), (21, False, False), (21, True, True), (61, False, True)],
)
def test_an_attempt_is_stale_by_the_age_of_its_heartbeat_and_sooner_where_a_copy_came(
    store: CanonicalStore, database: Database, seconds: float, marked: bool, lost: bool
) -> None:
    task_id, lease = silent(store, database, seconds)
    if marked:
        assert store.claim(lost_attempt("copy")) == Claim(Verdict.HELD)

    found = store.lost(LIMITS)

    job = database.row()
    assert [(one.lease, one.task_id, one.kind, one.attempted_at) for one in found] == (
        [(lease, task_id, "shop.import_rows", job["attempted_at"])] if lost else []
    )
    assert store.rescue([lease], LIMITS) == ({lease: Rescue.REQUEUED} if lost else {})
    if lost:
        assert f"no heartbeat from worker worker@host for {seconds}." in last_error(database)


def test_a_heartbeat_takes_the_mark_of_a_copy_away(
    store: CanonicalStore, database: Database
) -> None:
    for beat in (
        lambda lease: store.heartbeat([lease]),
        lambda lease: store.heartbeat([lease], skip_locked=True),
        lambda lease: store.heartbeat_with_progress([Beat(lease, snapshot())]),
    ):
        database.empty()
        _, lease = claimed(store, lost_attempt())
        store.claim(lost_attempt("copy"))
        assert database.row()["duplicate_at"] is not None

        assert beat(lease) != {}

        assert database.row()["duplicate_at"] is None


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize(("seconds", "lost"), [(0.29, False), (0.3, True)])
def test_thresholds_below_a_second_count(
    database: Database, seconds: float, lost: bool, marked: bool
) -> None:
    thresholds = Thresholds(0.5, 0.3) if marked else Thresholds(0.3, 0.1)
    with database.transaction() as frozen:  # in which the clock stands still
        store = CanonicalStore(frozen.connection, SCHEMA)
        _, lease = claimed(store, lost_attempt())
        frozen.silence(seconds)
        if marked:
            store.claim(lost_attempt("copy"))

        assert bool(store.lost(thresholds)) is lost
        assert bool(store.rescue([lease], thresholds)) is lost


def test_a_forsaken_attempt_is_stale_at_once_and_a_heartbeat_takes_that_back(
    store: CanonicalStore, database: Database
) -> None:
    leases = [claimed(store, lost_attempt(name, name))[1] for name in ("dead", "alive", "other")]
    store.forsake(leases[:2])
    store.heartbeat(leases[1:2])

    assert [job.lease for job in store.lost(OLD)] == leases[:1]
    assert store.rescue(leases, OLD) == {leases[0]: Rescue.REQUEUED}
    assert last_error(database, "dead") == "WorkerLostError: worker worker@host died"


def test_only_the_attempt_that_has_the_job_can_be_forsaken(
    store: CanonicalStore, database: Database
) -> None:
    lease = running(store)
    ended = running(store, "ended")
    store.end(ended, "first", Transition(JobState.FAILED))
    before = [database.row(), database.row("ended")]

    store.forsake([])
    store.forsake([Lease(lease.job_id, lease.run_lease + 1), ended, Lease(0, 1)])

    assert [database.row(), database.row("ended")] == before


def test_a_locked_row_cannot_be_forsaken_and_that_is_told(
    store: CanonicalStore, database: Database
) -> None:
    lease = running(store)
    with database.locked(), pytest.raises(RowLocked):
        store.forsake([lease])


def test_a_living_attempt_is_lost_once_its_deadline_is_over(
    store: CanonicalStore, database: Database
) -> None:
    _, late = claimed(store, lost_attempt(deadline=0.01))
    _, in_time = claimed(store, lost_attempt("second", "in time", deadline=60))
    database.execute("SELECT pg_sleep(0.02)")

    assert [job.lease for job in store.lost(OLD)] == [late]
    assert store.rescue([late, in_time], OLD) == {late: Rescue.REQUEUED}
    assert last_error(database) == "TimeLimitExceeded: the deadline of 0.0 s is over"
    assert database.row()["deadline_at"] is None


@pytest.mark.parametrize(
    ("policy", "state"), [("requeue", JobState.RETRYABLE), ("fail", JobState.FAILED)]
)
def test_a_callback_that_does_not_come_in_time_is_handled_by_policy(
    store: CanonicalStore, database: Database, policy: str, state: JobState
) -> None:
    leases = []
    for task_id, seconds in (("late", 1), ("in time", -60)):
        _, lease = claimed(store, lost_attempt("first", task_id, lost_policy=policy))
        store.end(lease, "first", Transition(JobState.WAITING_EXTERNAL, snapshot()))
        database.execute(
            "UPDATE {schema}.jobs_hot SET callback_id = 'callback', "
            "callback_timeout_at = now() - make_interval(secs => %s) WHERE task_id = %s",
            seconds,
            task_id,
        )
        leases.append(lease)

    assert [job.lease for job in store.lost(OLD)] == leases[:1]
    assert set(store.rescue(leases, OLD)) == set(leases[:1])

    job = database.row("late")
    assert (job["state"], job["progress"]) == (state.value, stored())
    assert (job["callback_id"], job["callback_timeout_at"]) == (None, None)
    assert last_error(database, "late") == "TimeoutError: no callback came in time"
    assert database.row("in time")["callback_id"] == "callback"


@pytest.mark.parametrize("state", [state for state in JobState if state is not JobState.RUNNING])
def test_a_job_that_does_not_run_is_never_lost(
    store: CanonicalStore, database: Database, state: JobState
) -> None:
    lease = retried_job(store, "task", state, lost_policy="requeue", deadline=0.001)
    table = database.row()["table"]
    database.execute(f"UPDATE {{schema}}.{table} SET heartbeat_at = NULL, duplicate_at = now()")
    before = database.row()

    assert store.lost(LIMITS) == []
    assert store.rescue([lease], LIMITS) == {}
    assert database.row() == before


def test_a_look_goes_through_all_lost_jobs_page_by_page(
    store: CanonicalStore, database: Database
) -> None:
    leases = [silent(store, database, token=f"{n}", task_id=f"{n}")[1] for n in range(7)]
    store.end(leases[3], "3", Transition(JobState.WAITING_EXTERNAL))
    database.execute(
        "UPDATE {schema}.jobs_hot SET callback_timeout_at = now() - interval '1 s' "
        "WHERE state = 'waiting_external'"
    )

    pages: list[list[Lease]] = [[]]
    while page := store.lost(LIMITS, after_id=pages[-1][-1].job_id if pages[-1] else 0, limit=3):
        pages.append([job.lease for job in page])

    assert pages[1:] == [leases[:3], leases[3:6], leases[6:]]


# What a rescue makes of them.


@pytest.mark.parametrize(
    ("fields", "state", "error"),
    [
        ({}, JobState.RETRYABLE, "s"),
        ({"lost_policy": "fail"}, JobState.FAILED, "s"),
        ({"envelope": None}, JobState.FAILED, "; its message was not kept, so it cannot be sent"),
        ({"envelope": IN_PART}, JobState.FAILED, "; its message was not kept, so it cannot be"),
        ({"max_rescues": 0}, JobState.FAILED, "; max_rescues is 0 and the checkpoint did not"),
    ],
)
def test_a_lost_job_is_requeued_or_failed_by_its_policy_and_keeps_its_progress(
    store: CanonicalStore,
    database: Database,
    fields: dict[str, Any],
    state: JobState,
    error: str,
) -> None:
    _, lease = silent(store, database, **fields)
    store.heartbeat_with_progress([Beat(lease, snapshot())])
    database.silence(61)

    taken = rescued(store, lease)

    job = database.row()
    now = database.execute("SELECT now()")[0]["now"]
    requeued = state is JobState.RETRYABLE
    assert taken is (Rescue.REQUEUED if requeued else Rescue.FAILED)
    assert job["table"] == ("scheduled_jobs" if requeued else "jobs_hot")
    assert (job["state"], job["progress"]) == (state.value, stored())
    assert (job["run_lease"], job["attempt"], job["rescues"]) == (1, 1, int(requeued))
    assert job["send_after"] <= now
    assert (job["run_at"] is not None, job["finalized_at"] is not None) == (requeued, not requeued)
    assert last_error(database).startswith("WorkerLostError: no heartbeat from worker worker@host ")
    assert error in last_error(database)


@pytest.mark.parametrize("fields", [{}, {"lost_policy": "fail"}])
def test_a_lost_job_whose_cancellation_was_asked_for_is_cancelled(
    store: CanonicalStore, database: Database, fields: dict[str, Any]
) -> None:
    _, lease = silent(store, database, **fields)
    store.request_cancel("task")

    assert rescued(store, lease) is Rescue.CANCELLED
    assert database.row()["state"] == "cancelled"
    assert [job.state for job in store.unsent(resend_after=HOUR)] == [JobState.CANCELLED]


def test_the_next_attempt_begins_where_the_lost_one_was_and_the_brokers_own_copy_is_dropped(
    store: CanonicalStore, database: Database
) -> None:
    _, lease = silent(store, database)
    store.heartbeat_with_progress([Beat(lease, snapshot())])
    database.silence(61)
    rescued(store, lease)

    assert store.claim(lost_attempt("copy", redelivered=True)) == Claim(Verdict.FINISHED)
    claim, newer = claimed(store, lost_attempt("second", from_lease=1))
    assert store.claim(lost_attempt("copy", redelivered=True)) == Claim(Verdict.HELD)

    assert (claim.progress, claim.attempt, newer.run_lease) == (stored(), 2, 2)
    assert database.row()["rescues"] == 1


def test_a_task_that_kills_its_worker_each_time_runs_four_times_and_keeps_what_it_reported(
    store: CanonicalStore, database: Database
) -> None:
    """``set_progress`` is no advance: its percent grows each time."""
    told = [dies(store, database, n, {"percent": n}) for n in range(4)]

    assert told == [Rescue.REQUEUED] * 3 + [Rescue.FAILED]
    job = database.row()
    assert (job["rescues"], job["rescues_in_place"], job["progress"]) == (3, 3, {"percent": 3})
    assert last_error(database).endswith("; max_rescues is 3 and the checkpoint did not advance")


def test_changed_metadata_is_an_advance_and_twenty_rescues_are_the_end_all_the_same(
    store: CanonicalStore, database: Database
) -> None:
    told = [dies(store, database, n, {"metadata": {"row": n // 3}}) for n in range(21)]

    assert told == [Rescue.REQUEUED] * 20 + [Rescue.FAILED]
    assert last_error(database).endswith("; it was rescued 20 times in this run")


def test_a_new_run_is_rescued_as_often_as_the_first(
    store: CanonicalStore, database: Database
) -> None:
    for n in range(4):
        dies(store, database, n, {})

    assert dies(store, database, 0, {}, run_token="run 2") is Rescue.REQUEUED


def dies(
    store: CanonicalStore, database: Database, n: int, value: dict[str, Any], **fields: Any
) -> Rescue:
    """The n-th attempt reports this much and dies; what the rescue makes of it."""
    _, lease = claimed(store, lost_attempt(f"{n}", from_lease=n or None, **fields))
    text = str(value).replace("'", '"')
    store.heartbeat_with_progress([Beat(lease, Snapshot(1, text))])
    database.silence(61)
    return rescued(store, lease)


def test_all_are_taken_at_once_and_what_is_locked_is_left_out(
    store: CanonicalStore, database: Database
) -> None:
    leases = [silent(store, database, token=f"{n}", task_id=f"{n}")[1] for n in range(3)]
    alive = running(store, "alive")

    with database.locked("1"):
        taken = store.rescue([*leases, alive, Lease(0, 1), leases[0]], LIMITS)
    assert taken == {leases[0]: Rescue.REQUEUED, leases[2]: Rescue.REQUEUED}
    assert store.rescue([*leases, alive], LIMITS) == {leases[1]: Rescue.REQUEUED}
    assert store.rescue(leases, LIMITS) == store.rescue([], LIMITS) == {}


def test_a_newer_lease_is_not_taken_by_an_older_look(
    store: CanonicalStore, database: Database
) -> None:
    _, lease = silent(store, database)
    _, newer = claimed(store, lost_attempt("second", retries=1))
    database.silence(61)

    assert store.rescue([lease], LIMITS) == {}
    assert database.row()["run_lease"] == newer.run_lease


TRANSITIONS = [
    *(
        Transition(state, snapshot(9, percent=99), error="late")
        for state in JobState
        if state is not JobState.RUNNING
    ),
    Transition(None),
]


@pytest.mark.parametrize("policy", ["requeue", "fail"])
@pytest.mark.parametrize("transition", TRANSITIONS, ids=lambda one: str(one.to))
def test_an_attempt_that_was_rescued_can_do_nothing_more_not_even_what_the_rescue_did(
    store: CanonicalStore, database: Database, policy: str, transition: Transition
) -> None:
    _, lease = silent(store, database, lost_policy=policy)
    rescued(store, lease)
    before = database.row()

    assert store.heartbeat([lease]) == {}
    assert store.heartbeat_with_progress([Beat(lease, snapshot(9, percent=99))]) == {}
    assert not store.owns(lease)
    assert store.end(lease, "first", transition) == Ended(Answer.GONE, lease)
    assert store.end_unclaimed(lost_attempt(), transition).answer is Answer.GONE
    assert store.claim(lost_attempt()) == Claim(Verdict.ENDED)

    assert database.row() == before


# Against the attempt itself, and against others that rescue.


@contextmanager
def held_open(database: Database) -> Iterator[CanonicalStore]:
    """A store whose statements are committed at the end."""
    with psycopg.connect(database.url) as connection:
        yield CanonicalStore(connection, SCHEMA)


def complete(store: CanonicalStore, lease: Lease) -> None:
    assert store.end(lease, "first", Transition(JobState.COMPLETED)).answer is Answer.DONE


def retry(store: CanonicalStore, lease: Lease) -> None:
    transition = Transition(JobState.RETRYABLE, snapshot(), run_in=60, unsent=True)
    assert store.end(lease, "first", transition).answer is Answer.DONE


def beat(store: CanonicalStore, lease: Lease) -> None:
    assert store.heartbeat([lease]) == {lease: Pulse(0)}


@pytest.mark.parametrize("alive", [complete, retry, beat])
def test_what_an_attempt_does_between_look_and_take_stands(
    store: CanonicalStore, database: Database, alive: Callable[[CanonicalStore, Lease], None]
) -> None:
    _, lease = silent(store, database)
    look = [job.lease for job in store.lost(LIMITS)]
    assert look == [lease]

    with held_open(database) as other:
        alive(other, lease)
        assert store.rescue(look, LIMITS) == {}
    before = database.row()

    assert store.rescue(look, LIMITS) == store.rescue(look, LIMITS) == {}
    assert database.row() == before
    assert before["rescues"] == 0
    assert store.unsent(resend_after=HOUR) == []


@pytest.mark.parametrize("alive", [complete, retry, beat])
def test_an_attempt_that_comes_back_while_it_is_taken_finds_its_job_gone(
    store: CanonicalStore, database: Database, alive: Callable[[CanonicalStore, Lease], None]
) -> None:
    _, lease = silent(store, database)

    with held_open(database) as other:
        assert rescued(other, lease) is Rescue.REQUEUED
        with pytest.raises(RowLocked):
            alive(store, lease)

    with pytest.raises(AssertionError):
        alive(store, lease)
    assert database.row()["state"] == "retryable"


def test_a_rescue_that_was_not_committed_has_taken_nothing(
    store: CanonicalStore, database: Database
) -> None:
    _, lease = silent(store, database)
    with psycopg.connect(database.url) as connection:
        rescued(CanonicalStore(connection, SCHEMA), lease)
        connection.rollback()

    complete(store, lease)


def test_eight_rescuers_at_once_send_each_lost_task_once(
    database: Database, store: CanonicalStore, open_another: OpenStore
) -> None:
    tasks = {silent(store, database, token=f"{n}", task_id=f"{n}")[0] for n in range(20)}
    together = threading.Barrier(8)
    taken: list[Lease] = []
    sent: list[UnsentJob] = []

    def rescue(store: CanonicalStore) -> None:
        together.wait()
        for _ in range(5):
            taken.extend(store.rescue([job.lease for job in store.lost(LIMITS)], LIMITS))
            for job in store.unsent(resend_after=HOUR):
                sent.append(job)
                store.sent(job.lease, job.resends)

    stores = [open_another() for _ in range(8)]
    threads = [threading.Thread(target=rescue, args=(one,)) for one in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(taken) == 20
    assert sorted(job.task_id for job in sent) == sorted(tasks)
    assert {job["rescues"] for job in database.execute("SELECT rescues FROM {schema}.jobs")} == {1}
    assert store.unsent(resend_after=HOUR) == []
