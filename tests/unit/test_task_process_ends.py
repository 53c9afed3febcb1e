"""Ends of attempts: written once, kept while the database is away, and never a task's trouble."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from celery_awa.errors import StoreUnavailable
from celery_awa.model import Answer, Envelope, JobState, Transition
from celery_awa.runtime import completed, database_thread
from celery_awa.runtime.attempt import Attempt
from celery_awa.runtime.slate import Slate
from celery_awa.runtime.task_process import TaskProcess
from tests.fake_store import FakeDatabase
from tests.runtime_parts import (
    SOON,
    StartProcess,
    begin,
    carried,
    claimed,
    described,
    new_token,
    undescribable,
)
from tests.waiting import eventually

COMPLETED = Transition(JobState.COMPLETED)
FAILED = Transition(
    JobState.FAILED, error="ValueError: boom", envelope=Envelope(b"whole", whole=True)
)
RETRYABLE = Transition(JobState.RETRYABLE, run_in=5.0, unsent=True)


@pytest.mark.parametrize("claim", [True, False])
@pytest.mark.parametrize("transition", [FAILED, RETRYABLE, Transition(JobState.CANCELLED)])
def test_an_end_writes_state_and_last_snapshot(
    process: TaskProcess, database: FakeDatabase, claim: bool, transition: Transition
) -> None:
    one = begin(process, claim=claim)
    one.set_progress(60)
    ended = process.end(one, transition)
    row = database.rows["task"]
    assert ended is not None
    assert (ended.answer, ended.lease) == (Answer.DONE, row.lease)
    assert (row.state, row.progress) == (transition.to, {"percent": 60})
    assert process.attempts() == 0
    assert process.end(one, COMPLETED) is None


def test_success_clears_the_progress(process: TaskProcess, database: FakeDatabase) -> None:
    one = claimed(process)
    one.set_progress(60)
    one.flush_progress()
    process.end(one, COMPLETED)
    assert database.rows["task"].state is JobState.COMPLETED
    assert database.rows["task"].progress is None


def test_success_before_the_claim_leaves_a_row_if_something_was_reported(
    process: TaskProcess, database: FakeDatabase
) -> None:
    ones = [begin(process, f"task {n}") for n in range(50)]
    for one in ones:
        one.set_progress(100)
        assert process.end(one, COMPLETED) is None
    eventually(lambda: len(database.rows) == 50)
    assert {row.state for row in database.rows.values()} == {JobState.COMPLETED}
    assert database.count("record_completed") < 25
    assert process.attempts() == 0


def test_rows_of_successes_are_written_at_the_stop(
    process: TaskProcess, database: FakeDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completed, "GATHER", 3600.0)
    one = begin(process)
    one.set_progress(100)
    process.end(one, COMPLETED)
    assert process.stop(SOON)
    assert database.rows["task"].state is JobState.COMPLETED


def test_the_stop_says_that_a_success_could_not_be_recorded(
    process: TaskProcess, database: FakeDatabase
) -> None:
    database.locked.add("task")
    one = begin(process)
    one.set_progress(100)
    process.end(one, COMPLETED)
    assert not process.stop(0.1)


def test_rows_of_successes_wait_for_the_database(
    process: TaskProcess, database: FakeDatabase
) -> None:
    database.go_away()
    for n in range(3):
        one = begin(process, f"task {n}")
        one.set_progress(100)
        process.end(one, COMPLETED)
    eventually(lambda: not process.database.answering)
    database.come_back()
    eventually(lambda: len(database.rows) == 3)


def test_a_locked_or_refused_row_of_a_success_costs_no_other_its_row(
    process: TaskProcess, database: FakeDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    database.locked.add("task 1")
    database.refused.add("task 2")
    for n in range(5):
        one = begin(process, f"task {n}")
        one.set_progress(100)
        process.end(one, COMPLETED)
    eventually(lambda: len(database.rows) == 3)
    database.locked.clear()
    eventually(lambda: "task 1" in database.rows)
    assert "no row for task task 2" in caplog.text
    before = len(database.statements)
    process.stop(SOON)
    assert len(database.statements) == before


def test_of_a_batch_only_the_locked_rows_are_tried_again(
    process: TaskProcess, database: FakeDatabase
) -> None:
    database.locked.add("task 1")
    for n in range(5):
        one = begin(process, f"task {n}")
        one.set_progress(100)
        process.end(one, COMPLETED)
    eventually(lambda: [new.task_id for new in process._completed._waiting] == ["task 1"])
    assert len(database.rows) == 4


def test_kept_successes_hold_no_envelopes_and_are_bounded(
    process: TaskProcess, database: FakeDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completed, "LIMIT", 3)
    with database.hanging():
        for n in range(5):
            one = begin(process, f"task {n}")
            one.set_progress(100)
            process.end(one, COMPLETED)
        kept = process._completed._waiting
        assert [new.envelope for new in kept] == [None] * 3
        assert process.database.dropped == 2


def test_an_end_while_the_claim_is_under_way_leaves_no_running_row(
    process: TaskProcess, database: FakeDatabase
) -> None:
    for transition in (COMPLETED, FAILED):
        one = begin(process, str(transition.to))
        one.set_progress(60)
        process.database.ask(lambda store: None, SOON)
        with database.hanging():
            claimer = threading.Thread(target=process.learn, args=(one, SOON))
            claimer.start()
            database.until(lambda: "claim" in database.statements[-1:])
            ender = threading.Thread(target=process.end, args=(one, transition))
            ender.start()
            eventually(lambda one=one: one.ended)
        claimer.join(SOON)
        ender.join(SOON)
        eventually(lambda: process.attempts() == 0)
        assert database.rows[str(transition.to)].state is transition.to


def test_an_end_before_the_claim_is_sent_keeps_it_from_being_sent(
    process: TaskProcess, database: FakeDatabase
) -> None:
    with database.hanging():
        process.database.post(lambda store: store.knows("something slow"))
        one = begin(process)
        claimer = threading.Thread(target=process.learn, args=(one, SOON))
        claimer.start()
        eventually(lambda: len(process.database._errands) == 2)
        assert process.end(one, COMPLETED) is None
    claimer.join(SOON)
    assert database.statements == ["knows"]
    assert database.rows == {}


def test_an_end_that_meets_a_claim_whose_answer_never_came_leaves_no_ghost(
    process: TaskProcess, database: FakeDatabase
) -> None:
    one = begin(process)
    one.set_progress(60)
    database.unanswered.append("claim")
    with pytest.raises(StoreUnavailable):
        claim_and_cut(process, database, one)
    assert database.rows["task"].state is JobState.RUNNING
    assert (one.claim_sent, one.lease) == (True, None)
    assert process.end(one, COMPLETED) is None
    database.come_back()
    eventually(lambda: database.rows["task"].state is JobState.COMPLETED)
    assert database.rows["task"].run_lease == 1


def claim_and_cut(process: TaskProcess, database: FakeDatabase, one: Attempt) -> None:
    """Let a claim be carried out, and the database be away from its answer on."""

    def work(store: Any) -> None:
        try:
            process._claims.claim(store, one, late=False)
        finally:
            database.go_away()

    process.database.ask(work, 0.1)


@pytest.mark.parametrize("transition", [COMPLETED, FAILED, RETRYABLE])
def test_an_end_whose_answer_was_lost_is_confirmed_and_not_taken_for_gone(
    process: TaskProcess, database: FakeDatabase, transition: Transition
) -> None:
    one = claimed(process)
    database.unanswered.append("end")
    ended = process.end(one, transition)
    assert ended is not None
    assert ended.answer is Answer.REPEATED
    assert database.count("end") == 2
    assert not one.lost
    unclaimed = begin(process, "unclaimed")
    unclaimed.set_progress(1)
    unclaimed.claim_sent = True
    database.unanswered.append("end_unclaimed")
    ended = process.end(unclaimed, transition)
    assert ended is not None
    assert ended.answer is Answer.REPEATED


def test_an_end_while_the_database_is_away_is_kept_and_nobody_waits(
    process: TaskProcess, database: FakeDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_thread, "COURTESY", 3600.0)
    one, second = claimed(process), claimed(process, "second")
    one.set_progress(60)
    database.go_away()
    assert process.end(one, FAILED) is None
    assert not process.database.answering
    assert process.end(second, FAILED) is None
    database.come_back()
    eventually(lambda: process.attempts() == 0)
    assert database.rows["task"].progress == {"percent": 60}
    assert {row.state for row in database.rows.values()} == {JobState.FAILED}
    assert not process._ends


def test_an_end_waits_by_courtesy_only(
    process: TaskProcess, database: FakeDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = claimed(process)
    monkeypatch.setattr(database_thread, "COURTESY", 0.02)
    with database.hanging():
        began = time.monotonic()
        assert process.end(one, FAILED) is None
        assert time.monotonic() - began < 1
    eventually(lambda: database.rows["task"].state is JobState.FAILED)


def test_an_end_that_is_dropped_lets_go_of_its_attempt(
    start_process: StartProcess,
    database: FakeDatabase,
    slate: Slate,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = start_process(slate)
    monkeypatch.setattr(database_thread, "KEPT_LIMIT", 2)
    monkeypatch.setattr(database_thread, "COURTESY", 0.01)
    ones = [claimed(process, f"task {n}") for n in range(3)]
    with database.hanging():
        for one in ones:
            process.end(one, FAILED)
        assert process.database.dropped == 1
        assert process.attempts() == 2
        assert sorted(carried(slate)) == ["task 1", "task 2"]


def test_an_end_that_is_refused_altogether_lets_go_of_its_attempt(
    start_process: StartProcess,
    database: FakeDatabase,
    slate: Slate,
    caplog: pytest.LogCaptureFixture,
) -> None:
    process = start_process(slate)
    one = claimed(process)
    database.refused.add("task")
    assert process.end(one, FAILED) is None
    assert process.attempts() == 0
    assert carried(slate) == []
    eventually(lambda: "refused" in caplog.text)


def test_what_the_database_refuses_of_an_end_is_left_out(
    process: TaskProcess, database: FakeDatabase
) -> None:
    one = claimed(process)
    database.refused_errors.add("task")
    one.set_progress(60)
    process.end(one, FAILED)
    row = database.rows["task"]
    assert (row.state, row.progress, row.errors) == (JobState.FAILED, {"percent": 60}, [])


def test_an_attempt_that_lost_its_lease_ends_without_a_word(
    process: TaskProcess, database: FakeDatabase
) -> None:
    one = claimed(process)
    one.answer(acknowledged=0, confirmed_at=0.0, lost=True)
    before = len(database.statements)
    assert process.end(one, FAILED) is None
    assert len(database.statements) == before
    assert process.attempts() == 0


def test_an_old_attempt_changes_nothing_of_the_next(
    process: TaskProcess, database: FakeDatabase
) -> None:
    old = claimed(process)
    new = claimed(process, retries=1)
    new.set_progress(5)
    new.flush_progress()
    ended = process.end(old, COMPLETED)
    assert ended is not None
    assert ended.answer is Answer.GONE
    row = database.rows["task"]
    assert (row.state, row.progress) == (JobState.RUNNING, {"percent": 5})


@pytest.mark.parametrize("claim", [True, False])
@pytest.mark.parametrize("transition", [COMPLETED, FAILED])
@pytest.mark.parametrize(
    "error", [RuntimeError("a bug"), StoreUnavailable("cut"), KeyboardInterrupt()]
)
def test_nothing_that_goes_wrong_reaches_who_ends(
    process: TaskProcess,
    database: FakeDatabase,
    monkeypatch: pytest.MonkeyPatch,
    claim: bool,
    transition: Transition,
    error: BaseException,
) -> None:
    one = begin(process, claim=claim)
    one.set_progress(60)
    for name in ("end", "end_unclaimed", "record_completed", "claim"):
        database.raising[name] = error
    monkeypatch.setattr(logger_of_ours(), "log", lambda *_, **__: 1 / 0)
    assert process.end(one, transition) is None
    database.raising.clear()
    assert process.database.ask(lambda store: store.knows("task"), SOON) is claim


def logger_of_ours() -> Any:
    from celery_awa.runtime.trouble import logger

    return logger


@pytest.mark.parametrize("claim", [True, False])
@pytest.mark.parametrize("transition", [COMPLETED, FAILED])
def test_an_attempt_that_cannot_be_described_ends_as_well_as_it_can(
    process: TaskProcess, database: FakeDatabase, claim: bool, transition: Transition
) -> None:
    one = undescribable(desk=process)
    process.begin(one, claim=False)
    one.set_progress(60)
    if claim:
        one.claimed(database.open().claim(described(one.token)), time.monotonic())
        one.claim_sent = True
    process.end(one, transition)
    eventually(lambda: process.attempts() == 0)
    assert [row.state for row in database.rows.values()] == ([transition.to] if claim else [])


def test_an_unclaimable_attempt_ends_without_a_word(
    process: TaskProcess, database: FakeDatabase
) -> None:
    database.refused.add("task")
    one = begin(process, claim=True)
    assert process.end(one, FAILED) is None
    assert database.statements == ["claim"]
    assert process.attempts() == 0


def test_the_end_of_a_message_that_never_started_is_written(
    process: TaskProcess, database: FakeDatabase
) -> None:
    process.end_unstarted(described(new_token()), Transition(JobState.CANCELLED))
    eventually(lambda: "task" in database.rows)
    assert database.rows["task"].state is JobState.CANCELLED


def test_a_published_message_is_noted(process: TaskProcess, database: FakeDatabase) -> None:
    one = claimed(process)
    ended = process.end(one, RETRYABLE)
    assert ended is not None
    assert ended.lease is not None
    assert database.rows["task"].unsent
    process.sent(ended.lease)
    eventually(lambda: not database.rows["task"].unsent)


# Replacing.


def test_after_a_replacement_that_failed_the_attempt_has_a_row_with_its_progress_again(
    process: TaskProcess, database: FakeDatabase
) -> None:
    one = claimed(process)
    one.set_progress(60)
    one.flush_progress()
    ended = process.end(one, Transition(None))
    assert ended is not None
    assert ended.answer is Answer.DONE
    assert database.rows == {}
    process.reopen(one)
    assert one.pending
    assert one.flush_progress() is True
    assert database.rows["task"].progress == {"percent": 60}
    process.end(one, FAILED)
    assert database.rows["task"].state is JobState.FAILED


def test_an_unconfirmed_end_of_a_replaced_attempt_does_not_come_later(
    start_process: StartProcess, database: FakeDatabase, slate: Slate
) -> None:
    process = start_process(slate)
    one = claimed(process)
    database.go_away()
    assert process.end(one, Transition(None)) is None
    process.reopen(one)
    before = database.count("end", "end_unclaimed")
    database.come_back()
    one.set_progress(60)
    assert one.flush_progress() is True
    assert database.count("end", "end_unclaimed") == before
    assert database.rows["task"].progress == {"percent": 60}
    assert carried(slate) == ["task"]
