"""What operators ask of a job: to be cancelled, sent again, or to go on from another checkpoint."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from celery_awa.errors import RowLocked, StoreRefused
from celery_awa.model import (
    Answer,
    Beat,
    Cancel,
    Claim,
    Ended,
    JobState,
    Lease,
    Pulse,
    Rescue,
    Resend,
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
    OpenStore,
    claimed,
    lost_attempt,
    retried_job,
    snapshot,
    stored,
)

pytest_plugins = ["tests.integration.stores"]

WAITS = [state for state in JobState if state not in (*FINISHED, JobState.RUNNING)]


def job_in(store: CanonicalStore, state: JobState, **fields: Any) -> Lease:
    """A job that was retried once, with its whole message, in this state."""
    return retried_job(store, "task", state, **({"envelope": WHOLE} | fields))


def ask_each(store: CanonicalStore, task_id: str) -> list[object]:
    """The answers of all of an operator's verbs."""
    return [
        store.request_cancel(task_id),
        store.resend(task_id, keep_progress=True),
        store.resend(task_id, keep_progress=False),
        store.edit_checkpoint(task_id, "{}"),
    ]


def test_a_task_without_a_row_is_unknown_and_gets_none(
    store: CanonicalStore, database: Database
) -> None:
    assert ask_each(store, "no such") == [Cancel.UNKNOWN, Resend.UNKNOWN, Resend.UNKNOWN, None]
    assert database.count() == 0


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.FAILED, JobState.RETRYABLE])
def test_a_job_whose_row_is_locked_is_left_as_it_is_and_that_is_told(
    store: CanonicalStore, database: Database, state: JobState
) -> None:
    job_in(store, state)
    before = database.row()

    with database.locked():
        for verb, arguments in (
            (store.request_cancel, {}),
            (store.resend, {"keep_progress": False}),
            (store.edit_checkpoint, {"metadata": None}),
        ):
            with pytest.raises(RowLocked):
                verb("task", **arguments)  # type: ignore[operator]  # one of three

    assert database.row() == before


# Cancel.


@pytest.mark.parametrize("state", WAITS)
def test_a_waiting_job_is_cancelled_at_once_told_and_its_message_dropped_when_it_comes(
    store: CanonicalStore, database: Database, state: JobState
) -> None:
    lease = job_in(store, state)

    assert store.request_cancel("task") is Cancel.CANCELLED
    assert store.request_cancel("task") is Cancel.CANCELLED  # the answer was lost

    job = database.row()
    assert (job["table"], job["state"], job["progress"]) == ("jobs_hot", "cancelled", stored())
    assert (job["run_at"], job["run_lease"], job["callback_id"]) == (None, 2, None)
    assert job["finalized_at"] is not None
    assert [(one.lease, one.state) for one in store.unsent(resend_after=HOUR)] == [
        (lease, JobState.CANCELLED)
    ]
    message = lost_attempt("third", retries=2, from_lease=2)
    assert store.claim(message) == Claim(Verdict.FINISHED)


def test_a_running_job_hears_of_it_by_its_next_heartbeat_and_goes_on(
    store: CanonicalStore, database: Database
) -> None:
    lease = job_in(store, JobState.RUNNING)

    assert store.request_cancel("task") is Cancel.REQUESTED

    asked = {lease: Pulse(0, cancel_requested=True)}
    assert store.heartbeat([lease]) == store.heartbeat([lease], skip_locked=True) == asked
    assert store.heartbeat_with_progress([Beat(lease)]) == asked
    assert database.row()["state"] == "running"


@pytest.mark.parametrize("state", FINISHED)
def test_a_finished_job_is_not_cancelled(
    store: CanonicalStore, database: Database, state: JobState
) -> None:
    job_in(store, state)
    before = database.row()

    assert store.request_cancel("task") is Cancel.FINISHED
    assert database.row() == before


@pytest.mark.parametrize("state", WAITS)
def test_an_attempt_that_would_have_its_job_wait_after_a_cancellation_cancels_it(
    store: CanonicalStore, database: Database, state: JobState
) -> None:
    """It is told that the job is gone, so that it publishes no message."""
    _, lease = claimed(store, lost_attempt())
    store.request_cancel("task")
    transition = Transition(state, snapshot(), error="boom", run_in=60, unsent=True)

    for _ in range(2):
        assert store.end(lease, "first", transition) == Ended(Answer.GONE, lease)
        job = database.row()
        assert (job["table"], job["state"], job["progress"]) == ("jobs_hot", "cancelled", stored())
        assert (job["run_at"], len(job["errors"])) == (None, 1)
        assert job["finalized_at"] is not None
    assert [one.state for one in store.unsent(resend_after=HOUR)] == [JobState.CANCELLED]


