"""What is to be published: when it is due, who says that it was, and what ends without it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from celery_awa.errors import RowLocked
from celery_awa.model import (
    Answer,
    Beat,
    Claim,
    Ended,
    Envelope,
    JobState,
    Lease,
    Transition,
    Verdict,
)
from celery_awa.store.canonical import CanonicalStore

from .jobs import (
    FINISHED,
    HOUR,
    IN_PART,
    OLD,
    WHOLE,
    Database,
    attempt,
    claimed,
    lost_attempt,
    retried_job,
    running,
    snapshot,
    stored,
)

pytest_plugins = ["tests.integration.stores"]

WAITS = (JobState.AVAILABLE, JobState.RETRYABLE, JobState.SCHEDULED)
TOLD = (JobState.FAILED, JobState.CANCELLED)


def unsent_job(store: CanonicalStore, task_id: str, state: JobState, **fields: Any) -> Lease:
    """A job that is unsent in this state."""
    _, lease = claimed(store, lost_attempt("first", task_id, **fields))
    store.end(lease, "first", Transition(state, snapshot(), error="boom", unsent=True))
    return lease


def make_due(database: Database, ago: float = 1, task_id: str | None = None) -> None:
    """Have what is unsent be due since so many seconds."""
    for table in ("jobs_hot", "scheduled_jobs"):
        database.execute(
            f"UPDATE {{schema}}.{table} SET send_after = now() - make_interval(secs => %s) "
            "WHERE send_after IS NOT NULL AND coalesce(%s, task_id) = task_id",
            ago,
            task_id,
        )


def due_in(database: Database, task_id: str = "task") -> timedelta | None:
    """How long until a job is due to be published."""
    left: timedelta | None = database.execute(
        "SELECT send_after - now() AS left FROM {schema}.jobs WHERE task_id = %s", task_id
    )[0]["left"]
    return left


def in_ten_seconds(left: timedelta | None) -> bool:
    return left is not None and timedelta(seconds=5) < left <= timedelta(seconds=10)


@pytest.mark.parametrize("state", WAITS)
def test_a_message_is_due_ten_seconds_after_its_job_began_to_wait_and_every_ten_from_then_on(
    store: CanonicalStore, database: Database, state: JobState
) -> None:
    lease = unsent_job(store, "task", state)
    assert in_ten_seconds(due_in(database))
    assert store.unsent(resend_after=HOUR) == []

    for _ in range(2):
        make_due(database)
        assert [job.lease for job in store.unsent(resend_after=HOUR)] == [lease]
        assert in_ten_seconds(due_in(database))
        assert store.unsent(resend_after=HOUR) == []


@pytest.mark.parametrize("state", TOLD)
def test_an_end_that_is_to_be_told_is_due_at_once(
    store: CanonicalStore, database: Database, state: JobState
) -> None:
    unsent_job(store, "task", state)

    assert [job.state for job in store.unsent(resend_after=HOUR)] == [state]


@pytest.mark.parametrize(
    ("state", "at_once"), [(JobState.AVAILABLE, True), (JobState.RETRYABLE, False)]
)
def test_a_returned_message_whose_copy_was_dropped_already_is_due_at_once(
    store: CanonicalStore, database: Database, state: JobState, at_once: bool
) -> None:
    """A retry publishes a message of its own."""
    _, lease = claimed(store, lost_attempt())
    store.claim(lost_attempt("copy"))

    store.end(lease, "first", Transition(state, unsent=True))

    assert [job.lease for job in store.unsent(resend_after=HOUR)] == ([lease] if at_once else [])


def test_what_is_unsent_comes_with_all_that_publishing_needs(
    store: CanonicalStore, database: Database
) -> None:
    _, lease = claimed(store, lost_attempt())
    store.end(
        lease,
        "first",
        Transition(JobState.RETRYABLE, error="ValueError: boom", run_in=60, unsent=True),
    )
    make_due(database)

    (job,) = store.unsent(resend_after=HOUR)

    row = database.row()
    assert (job.lease, job.task_id, job.kind) == (lease, "task", "shop.import_rows")
    assert (job.state, job.run_token, job.envelope) == (JobState.RETRYABLE, "run", WHOLE)
    assert (job.attempted_at, job.run_at) == (row["attempted_at"], row["run_at"])
    assert (job.error, job.resends) == ("ValueError: boom", 0)


@pytest.mark.parametrize("envelope", [None, Envelope(b"in part", whole=False)])
def test_an_envelope_that_is_not_whole_or_not_there_comes_as_such(
    store: CanonicalStore, database: Database, envelope: Envelope | None
) -> None:
    unsent_job(store, "task", JobState.FAILED, envelope=envelope)

    assert [job.envelope for job in store.unsent(resend_after=HOUR)] == [envelope]


def test_both_tables_are_looked_through_what_is_due_for_longest_first_and_nothing_is_hidden(
    store: CanonicalStore, database: Database
) -> None:
    for n in range(9):
        unsent_job(store, f"{n}", WAITS[n % 3])
        make_due(database, ago=100 - n, task_id=f"{n}")

    with database.locked("1"):
        pages = [
            {job.task_id for job in store.unsent(resend_after=HOUR, limit=3)} for _ in range(4)
        ]

    assert pages == [{"0", "2", "3"}, {"4", "5", "6"}, {"7", "8"}, set()]
    assert [job.task_id for job in store.unsent(resend_after=HOUR)] == ["1"]


@pytest.mark.parametrize("state", WAITS)
def test_a_job_that_was_sent_is_unsent_no_longer(
    store: CanonicalStore, database: Database, state: JobState
) -> None:
    lease = unsent_job(store, "task", state)
    make_due(database)
    (job,) = store.unsent(resend_after=HOUR)

    store.told(lease)
    assert due_in(database) is not None
    for _ in range(2):
        store.sent(lease, job.resends)
        assert due_in(database) is None
    assert store.unsent(resend_after=HOUR) == []


@pytest.mark.parametrize("state", TOLD)
def test_a_job_whose_end_was_told_is_unsent_no_longer(
    store: CanonicalStore, database: Database, state: JobState
) -> None:
    lease = unsent_job(store, "task", state)

    store.sent(lease)
    assert due_in(database) is not None
    for _ in range(2):
        store.told(lease)
        assert due_in(database) is None
    assert store.unsent(resend_after=HOUR) == []


def test_a_note_that_comes_late_does_not_stand_for_what_an_operator_had_sent_again(
    store: CanonicalStore, database: Database
) -> None:
    """Its message was dropped while the job was cancelled."""
    lease = unsent_job(store, "task", JobState.RETRYABLE)
    store.request_cancel("task")
    assert store.claim(lost_attempt("second", retries=1, from_lease=1)) == Claim(Verdict.FINISHED)
    store.resend("task", keep_progress=True)

    store.sent(lease)

    (job,) = store.unsent(resend_after=HOUR)
    assert (job.lease, job.resends) == (lease, 1)
    store.sent(job.lease, job.resends)
    assert due_in(database) is None


def test_a_note_that_an_earlier_end_was_told_does_not_stand_for_a_later_one(
    store: CanonicalStore, database: Database
) -> None:
    lease = unsent_job(store, "task", JobState.FAILED)
    store.resend("task", keep_progress=True)
    store.request_cancel("task")

    store.told(lease)

    (job,) = store.unsent(resend_after=HOUR)
    assert job.state is JobState.CANCELLED
    store.told(job.lease, job.resends)
    assert due_in(database) is None


@pytest.mark.parametrize("note", ["sent", "told"])
def test_a_note_waits_for_no_locked_row_for_long(
    store: CanonicalStore, database: Database, note: str
) -> None:
    lease = unsent_job(store, "task", JobState.RETRYABLE if note == "sent" else JobState.FAILED)
    with database.locked(), pytest.raises(RowLocked):
        getattr(store, note)(lease)


# Messages that were published and do not come.


def sent_job(
    store: CanonicalStore, task_id: str, state: JobState, run_in: float | None = None, **fields: Any
) -> Lease:
    """A job in this state whose message was published."""
    _, lease = claimed(store, lost_attempt("first", task_id, **fields))
    store.end(lease, "first", Transition(state, snapshot(), run_in=run_in, unsent=True))
    store.sent(lease)
    return lease


def let_pass(database: Database, seconds: float) -> None:
    """Let time go by for what was published."""
    for table in ("jobs_hot", "scheduled_jobs"):
        database.execute(
            f"UPDATE {{schema}}.{table} SET sent_at = sent_at - make_interval(secs => %s), "
            "run_at = run_at - make_interval(secs => %s)",
            seconds,
            seconds,
        )


@pytest.mark.parametrize("state", WAITS)
@pytest.mark.parametrize("policy", ["requeue", "fail"])
def test_a_message_that_does_not_come_is_due_again(
    store: CanonicalStore, database: Database, state: JobState, policy: str
) -> None:
    lease = sent_job(store, "task", state, lost_policy=policy)

    for _ in range(2):
        let_pass(database, HOUR - 10)
        assert store.unsent(resend_after=HOUR) == []
        let_pass(database, 11)
        (job,) = store.unsent(resend_after=HOUR)
        assert (job.lease, job.state, job.envelope) == (lease, state, WHOLE)
        assert (database.row()["sent_at"], in_ten_seconds(due_in(database))) == (None, True)
        # It counts as unsent, and not as missed, until it is published.
        assert store.unsent(resend_after=HOUR) == []
        store.sent(lease, job.resends)


@pytest.mark.parametrize("state", WAITS)
def test_a_message_that_is_to_run_later_is_missed_later(
    store: CanonicalStore, database: Database, state: JobState
) -> None:
    lease = sent_job(store, "task", state, run_in=2 * HOUR)

    let_pass(database, 3 * HOUR - 10)
    assert store.unsent(resend_after=HOUR) == []
    let_pass(database, 11)
    assert [job.lease for job in store.unsent(resend_after=HOUR)] == [lease]


def test_a_message_that_was_to_run_long_ago_is_missed_after_it_was_sent(
    store: CanonicalStore, database: Database
) -> None:
    lease = sent_job(store, "task", JobState.RETRYABLE)
    database.execute("UPDATE {schema}.scheduled_jobs SET run_at = now() - interval '1 day'")

    assert store.unsent(resend_after=HOUR) == []
    let_pass(database, HOUR + 1)
    assert [job.lease for job in store.unsent(resend_after=HOUR)] == [lease]


def test_who_ends_without_asking_for_a_message_has_published_it(
    store: CanonicalStore, database: Database
) -> None:
    """As Celery does for a lost child's ``retry_on_worker_lost``."""
    _, lease = claimed(store, lost_attempt())
    store.end(lease, "first", Transition(JobState.RETRYABLE, run_in=0))

    let_pass(database, HOUR + 1)
    assert [job.lease for job in store.unsent(resend_after=HOUR)] == [lease]


