"""The rescuer: what it takes, what it publishes, and that no fault of one job costs another."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from celery_awa.errors import RowLocked, StoreUnavailable, Unsendable
from celery_awa.model import (
    Envelope,
    JobState,
    LostJob,
    Snapshot,
    Transition,
    UnsentJob,
    Verdict,
)
from celery_awa.runtime import contact, rescue_part, unsent_jobs
from celery_awa.runtime.rescuer import RescueCounts, Rescuer
from celery_awa.runtime.trouble import Trouble
from tests.fake_courier import FakeCourier
from tests.fake_store import FakeDatabase, Row
from tests.runtime_parts import SOON, Clock, MakeThread, described, new_token, settings
from tests.waiting import eventually

WHOLE = Envelope(b"message", whole=True)
REQUEUE = {"lost_policy": "requeue", "envelope": WHOLE}
FAIL = {"lost_policy": "fail", "envelope": Envelope(b"message", whole=False)}
#: As settings() has it.
STALE_AFTER = 1_000.0
MakeRescuer = Callable[..., Rescuer]


@pytest.fixture(autouse=True)
def long_in_touch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence counts from the first look on; see test_contact.py for when it does not."""
    monkeypatch.setattr(contact, "RETURN_WITHIN", 0.0)


@pytest.fixture
def courier() -> FakeCourier:
    return FakeCourier()


@pytest.fixture
def make_rescuer(make_thread: MakeThread, courier: FakeCourier) -> Iterator[MakeRescuer]:
    """Makes rescuers which pass when they are told to, each with a database thread of its own."""
    made: list[Rescuer] = []

    def make(**changed: Any) -> Rescuer:
        slow = {"rescue_interval": 1_000.0}
        made.append(Rescuer(make_thread(), courier, settings(**(slow | changed)), Trouble()))
        return made[-1]

    yield make
    for one in made:
        one.stop(SOON)


@pytest.fixture
def rescuer(make_rescuer: MakeRescuer) -> Rescuer:
    return make_rescuer()


def claimed(database: FakeDatabase, task_id: str = "task", **fields: Any) -> Row:
    """A running job; unless it is said, it may be requeued."""
    claim = database.open().claim(described(new_token(), task_id, **(REQUEUE | fields)))
    assert claim.verdict is Verdict.YOURS
    return database.rows[task_id]


def lost(database: FakeDatabase, task_id: str = "task", **fields: Any) -> Row:
    """A job whose worker is known to be dead."""
    row = claimed(database, task_id, **fields)
    database.open().forsake([row.lease])
    return row


def unsent(database: FakeDatabase, task_id: str = "task", **fields: Any) -> Row:
    """A job of which the message was not published in time."""
    row = claimed(database, task_id, **fields)
    retry = Transition(JobState.RETRYABLE, unsent=True, run_in=5.0)
    database.open().end(row.lease, row.token, retry)
    database.pass_by(10)
    return row


def is_noted(row: Row) -> Callable[[], bool]:
    return lambda: not row.unsent


# What is lost.


def test_a_lost_job_is_requeued_and_sent_in_one_pass(
    rescuer: Rescuer, database: FakeDatabase, courier: FakeCourier
) -> None:
    row = claimed(database)
    database.open().heartbeat([row.lease])
    row.progress = {"percent": 40, "metadata": {"last_id": 4}}
    lease = row.lease
    database.pass_by(STALE_AFTER - 1)
    assert rescuer.run_once() == RescueCounts()
    database.pass_by(1)
    assert rescuer.run_once() == RescueCounts(requeued=1, sent=1)
    assert courier.sent == ["task"]
    assert (row.state, row.lease, row.rescues) == (JobState.RETRYABLE, lease, 1)
    assert row.progress == {"percent": 40, "metadata": {"last_id": 4}}
    eventually(is_noted(row))


@pytest.mark.parametrize("fields", [FAIL, REQUEUE | {"envelope": None}], ids=["fail", "no message"])
def test_what_may_not_run_again_fails_and_the_backend_hears_of_it(
    rescuer: Rescuer,
    database: FakeDatabase,
    courier: FakeCourier,
    caplog: pytest.LogCaptureFixture,
    fields: dict[str, Any],
) -> None:
    row = lost(database, **fields)
    row.progress = {"percent": 40}
    assert rescuer.run_once() == RescueCounts(failed=1, told=1)
    assert courier.told == [("task", JobState.FAILED, "WorkerLostError: no heartbeat")]
    assert (row.state, row.progress) == (JobState.FAILED, {"percent": 40})
    assert "task kind[task] failed: WorkerLostError: no heartbeat" in caplog.text
    eventually(is_noted(row))