@pytest.mark.parametrize("state", FINISHED)
def test_an_attempt_that_ends_its_job_after_a_cancellation_ends_it_as_it_says(
    store: CanonicalStore, database: Database, state: JobState
) -> None:
    _, lease = claimed(store, lost_attempt())
    store.request_cancel("task")

    assert store.end(lease, "first", Transition(state)).answer is Answer.DONE
    assert (database.row()["state"], database.row()["send_after"]) == (state.value, None)


def test_a_newer_attempt_of_the_same_run_is_asked_to_stop_and_one_of_a_new_run_is_not(
    store: CanonicalStore,
) -> None:
    claimed(store, lost_attempt())
    store.request_cancel("task")

    for run, asked in (("run", True), ("run 2", False)):
        _, lease = claimed(store, lost_attempt(run, retries=1, run_token=run))
        assert store.heartbeat([lease]) == {lease: Pulse(0, cancel_requested=asked)}


# Send again.


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("state", [JobState.FAILED, JobState.CANCELLED])
def test_a_job_that_ended_badly_is_sent_again_with_its_progress_or_without(
    store: CanonicalStore, database: Database, state: JobState, keep: bool
) -> None:
    lease = job_in(store, state)

    assert store.resend("task", keep_progress=keep) is Resend.DONE

    job = database.row()
    assert (job["table"], job["state"]) == ("jobs_hot", "available")
    assert (job["run_lease"], job["run_token"], len(job["errors"])) == (2, "run", 1)
    assert (job["run_at"], job["finalized_at"], job["cancel_requested"]) == (None, None, False)
    (unsent,) = store.unsent(resend_after=HOUR)
    assert (unsent.lease, unsent.state, unsent.envelope) == (lease, JobState.AVAILABLE, WHOLE)

    claim, newer = claimed(store, lost_attempt("third", retries=1, from_lease=2))
    assert (claim.attempt, newer.run_lease) == (3, 3)
    assert claim.progress == (stored() if keep else None)
    assert store.heartbeat([newer]) == {newer: Pulse(0)}


@pytest.mark.parametrize("state", WAITS)
def test_a_waiting_job_can_be_restarted_but_not_retried(
    store: CanonicalStore, database: Database, state: JobState
) -> None:
    job_in(store, state)
    before = database.row()

    assert store.resend("task", keep_progress=True) is Resend.LIVE
    assert database.row() == before
    assert store.resend("task", keep_progress=False) is Resend.DONE

    job = database.row()
    assert (job["table"], job["state"], job["progress"]) == ("jobs_hot", "available", None)
    # Its own message may be quicker than ours, and then ours is the copy.
    message = lost_attempt("third", retries=2, from_lease=2)
    assert claimed(store, message)[0].progress is None
    ours = lost_attempt("fourth", retries=1, from_lease=2)
    assert store.claim(ours) == Claim(Verdict.HELD)


def test_a_running_job_is_not_sent_again(store: CanonicalStore, database: Database) -> None:
    job_in(store, JobState.RUNNING)
    before = database.row()

    assert store.resend("task", keep_progress=True) is Resend.LIVE
    assert store.resend("task", keep_progress=False) is Resend.LIVE
    assert database.row() == before


@pytest.mark.parametrize(
    ("state", "envelope"),
    [
        (JobState.COMPLETED, WHOLE),
        (JobState.FAILED, None),
        (JobState.FAILED, IN_PART),
        (JobState.RETRYABLE, IN_PART),
    ],
)
def test_a_job_whose_message_was_not_kept_cannot_be_sent_again(
    store: CanonicalStore, database: Database, state: JobState, envelope: Any
) -> None:
    job_in(store, state, envelope=envelope)
    before = database.row()

    assert store.resend("task", keep_progress=False) is Resend.NO_MESSAGE
    assert database.row() == before
    job = store.get_job("task")
    assert job is not None
    assert not job.resendable


def test_a_job_that_was_sent_again_is_rescued_as_often_as_a_new_one(
    store: CanonicalStore, database: Database
) -> None:
    for n in range(5):
        _, lease = claimed(store, lost_attempt(f"{n}", from_lease=n or None, max_rescues=3))
        store.forsake([lease])
        taken = store.rescue([lease], OLD)[lease]
        if n == 3:
            assert taken is Rescue.FAILED
            store.resend("task", keep_progress=True)
    assert taken is Rescue.REQUEUED


def test_an_attempt_whose_job_was_sent_again_meanwhile_has_lost_it(
    store: CanonicalStore, database: Database
) -> None:
    _, lease = claimed(store, lost_attempt())
    transition = Transition(JobState.AVAILABLE, snapshot(), unsent=True)
    store.end(lease, "first", transition)
    store.resend("task", keep_progress=False)
    before = database.row()

    assert store.end(lease, "first", transition).answer is Answer.GONE
    assert store.claim(lost_attempt()) == Claim(Verdict.ENDED)
    assert database.row() == before