def test_what_is_missed_and_what_was_never_sent_come_in_one_order(
    store: CanonicalStore, database: Database
) -> None:
    for n in range(6):
        state = WAITS[n % 3]
        (sent_job if n % 2 else unsent_job)(store, f"{n}", state)
        make_due(database, ago=100 - n, task_id=f"{n}")
        database.execute(
            f"UPDATE {{schema}}.{database.row(f'{n}')['table']} SET run_at = NULL, "
            "sent_at = now() - make_interval(secs => %s) "
            "WHERE task_id = %s AND sent_at IS NOT NULL",
            HOUR + 100 - n,
            f"{n}",
        )

    with database.locked("1"):
        pages = [
            {job.task_id for job in store.unsent(resend_after=HOUR, limit=2)} for _ in range(4)
        ]

    assert pages == [{"0", "2"}, {"3", "4"}, {"5"}, set()]
    assert [job.task_id for job in store.unsent(resend_after=HOUR)] == ["1"]


@pytest.mark.parametrize("state", WAITS)
@pytest.mark.parametrize("envelope", [None, IN_PART])
def test_what_cannot_be_sent_again_is_waited_for(
    store: CanonicalStore, database: Database, state: JobState, envelope: Envelope | None
) -> None:
    sent_job(store, "task", state, envelope=envelope)

    let_pass(database, 10 * HOUR)

    assert database.row()["sent_at"] is not None
    assert store.unsent(resend_after=HOUR) == []


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.WAITING_EXTERNAL, *FINISHED])
def test_nothing_is_missed_by_a_job_that_waits_for_no_message(
    store: CanonicalStore, database: Database, state: JobState
) -> None:
    _, lease = claimed(store, lost_attempt())
    if state is not JobState.RUNNING:
        store.end(lease, "first", Transition(state))
    store.sent(lease)

    assert database.row()["sent_at"] is None
    # Not even where the column says otherwise.
    database.execute("UPDATE {schema}.jobs_hot SET sent_at = now() - interval '1 day'")
    assert store.unsent(resend_after=HOUR) == []