def test_a_job_whose_cancellation_was_asked_for_is_cancelled(
    rescuer: Rescuer, database: FakeDatabase, courier: FakeCourier
) -> None:
    row = lost(database)
    database.open().request_cancel("task")
    assert rescuer.run_once() == RescueCounts(cancelled=1, told=1)
    assert courier.told == [("task", JobState.CANCELLED, "WorkerLostError: no heartbeat")]
    assert courier.sent == []
    assert row.state is JobState.CANCELLED


def test_a_copy_that_met_the_attempt_makes_two_missed_heartbeats_enough(
    make_rescuer: MakeRescuer, database: FakeDatabase
) -> None:
    rescuer = make_rescuer(heartbeat_interval=100.0)
    row = claimed(database)
    claim = database.open().claim(described(new_token(), "task", **REQUEUE))
    assert claim.verdict is Verdict.HELD
    database.pass_by(100)
    database.open().heartbeat([row.lease])
    database.pass_by(200)
    assert rescuer.run_once() == RescueCounts()
    database.open().claim(described(new_token(), "task", **REQUEUE))
    assert rescuer.run_once() == RescueCounts(requeued=1, sent=1)


def test_an_attempt_past_its_deadline_is_taken_though_it_lives(
    rescuer: Rescuer, database: FakeDatabase
) -> None:
    row = claimed(database, deadline=60.0)
    database.pass_by(59)
    assert rescuer.run_once() == RescueCounts()
    database.pass_by(1)
    database.open().heartbeat([row.lease])
    assert rescuer.run_once() == RescueCounts(requeued=1, sent=1)


def test_a_task_that_always_kills_its_worker_is_executed_four_times(
    rescuer: Rescuer, database: FakeDatabase, courier: FakeCourier
) -> None:
    for n in range(4):
        row = lost(database, from_lease=n)
        database.open().heartbeat([row.lease])
        # Progress alone is no advance.
        row.write(Snapshot(1, f'{{"percent": {n}, "metadata": {{"last_id": 1}}}}'))
        database.open().forsake([row.lease])
        counts = rescuer.run_once()
    assert counts == RescueCounts(failed=1, told=1)
    assert len(courier.sent) == 3
    assert row.progress == {"percent": 3, "metadata": {"last_id": 1}}


def test_a_task_that_advances_is_rescued_again_and_again(
    rescuer: Rescuer, database: FakeDatabase, courier: FakeCourier
) -> None:
    for n in range(10):
        row = lost(database, from_lease=n)
        row.progress = {"metadata": {"last_id": n}}
        assert rescuer.run_once() == RescueCounts(requeued=1, sent=1)
    assert len(courier.sent) == 10


def complete(database: FakeDatabase, row: Row) -> None:
    database.open().end(row.lease, row.token, Transition(JobState.COMPLETED))


def retry(database: FakeDatabase, row: Row) -> None:
    database.open().end(row.lease, row.token, Transition(JobState.RETRYABLE, run_in=5.0))


def heartbeat(database: FakeDatabase, row: Row) -> None:
    database.open().heartbeat([row.lease])


def claim_anew(database: FakeDatabase, row: Row) -> None:
    newer = described(new_token(), "task", from_lease=row.run_lease, **REQUEUE)
    database.open().claim(newer)


@pytest.mark.parametrize("act", [complete, retry, heartbeat, claim_anew])
def test_what_goes_on_between_look_and_take_is_left_alone(
    rescuer: Rescuer,
    database: FakeDatabase,
    courier: FakeCourier,
    act: Callable[[FakeDatabase, Row], None],
) -> None:
    row = claimed(database)
    database.pass_by(STALE_AFTER)
    after: list[Row] = []

    def meanwhile(job: LostJob | UnsentJob) -> None:
        act(database, row)
        after.append(replace(row))

    courier.before["result"] = meanwhile
    assert rescuer.run_once() == RescueCounts()
    assert [row] == after
    assert (courier.sent, courier.told) == ([], [])