# Edit the checkpoint.


@pytest.mark.parametrize(
    ("kept", "metadata", "left"),
    [
        (
            {"percent": 1, "metadata": {"a": 1, "b": 2}},
            {"a": 2},
            {"percent": 1, "metadata": {"a": 2}},
        ),
        ({"percent": 1, "metadata": {"a": 1}}, None, {"percent": 1}),
        ({"percent": 1}, {"a": 2}, {"percent": 1, "metadata": {"a": 2}}),
        ({"metadata": {"a": 1}}, None, None),
        (None, None, None),
        (None, {"a": 2}, {"metadata": {"a": 2}}),
        (None, {}, {"metadata": {}}),
        (7, {"a": 2}, {"metadata": {"a": 2}}),
        (7, None, None),
    ],
)
def test_a_checkpoint_is_replaced_as_a_whole_or_taken_away(
    store: CanonicalStore, database: Database, kept: object, metadata: object, left: object
) -> None:
    job_in(store, JobState.FAILED)
    database.execute(
        "UPDATE {schema}.jobs_hot SET progress = %s", None if kept is None else json.dumps(kept)
    )

    assert store.edit_checkpoint("task", None if metadata is None else json.dumps(metadata)) is True

    assert database.row()["progress"] == left


@pytest.mark.parametrize(
    ("progress", "committed"),
    [
        ({"metadata": {"a": 1, "awa_version": 3}}, None),
        ({"metadata": {"a": 1, "awa_version": 3}}, {"b": 1, "awa_version": 2}),
        (None, {"b": 1, "awa_version": 3}),
    ],
)
def test_an_edited_checkpoint_is_of_the_version_of_what_it_replaces(
    store: CanonicalStore, database: Database, progress: object, committed: object
) -> None:
    job_in(store, JobState.FAILED)
    for text, version in (('{"a": 2}', 3), ('{"a": 2, "awa_version": 7}', 7)):
        database.execute(
            "UPDATE {schema}.jobs_hot SET progress = %s, committed = %s",
            json.dumps(progress),
            None if committed is None else json.dumps(committed),
        )
        assert store.edit_checkpoint("task", text) is True
        assert database.row()["progress"] == {"metadata": {"a": 2, "awa_version": version}}
        assert database.row()["committed"] is None


@pytest.mark.parametrize("state", [*WAITS, JobState.FAILED, JobState.CANCELLED])
def test_nothing_but_the_checkpoint_of_a_job_is_edited(
    store: CanonicalStore, database: Database, state: JobState
) -> None:
    job_in(store, state)
    database.execute(
        "UPDATE {schema}.jobs_hot SET callback_id = 'callback' WHERE state = 'waiting_external'"
    )
    before = database.row()

    assert store.edit_checkpoint("task", '{"a": 1}') is True

    job = database.row()
    assert (job.pop("progress"), before.pop("progress")) == (
        {"percent": 40, "metadata": {"a": 1}},
        stored(),
    )
    assert job.pop("progress_at") > before.pop("progress_at")
    assert job == before


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.COMPLETED])
def test_no_checkpoint_is_edited_that_nobody_would_read(
    store: CanonicalStore, database: Database, state: JobState
) -> None:
    job_in(store, state)
    before = database.row()

    assert store.edit_checkpoint("task", '{"a": 1}') is False
    assert database.row() == before


@pytest.mark.parametrize("metadata", ["[1]", "7", "null", '"text"', "no json", '{"a": "\\u0000"}'])
def test_what_is_no_object_is_refused_as_a_checkpoint(
    store: CanonicalStore, database: Database, metadata: str
) -> None:
    job_in(store, JobState.FAILED)
    before = database.row()

    with pytest.raises(StoreRefused):
        store.edit_checkpoint("task", metadata)
    assert database.row() == before


def test_the_next_attempt_begins_from_the_checkpoint_that_was_edited(
    store: CanonicalStore,
) -> None:
    job_in(store, JobState.FAILED)
    store.edit_checkpoint("task", '{"last_id": 7}')
    store.resend("task", keep_progress=True)

    claim, _ = claimed(store, lost_attempt("third", retries=1, from_lease=2))

    assert claim.progress == {"percent": 40, "metadata": {"last_id": 7}}


def test_many_operators_at_once_leave_one_row_and_no_deadlock(
    store: CanonicalStore, database: Database, open_another: OpenStore
) -> None:
    job_in(store, JobState.RETRYABLE)
    together = threading.Barrier(6)
    errors: list[BaseException] = []

    def operate(store: CanonicalStore) -> None:
        together.wait()
        try:
            for _ in range(30):
                ask_each(store, "task")
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=operate, args=(open_another(),)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert errors == []
    assert database.row()["run_lease"] == 2