def _claim(store: CanonicalStore, lease: Lease) -> None:
    claimed(store, lost_attempt("second", retries=1, from_lease=lease.run_lease))


LEAVES: dict[str, tuple[Callable[[CanonicalStore, Lease], object], str]] = {
    "claimed": (_claim, "running"),
    "ended without a claim": (
        lambda store, lease: store.end_unclaimed(
            lost_attempt("second", retries=1), Transition(JobState.FAILED)
        ),
        "failed",
    ),
    "cancelled": (lambda store, lease: store.request_cancel("task"), "cancelled"),
    "settled": (lambda store, lease: store.settle(lease, JobState.COMPLETED), "completed"),
    "restarted": (lambda store, lease: store.resend("task", keep_progress=False), "available"),
}


@pytest.mark.parametrize("state", WAITS)
@pytest.mark.parametrize("how", LEAVES)
def test_a_job_that_waits_no_longer_for_that_message_misses_none(
    store: CanonicalStore, database: Database, state: JobState, how: str
) -> None:
    leave, then = LEAVES[how]
    lease = sent_job(store, "task", state)
    assert database.row()["sent_at"] is not None

    leave(store, lease)

    assert (database.row()["state"], database.row()["sent_at"]) == (then, None)


@pytest.mark.parametrize("state", WAITS)
def test_an_edited_job_still_misses_its_message(
    store: CanonicalStore, database: Database, state: JobState
) -> None:
    lease = sent_job(store, "task", state)
    store.edit_checkpoint("task", '{"last_id": 1}')

    let_pass(database, HOUR + 1)
    assert [job.lease for job in store.unsent(resend_after=HOUR)] == [lease]