def test_eight_rescuers_at_once_send_one_message(
    make_rescuer: MakeRescuer, database: FakeDatabase, courier: FakeCourier
) -> None:
    lost(database)
    all_have_looked = threading.Barrier(8)

    def meanwhile(job: LostJob | UnsentJob) -> None:
        if isinstance(job, LostJob):
            all_have_looked.wait(SOON)

    courier.before["result"] = meanwhile
    rescuers = [make_rescuer() for _ in range(8)]
    with ThreadPoolExecutor(8) as threads:
        counts = list(threads.map(lambda one: one.run_once(), rescuers))
    assert courier.sent == ["task"]
    assert sum(one.requeued for one in counts) == sum(one.sent for one in counts) == 1


@pytest.mark.parametrize("state", [JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED])
def test_a_result_of_this_run_wins(
    rescuer: Rescuer, database: FakeDatabase, courier: FakeCourier, state: JobState
) -> None:
    row = lost(database)
    courier.results["task"] = state
    assert rescuer.run_once() == RescueCounts(settled=1)
    assert (row.state, row.unsent) == (state, False)
    assert (courier.sent, courier.told) == ([], [])


def test_a_backend_that_cannot_be_asked_keeps_its_own_jobs_waiting_and_no_others(
    rescuer: Rescuer,
    database: FakeDatabase,
    courier: FakeCourier,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(rescue_part, "PAGE", 2)
    monkeypatch.setattr("celery_awa.runtime.lost_jobs.PAGE", 2)
    rows = [lost(database, name) for name in "abcdefg"]
    for name in "abcf":
        courier.raising["result", name] = ConnectionError("no route to host")
    assert rescuer.run_once() == RescueCounts(requeued=3, sent=3, postponed=4)
    assert sorted(courier.sent) == ["d", "e", "g"]
    assert [row.state is JobState.RUNNING for row in rows] == [name in "abcf" for name in "abcdefg"]
    assert "task a waits, since the result backend cannot be asked: ConnectionError" in caplog.text
    courier.raising.clear()
    assert rescuer.run_once() == RescueCounts(requeued=4, sent=4)


def test_a_backend_that_does_not_answer_is_left_alone_and_hides_no_job_for_ever(
    rescuer: Rescuer,
    database: FakeDatabase,
    courier: FakeCourier,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch, rescue_part)
    for name in "abcd":
        lost(database, name)
    courier.raising = {("result", name): TimeoutError() for name in "abc"}
    courier.before["result"] = lambda job: clock.pass_by(4 if job.task_id in "abc" else 0)
    assert rescuer.run_once() == RescueCounts(postponed=2)
    assert courier.asked == ["a", "b"]
    assert rescuer.run_once() == RescueCounts(postponed=1, requeued=1, sent=1)
    assert courier.sent == ["d"]
    courier.raising.clear()
    assert rescuer.run_once() == RescueCounts(requeued=3, sent=3)


def test_a_part_that_takes_too_long_goes_on_where_it_left_off(
    rescuer: Rescuer,
    database: FakeDatabase,
    courier: FakeCourier,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch, rescue_part)
    rows = {name: lost(database, name) for name in "abcd"}
    courier.before["result"] = lambda job: clock.pass_by(20 if isinstance(job, LostJob) else 0)
    assert rescuer.run_once() == RescueCounts(requeued=2, sent=2)
    lost_again = claimed(database, "a", from_lease=1)
    database.open().forsake([lost_again.lease])
    assert rescuer.run_once() == RescueCounts(requeued=2, sent=2)
    assert [rows[name].rescues for name in "abcd"] == [1, 1, 1, 1]
    assert rescuer.run_once() == RescueCounts(requeued=1, sent=1)


def test_a_row_that_the_database_refuses_costs_no_other_its_rescue(
    rescuer: Rescuer,
    database: FakeDatabase,
    courier: FakeCourier,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name in "abcde":
        lost(database, name)
    database.refused.add("c")
    database.locked.add("e")
    assert rescuer.run_once() == RescueCounts(requeued=3, sent=3, postponed=1)
    assert sorted(courier.sent) == ["a", "b", "d"]
    assert "task c is left to the next pass of the rescuer: StoreRefused" in caplog.text


# What is unsent.


def test_a_message_that_cannot_be_sent_is_sent_later_and_once(
    rescuer: Rescuer,
    database: FakeDatabase,
    courier: FakeCourier,
    caplog: pytest.LogCaptureFixture,
) -> None:
    row = lost(database)
    courier.raising["send", None] = OSError("connection refused")
    assert rescuer.run_once() == RescueCounts(requeued=1, postponed=1)
    assert "the message of task task cannot be sent now: OSError: connection refused" in caplog.text
    courier.raising.clear()
    assert rescuer.run_once() == RescueCounts()  # due again in ten seconds
    database.pass_by(10)
    assert rescuer.run_once() == RescueCounts(sent=1)
    eventually(is_noted(row))
    database.pass_by(10)
    assert rescuer.run_once() == RescueCounts()
    assert courier.sent == ["task"]


def test_a_retry_whose_worker_died_before_it_was_published_is_sent(
    rescuer: Rescuer, database: FakeDatabase, courier: FakeCourier
) -> None:
    row = claimed(database)
    own_end = Transition(JobState.RETRYABLE, unsent=True, run_in=60.0)
    database.open().end(row.lease, row.token, own_end)
    assert rescuer.run_once() == RescueCounts()
    database.pass_by(10)
    assert rescuer.run_once() == RescueCounts(sent=1)
    assert courier.sent == ["task"]


def test_what_an_operator_sends_again_is_sent(
    rescuer: Rescuer, database: FakeDatabase, courier: FakeCourier
) -> None:
    row = claimed(database)
    database.open().end(row.lease, row.token, Transition(JobState.FAILED))
    courier.results["task"] = JobState.FAILED
    database.open().resend("task", keep_progress=True)
    assert rescuer.run_once() == RescueCounts(sent=1)
    assert courier.sent == ["task"]


def test_a_run_that_succeeded_after_all_is_not_sent_again(
    rescuer: Rescuer, database: FakeDatabase, courier: FakeCourier
) -> None:
    row = unsent(database)
    courier.results["task"] = JobState.COMPLETED
    assert rescuer.run_once() == RescueCounts(settled=1)
    assert (row.state, row.unsent) == (JobState.COMPLETED, False)
    assert courier.sent == []


def test_nothing_is_sent_while_the_backend_cannot_say_whether_it_is_needed(
    rescuer: Rescuer, database: FakeDatabase, courier: FakeCourier
) -> None:
    unsent(database, "a")
    unsent(database, "b")
    courier.raising["result", "a"] = ConnectionError()
    assert rescuer.run_once() == RescueCounts(sent=1, postponed=1)
    assert courier.sent == ["b"]


@pytest.mark.parametrize(
    ("envelope", "why"),
    [
        (None, "it was not kept"),
        (Envelope(b"", whole=False), "it was kept without its arguments"),
        (WHOLE, "no such serializer"),
    ],
    ids=["none", "not whole", "by the courier's word"],
)
def test_what_can_never_be_sent_fails_and_is_told_in_the_same_pass(
    rescuer: Rescuer,
    database: FakeDatabase,
    courier: FakeCourier,
    envelope: Envelope | None,
    why: str,
) -> None:
    row = unsent(database, envelope=envelope)
    courier.raising["send", None] = Unsendable("no such serializer")
    assert rescuer.run_once() == RescueCounts(failed=1, told=1)
    error = f"its message cannot be sent again: {why}"
    assert courier.told == [("task", JobState.FAILED, error)]
    assert row.state is JobState.FAILED
    eventually(is_noted(row))


def test_a_waiting_job_that_is_cancelled_is_told_and_not_sent(
    rescuer: Rescuer, database: FakeDatabase, courier: FakeCourier
) -> None:
    unsent(database)
    database.open().request_cancel("task")
    assert rescuer.run_once() == RescueCounts(told=1)
    assert (courier.told, courier.sent) == ([("task", JobState.CANCELLED, None)], [])


@pytest.mark.parametrize("error", [KeyError("a fault"), StoreUnavailable(), RecursionError()])
def test_whatever_a_call_raises_costs_no_other_job_its_turn(
    rescuer: Rescuer, database: FakeDatabase, courier: FakeCourier, error: Exception
) -> None:
    for name in "ab":
        unsent(database, name)
    for name in "cd":
        lost(database, name, **FAIL)
    courier.raising = {("send", "a"): error, ("tell", "c"): error}
    assert rescuer.run_once() == RescueCounts(failed=2, sent=1, told=1, postponed=2)
    assert courier.sent == ["b"]
    assert [task for task, _, _ in courier.told] == ["d"]
    courier.raising.clear()
    database.pass_by(10)
    assert rescuer.run_once() == RescueCounts(sent=1, told=1)


def test_a_broker_that_does_not_answer_holds_up_no_end_that_is_to_be_told(
    rescuer: Rescuer,
    database: FakeDatabase,
    courier: FakeCourier,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch, rescue_part)
    for name in "abcd":
        unsent(database, name)
    lost(database, "e", **FAIL)
    tried: list[str] = []

    def hang(job: LostJob | UnsentJob) -> None:
        tried.append(job.task_id)
        clock.pass_by(4)

    courier.before["send"] = hang
    courier.raising["send", None] = TimeoutError()
    assert rescuer.run_once() == RescueCounts(failed=1, told=1, postponed=4)
    assert tried == ["a", "b"]


def test_what_could_not_be_sent_comes_after_the_rest_the_next_time(
    rescuer: Rescuer, database: FakeDatabase, courier: FakeCourier
) -> None:
    for name in "abc":
        unsent(database, name)
    courier.raising["send", "a"] = OSError()
    rescuer.run_once()
    for row in database.rows.values():
        row.send_after = 0.0
    del courier.raising["send", "a"]
    rescuer.run_once()
    assert courier.sent == ["b", "c", "b", "c", "a"]


def test_more_than_one_page_is_published_in_one_pass(
    rescuer: Rescuer,
    database: FakeDatabase,
    courier: FakeCourier,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unsent_jobs, "PAGE", 2)
    for n in range(7):
        unsent(database, f"task {n}")
    assert rescuer.run_once() == RescueCounts(sent=7)


def test_a_pass_ends_though_what_it_could_not_send_is_due_again_meanwhile(
    rescuer: Rescuer, database: FakeDatabase, courier: FakeCourier
) -> None:
    for name in "ab":
        unsent(database, name)
    courier.raising["send", None] = OSError()
    courier.before["send"] = lambda job: database.pass_by(10)
    assert rescuer.run_once() == RescueCounts(postponed=2)


# The database's faults.


def test_a_lost_answer_to_the_note_that_a_message_was_sent_is_asked_for_again(
    rescuer: Rescuer, database: FakeDatabase, courier: FakeCourier
) -> None:
    row = unsent(database)
    database.unanswered.append("sent")
    rescuer.run_once()
    eventually(is_noted(row))
    assert courier.sent == ["task"]


def test_what_was_sent_is_not_sent_again_while_that_is_on_its_way_to_the_database(
    rescuer: Rescuer, database: FakeDatabase, courier: FakeCourier
) -> None:
    row = unsent(database)
    database.raising["sent"] = RowLocked()
    assert rescuer.run_once() == RescueCounts(sent=1)
    database.pass_by(10)
    assert rescuer.run_once() == RescueCounts()
    del database.raising["sent"]
    eventually(is_noted(row))
    assert courier.sent == ["task"]


def test_once_that_is_noted_the_same_lease_can_be_sent_again(
    rescuer: Rescuer, database: FakeDatabase, courier: FakeCourier
) -> None:
    row = unsent(database)
    rescuer.run_once()
    eventually(is_noted(row))
    database.open().resend("task", keep_progress=False)
    assert rescuer.run_once() == RescueCounts(sent=1)
    assert courier.sent == ["task", "task"]


def test_what_was_sent_and_does_not_come_is_sent_again(
    make_rescuer: MakeRescuer, database: FakeDatabase, courier: FakeCourier
) -> None:
    rescuer = make_rescuer(resend_after=100.0)
    row = unsent(database)
    for number in (1, 2, 3):
        assert rescuer.run_once() == RescueCounts(sent=1)
        eventually(is_noted(row))
        assert courier.sent == ["task"] * number
        database.pass_by(99)
        assert rescuer.run_once() == RescueCounts()
        database.pass_by(1)
    database.open().claim(described(new_token(), from_lease=row.run_lease, **REQUEUE))
    assert rescuer.run_once() == RescueCounts()


def test_a_run_that_succeeded_though_its_message_did_not_come_is_not_sent_again(
    make_rescuer: MakeRescuer, database: FakeDatabase, courier: FakeCourier
) -> None:
    rescuer = make_rescuer(resend_after=100.0)
    row = unsent(database)
    rescuer.run_once()
    eventually(is_noted(row))
    courier.results["task"] = JobState.COMPLETED
    database.pass_by(100)
    assert rescuer.run_once() == RescueCounts(settled=1)
    assert courier.sent == ["task"]


def test_nothing_more_is_sent_once_the_database_is_known_to_be_away(
    make_thread: MakeThread,
    database: FakeDatabase,
    courier: FakeCourier,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(rescue_part, "ASK_TIMEOUT", 0.2)
    caplog.set_level(logging.INFO, "celery_awa")
    thread = make_thread()
    rescuer = Rescuer(thread, courier, settings(), Trouble())
    rows = [unsent(database, name) for name in "abc"]

    def meanwhile(job: LostJob | UnsentJob) -> None:
        if job.task_id == "a":
            database.go_away()
        else:
            eventually(lambda: not thread.answering)

    courier.before["send"] = meanwhile
    with pytest.raises(StoreUnavailable):
        rescuer.run_once()
    assert courier.sent == ["a", "b"]
    assert "celery-awa: jobs rescued or sent: 2 sent" in caplog.text
    database.come_back()
    eventually(lambda: not rows[0].unsent and not rows[1].unsent)
    database.pass_by(10)
    courier.before.clear()
    assert rescuer.run_once() == RescueCounts(sent=1)
    assert courier.sent == ["a", "b", "c"]


def test_a_fault_of_one_part_leaves_the_other_to_be_done(
    rescuer: Rescuer,
    database: FakeDatabase,
    courier: FakeCourier,
    caplog: pytest.LogCaptureFixture,
) -> None:
    unsent(database)
    database.raising["lost"] = RowLocked("a lock on the table")
    assert rescuer.run_once() == RescueCounts(sent=1)
    assert "leaves a part of its pass to the next: RowLocked: a lock on the table" in caplog.text


def test_while_the_database_is_away_the_thread_says_nothing_and_goes_on(
    make_rescuer: MakeRescuer,
    database: FakeDatabase,
    courier: FakeCourier,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(rescue_part, "ASK_TIMEOUT", 0.05)
    lost(database)
    database.go_away()
    make_rescuer(rescue_interval=0.01).start()
    tries = database.tries
    eventually(lambda: database.tries > tries + 3)
    database.come_back()
    eventually(lambda: courier.sent == ["task"])
    warnings = [one.message for one in caplog.records if one.levelno > logging.INFO]
    assert len(warnings) == 1
    assert "cannot use its database" in warnings[0]


# The thread.


def test_the_thread_passes_within_the_interval(
    make_rescuer: MakeRescuer, database: FakeDatabase, courier: FakeCourier
) -> None:
    make_rescuer(rescue_interval=0.05).start()
    lost(database)
    eventually(lambda: courier.sent == ["task"])


def test_who_wakes_the_rescuer_gets_a_pass_at_once(
    rescuer: Rescuer, database: FakeDatabase, courier: FakeCourier
) -> None:
    rescuer.start()
    lost(database)
    rescuer.wake()
    eventually(lambda: courier.sent == ["task"])


def test_a_pass_that_is_stopped_ends_with_the_job_at_hand(
    rescuer: Rescuer, database: FakeDatabase, courier: FakeCourier
) -> None:
    rows = [unsent(database, name) for name in "abc"]
    sending, flowing = threading.Event(), threading.Event()

    def hang(job: LostJob | UnsentJob) -> None:
        sending.set()
        assert flowing.wait(SOON)

    courier.before["send"] = hang
    rescuer.start()
    rescuer.wake()
    assert sending.wait(SOON)
    assert not rescuer.stop(0.05)  # it is in a call that nobody can cut short
    flowing.set()
    assert rescuer.stop(SOON)
    assert courier.sent == ["a"]
    eventually(is_noted(rows[0]))
    assert [row.unsent for row in rows] == [False, True, True]


def test_while_the_database_is_away_a_stop_does_not_wait(
    make_thread: MakeThread,
    database: FakeDatabase,
    courier: FakeCourier,
) -> None:
    thread = make_thread()
    rescuer = Rescuer(thread, courier, settings(), Trouble())
    database.go_away()
    rescuer.start()
    rescuer.wake()
    eventually(lambda: not thread.answering)
    began = time.monotonic()
    assert not rescuer.stop(60)
    assert time.monotonic() - began < rescue_part.ASK_TIMEOUT / 2


def test_a_call_that_hangs_holds_up_no_heartbeat(
    make_rescuer: MakeRescuer,
    make_thread: MakeThread,
    database: FakeDatabase,
    courier: FakeCourier,
) -> None:
    thread = make_thread()
    rescuer = Rescuer(thread, courier, settings(), Trouble())
    unsent(database)
    running = claimed(database, "running")
    sending, flowing = threading.Event(), threading.Event()

    def hang(job: LostJob | UnsentJob) -> None:
        sending.set()
        assert flowing.wait(SOON)

    courier.before["send"] = hang
    rescuer.start()
    rescuer.wake()
    assert sending.wait(SOON)
    assert running.lease in thread.ask(lambda store: store.heartbeat([running.lease]), SOON)
    flowing.set()
    assert rescuer.stop(SOON)


def test_a_forked_child_rescues_nothing(
    rescuer: Rescuer, database: FakeDatabase, courier: FakeCourier
) -> None:
    lost(database)
    rescuer.start()
    pid = os.fork()
    if not pid:
        threading.Timer(SOON, os._exit, (1,)).start()
        rescuer.wake()
        idle = rescuer.run_once() == RescueCounts() and rescuer.stop(60)
        os._exit(0 if idle and not courier.asked else 2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert rescuer.run_once() == RescueCounts(requeued=1, sent=1)


def test_a_fork_waits_for_a_call_to_end(
    rescuer: Rescuer, database: FakeDatabase, courier: FakeCourier
) -> None:
    unsent(database)
    sending, flowing = threading.Event(), threading.Event()

    def hang(job: LostJob | UnsentJob) -> None:
        sending.set()
        assert flowing.wait(SOON)

    courier.before["send"] = hang
    with ThreadPoolExecutor(2) as threads:
        passed = threads.submit(rescuer.run_once)
        assert sending.wait(SOON)

        def fork() -> bool:
            pid = os.fork()
            if not pid:
                os._exit(0)
            os.waitpid(pid, 0)
            return flowing.is_set()

        forked = threads.submit(fork)
        threading.Timer(0.1, flowing.set).start()
        assert forked.result(SOON)
        assert passed.result(SOON) == RescueCounts(sent=1)


# What is told.


def test_one_line_tells_what_a_pass_did_and_none_that_it_did_nothing(
    rescuer: Rescuer,
    database: FakeDatabase,
    courier: FakeCourier,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "celery_awa")
    rescuer.run_once()
    assert caplog.messages == []
    lost(database, "a")
    lost(database, "b")
    lost(database, "c", **FAIL)
    courier.raising["send", "b"] = OSError()
    rescuer.run_once()
    line = "celery-awa: jobs rescued or sent: 2 requeued, 1 failed, 1 sent, 1 told, 1 postponed"
    assert caplog.messages[-1] == line


def test_of_many_failed_tasks_twenty_are_named(
    rescuer: Rescuer, database: FakeDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    for n in range(25):
        lost(database, f"task {n}", **FAIL)
    assert rescuer.run_once() == RescueCounts(failed=25, told=25)
    named = [line for line in caplog.messages if "failed: WorkerLostError" in line]
    assert len(named) == 20
    assert "celery-awa: 5 more tasks failed" in caplog.messages


def test_the_counts_of_all_passes_are_added_up(rescuer: Rescuer, database: FakeDatabase) -> None:
    assert rescuer.totals() == RescueCounts()
    lost(database, "a")
    rescuer.run_once()
    lost(database, "b")
    lost(database, "c", **FAIL)
    rescuer.run_once()
    assert rescuer.totals() == RescueCounts(requeued=2, failed=1, sent=2, told=1)