def test_a_new_wait_begins_with_a_message_that_was_not_sent(
    store: CanonicalStore, database: Database
) -> None:
    sent_job(store, "task", JobState.RETRYABLE)
    _, lease = claimed(store, lost_attempt("second", retries=1, from_lease=1))
    store.end(lease, "second", Transition(JobState.RETRYABLE, unsent=True))

    assert database.row()["sent_at"] is None
    assert due_in(database) is not None


@pytest.mark.parametrize("policy", ["requeue", "fail"])
def test_a_message_that_comes_beside_its_copy_is_executed_once(
    store: CanonicalStore, database: Database, policy: str
) -> None:
    lease = sent_job(store, "task", JobState.RETRYABLE, lost_policy=policy)
    let_pass(database, HOUR + 1)
    (job,) = store.unsent(resend_after=HOUR)
    store.sent(job.lease, job.resends)
    fields = {"retries": 1, "from_lease": lease.run_lease, "lost_policy": policy}

    _, again = claimed(store, lost_attempt("second", **fields))
    assert store.claim(lost_attempt("its copy", **fields)).verdict is Verdict.HELD
    store.end(again, "second", Transition(JobState.COMPLETED))
    assert store.claim(lost_attempt("its copy again", **fields)).verdict is Verdict.FINISHED


def test_the_view_shows_when_a_message_was_published(
    store: CanonicalStore, database: Database
) -> None:
    sent_job(store, "hot", JobState.AVAILABLE)
    sent_job(store, "waiting", JobState.RETRYABLE)

    shown = database.execute("SELECT now() - sent_at AS ago FROM {schema}.jobs")

    assert [row["ago"] < timedelta(seconds=10) for row in shown] == [True, True]


# Ends that no attempt writes.


@pytest.mark.parametrize("state", [*WAITS, JobState.WAITING_EXTERNAL])
def test_a_job_whose_message_cannot_be_sent_fails_and_that_is_left_to_be_told(
    store: CanonicalStore, database: Database, state: JobState
) -> None:
    lease = retried_job(store, "task", state, envelope=WHOLE)

    assert store.settle(lease, JobState.FAILED, "its message cannot be sent again")

    job = database.row()
    assert (job["table"], job["state"]) == ("jobs_hot", "failed")
    assert (job["progress"], job["envelope"]) == (stored(), b"whole")
    assert [error["error"] for error in job["errors"]][-1] == "its message cannot be sent again"
    assert (job["run_at"], job["run_lease"]) == (None, 2)
    assert job["finalized_at"] is not None
    assert [one.state for one in store.unsent(resend_after=HOUR)] == [JobState.FAILED]
    assert not store.settle(lease, JobState.FAILED, "again")


@pytest.mark.parametrize("state", [state for state in JobState if state not in FINISHED])
@pytest.mark.parametrize("to", FINISHED)
def test_a_job_that_the_result_backend_knows_to_be_over_ends_and_is_not_told(
    store: CanonicalStore, database: Database, state: JobState, to: JobState
) -> None:
    lease = retried_job(store, "task", state, envelope=WHOLE)

    assert store.settle(lease, to)

    job = database.row()
    completed = to is JobState.COMPLETED
    assert (job["table"], job["state"], job["send_after"]) == ("jobs_hot", to.value, None)
    assert job["finalized_at"] is not None
    assert job["progress"] == (None if completed else stored())
    assert (job["envelope"], job["envelope_whole"]) == (
        (None, False) if completed else (b"whole", True)
    )
    assert len(job["errors"]) == 1
    assert not store.settle(lease, to)
    assert store.lost(OLD) == []


@pytest.mark.parametrize("state", FINISHED)
def test_what_has_ended_or_went_on_is_not_settled(
    store: CanonicalStore, database: Database, state: JobState
) -> None:
    finished = retried_job(store, "finished", state)
    older = running(store)
    claimed(store, attempt("second", retries=1))
    alive = running(store, "alive")
    before = database.execute("SELECT * FROM {schema}.jobs ORDER BY id")

    assert not store.settle(finished, JobState.COMPLETED)
    assert not store.settle(older, JobState.COMPLETED)
    assert not store.settle(alive, JobState.FAILED, "its message cannot be sent again")
    assert not store.settle(Lease(0, 1), JobState.COMPLETED)

    assert database.execute("SELECT * FROM {schema}.jobs ORDER BY id") == before


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.RETRYABLE])
def test_a_locked_job_is_settled_another_time(
    store: CanonicalStore, database: Database, state: JobState
) -> None:
    lease = retried_job(store, "task", state)
    with database.locked(), pytest.raises(RowLocked):
        store.settle(lease, JobState.COMPLETED)
    assert database.row()["state"] == state.value


@pytest.mark.parametrize("way", ["by its lease", "claim never answered"])
def test_the_end_of_an_attempt_adds_what_the_backend_did_not_know(
    store: CanonicalStore, database: Database, way: str
) -> None:
    """It was kept while the database was away, and the rescue was quicker."""
    _, lease = claimed(store, lost_attempt())
    store.heartbeat_with_progress([Beat(lease, snapshot(1, percent=10))])
    assert store.settle(lease, JobState.FAILED)
    transition = Transition(JobState.FAILED, snapshot(2, percent=90), error="ValueError: boom")

    def end(transition: Transition) -> Ended:
        if way == "by its lease":
            return store.end(lease, "first", transition)
        return store.end_unclaimed(lost_attempt(), transition)

    for other in (JobState.RETRYABLE, JobState.COMPLETED):
        assert end(Transition(other)).answer is Answer.GONE
    assert end(transition).answer is Answer.DONE

    job = database.row()
    assert (job["state"], job["progress"], job["send_after"]) == ("failed", stored(90), None)
    assert [error["error"] for error in job["errors"]] == ["ValueError: boom"]
    assert end(transition).answer is Answer.REPEATED
    assert database.row() == job


def test_another_attempts_end_adds_nothing(store: CanonicalStore, database: Database) -> None:
    _, older = claimed(store, attempt())
    _, lease = claimed(store, attempt("second", retries=1))
    store.settle(lease, JobState.FAILED)
    before = database.row()

    for one, token in ((older, "first"), (lease, "first"), (older, "second")):
        transition = Transition(JobState.FAILED, snapshot(9, percent=99), error="late")
        assert store.end(one, token, transition).answer is Answer.GONE
    assert database.row() == before
