"""Attempts of one process: claimed, flushed and ended over a thread, whatever the database does."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from celery_awa.errors import LeaseLost, StoreUnavailable
from celery_awa.model import Answer, JobState, Transition
from celery_awa.runtime import breaker, claims, completed, database_thread, errand
from celery_awa.runtime.attempt import Attempt
from celery_awa.runtime.page import Page
from celery_awa.runtime.slate import Slate
from celery_awa.runtime.task_process import TaskProcess
from celery_awa.runtime.trouble import Trouble
from tests.fake_store import FakeDatabase
from tests.waiting import eventually

from tests.runtime_parts import (
    SOON,
    attempt,
    described,
    new_token,
    settings,
    struck_at_every_point,
    undescribable,
)

COMPLETED = Transition(JobState.COMPLETED)
FAILED = Transition(JobState.FAILED, error="ValueError: boom", envelope=b"whole")
RETRYABLE = Transition(JobState.RETRYABLE, run_in=5.0, unsent=True)

Make = Callable[..., TaskProcess]


@pytest.fixture
def database() -> FakeDatabase:
    return FakeDatabase()


@pytest.fixture
def make(database: FakeDatabase, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes processes in which nothing happens by itself but what a setting says."""
    monkeypatch.setattr(breaker, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(breaker, "LONGEST_PAUSE", 0.02)
    monkeypatch.setattr(errand, "LOCKED_PAUSE", 0.01)
    monkeypatch.setattr(claims, "LOCKED_PAUSE", 0.01)
    monkeypatch.setattr(completed, "LOCKED_PAUSE", 0.01)
    monkeypatch.setattr(completed, "GATHER", 0.01)
    made: list[TaskProcess] = []

    def make_one(slate: Slate | None = None, **changed: Any) -> TaskProcess:
        made.append(TaskProcess(settings(**changed), database.open, Trouble(), slate=slate))
        return made[-1]

    yield make_one
    database.come_back()
    database.locked.clear()
    for one in made:
        one.database.stop(SOON)


@pytest.fixture
def process(make: Make) -> TaskProcess:
    return make()


@pytest.fixture
def slate(tmp_path: Path) -> Iterator[Slate]:
    slate = Slate.create(str(tmp_path), 4, 66_560)
    yield slate
    slate.close(unlink=True)


def begin(
    process: TaskProcess, task_id: str = "task", *, claim: bool = False, **fields: Any
) -> Attempt:
    one = attempt(task_id, process, **fields)
    process.begin(one, claim=claim)
    return one


def claimed(process: TaskProcess, task_id: str = "task", **fields: Any) -> Attempt:
    one = begin(process, task_id, claim=True, **fields)
    assert one.lease is not None
    return one


def carried(slate: Slate) -> list[str]:
    return [page.task_id for page in slate.pages()]


# Begin and claim.


def test_a_short_task_that_reports_nothing_asks_for_nothing(
    process: TaskProcess, database: FakeDatabase
) -> None:
    for _ in range(100):
        assert process.end(begin(process), COMPLETED) is None
    assert process.stop(SOON)
    assert database.opened == 0
    assert process.attempts() == 0


def test_an_attempt_is_claimed_once_it_ran_for_a_while(make: Make, database: FakeDatabase) -> None:
    process = make(claim_after=0.05)
    one = begin(process)
    assert one.claim is None
    eventually(lambda: one.lease)
    assert database.statements == ["claim"]


def test_who_reported_is_claimed_at_the_next_cycle(make: Make, database: FakeDatabase) -> None:
    process = make(write_interval=0.05, heartbeat_interval=0.1)
    one, silent = begin(process), begin(process, "silent")
    one.set_progress(40)
    eventually(lambda: one.lease and not one.pending)
    assert database.rows["task"].progress == {"percent": 40}
    assert silent.claim is None


def test_an_attempt_is_claimed_at_its_start_where_asked(
    process: TaskProcess, database: FakeDatabase
) -> None:
    claimed(process)
    assert database.statements == ["claim"]


@pytest.mark.parametrize("known", [True, False])
def test_a_look_claims_only_a_task_that_has_a_row(
    process: TaskProcess, database: FakeDatabase, known: bool
) -> None:
    if known:
        database.open().claim(described("earlier"))
    one = attempt(desk=process)
    process.begin(one, claim=False, look=True)
    assert bool(one.lease) is known


def test_a_claim_at_the_start_that_finds_the_database_away_does_not_wait_and_follows(
    process: TaskProcess, database: FakeDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_thread, "COURTESY", 3600.0)
    database.go_away()
    one, second = begin(process, claim=True), begin(process, "second", claim=True)
    assert one.claim is None
    database.come_back()
    eventually(lambda: one.lease and second.lease)


def test_a_claim_at_the_start_waits_by_courtesy_only(
    process: TaskProcess, database: FakeDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_thread, "COURTESY", 0.02)
    with database.hanging():
        began = time.monotonic()
        one = begin(process, claim=True)
        assert time.monotonic() - began < 1
    eventually(lambda: one.lease)


def test_reading_before_the_claim_waits_for_it(
    process: TaskProcess, database: FakeDatabase
) -> None:
    database.open().claim(described("earlier"))
    database.rows["task"].progress = {"percent": 3, "metadata": {"last_id": 7}}
    one = begin(process, retries=1)
    assert dict(one.checkpoint) == {"last_id": 7}
    assert one.progress == {"percent": 3, "metadata": {"last_id": 7}}
    assert database.count("claim") == 2


def test_reading_while_the_database_is_away_raises_in_time(
    process: TaskProcess, database: FakeDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("celery_awa.runtime.attempt.READ_TIMEOUT", 0.05)
    one = begin(process)
    with database.hanging(), pytest.raises(StoreUnavailable):
        one.checkpoint  # noqa: B018
    assert dict(one.checkpoint) == {}


def test_reading_says_that_the_lease_is_lost(process: TaskProcess, database: FakeDatabase) -> None:
    database.open().claim(described("another"))
    database.rows["task"].state = JobState.COMPLETED
    one = begin(process)
    for read in (lambda: one.checkpoint, lambda: one.progress):
        with pytest.raises(LeaseLost):
            read()
    assert process.owns(one) is False


def test_reading_says_that_the_database_refused_the_attempt(
    process: TaskProcess, database: FakeDatabase
) -> None:
    database.refused.add("task")
    one = begin(process)
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="refused"):
            one.checkpoint  # noqa: B018
    assert database.count("claim") == 1


def test_nothing_foreign_is_raised_into_a_task_that_reads(process: TaskProcess) -> None:
    one = undescribable(desk=process)
    process.begin(one, claim=False)
    with pytest.raises(StoreUnavailable):
        one.checkpoint  # noqa: B018


def test_reading_after_the_end_asks_for_nothing(
    process: TaskProcess, database: FakeDatabase
) -> None:
    one = begin(process)
    one.set_progress(1)
    one.ended = True
    assert one.progress == {"percent": 1}
    assert database.opened == 0


# Flush.


def test_the_last_of_many_reports_is_flushed(process: TaskProcess, database: FakeDatabase) -> None:
    one = begin(process)
    for percent in (1, 2, 3):
        one.set_progress(percent, "at work")
    one.update_metadata({"last_id": 7})
    assert one.flush_progress() is True
    assert database.rows["task"].progress == {
        "percent": 3,
        "message": "at work",
        "metadata": {"last_id": 7},
    }
    assert not one.pending


def test_with_nothing_pending_a_flush_sends_nothing(
    process: TaskProcess, database: FakeDatabase
) -> None:
    assert begin(process).flush_progress() is True
    assert database.opened == 0
    one = claimed(process)
    one.set_progress(1)
    one.flush_progress()
    before = len(database.statements)
    assert one.flush_progress() is True
    assert len(database.statements) == before


def test_a_flush_says_false_once_the_lease_is_lost(
    process: TaskProcess, database: FakeDatabase
) -> None:
    one = claimed(process)
    database.rows["task"].run_lease += 1
    one.set_progress(50)
    assert one.flush_progress() is False
    before = len(database.statements)
    assert one.flush_progress() is False  # known by now
    assert len(database.statements) == before
    assert database.rows["task"].progress is None


def test_a_flush_says_false_where_the_claim_finds_the_run_over(
    process: TaskProcess, database: FakeDatabase
) -> None:
    database.open().claim(described("another"))
    database.rows["task"].state = JobState.COMPLETED
    one = begin(process)
    one.set_progress(50)
    assert one.flush_progress() is False


def test_a_flush_says_false_after_the_end(process: TaskProcess) -> None:
    one = claimed(process)
    process.end(one, FAILED)
    one.set_progress(50)
    assert one.flush_progress() is False


def test_a_flush_raises_in_time_while_the_database_hangs_and_works_later(
    process: TaskProcess, database: FakeDatabase
) -> None:
    one = claimed(process)
    one.set_progress(50)
    with database.hanging():
        began = time.monotonic()
        with pytest.raises(StoreUnavailable):
            one.flush_progress(timeout=0.05)
        for percent in range(100):
            one.set_progress(percent)
        assert time.monotonic() - began < 1
    assert one.flush_progress() is True
    assert database.rows["task"].progress == {"percent": 99}


def test_a_flush_raises_where_the_attempt_or_its_progress_is_refused(
    process: TaskProcess, database: FakeDatabase
) -> None:
    one = claimed(process)
    database.refused_progress.add("task")
    one.set_progress(50)
    with pytest.raises(StoreUnavailable, match="refused"):
        one.flush_progress()
    assert one.pending
    database.refused.add("never")
    unclaimable = begin(process, "never")
    unclaimable.set_progress(50)
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="refused"):
            unclaimable.flush_progress()


def test_a_flush_that_the_row_does_not_show_is_not_confirmed(
    process: TaskProcess, database: FakeDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = claimed(process)
    one.set_progress(50)
    monkeypatch.setattr(type(database.rows["task"]), "write", lambda self, snapshot: None)
    with pytest.raises(StoreUnavailable, match="does not hold it"):
        one.flush_progress()


def test_a_flush_whose_answer_was_lost_is_confirmed(
    process: TaskProcess, database: FakeDatabase
) -> None:
    one = claimed(process)
    one.set_progress(50)
    database.unanswered.append("heartbeat_with_progress")
    assert one.flush_progress() is True


def test_a_flush_of_a_locked_row_waits_for_it(process: TaskProcess, database: FakeDatabase) -> None:
    one = claimed(process)
    one.set_progress(50)
    database.locked.add("task")
    with pytest.raises(StoreUnavailable, match="locked"):
        one.flush_progress(timeout=0.05)
    database.locked.clear()
    assert one.flush_progress() is True
    assert process.database.answering


def test_an_older_generation_in_the_row_is_no_lost_lease(
    process: TaskProcess, database: FakeDatabase
) -> None:
    one = claimed(process)
    one.set_progress(50)
    database.rows["task"].generation = 9
    assert one.flush_progress() is True
    assert not one.lost


def test_two_threads_flush_one_task_at_once(process: TaskProcess, database: FakeDatabase) -> None:
    one = claimed(process)
    answers: list[bool] = []

    def report(name: str) -> None:
        for number in range(200):
            one.update_metadata({name: number})
            answers.append(one.flush_progress())

    threads = [threading.Thread(target=report, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert answers == [True] * 400
    assert database.rows["task"].progress == {"metadata": {"a": 199, "b": 199}}
    assert not one.pending


@pytest.mark.parametrize("timeout", [float("inf"), 1e300])
def test_a_flush_may_wait_for_any_time(process: TaskProcess, timeout: float) -> None:
    one = claimed(process)
    one.set_progress(1)
    assert one.flush_progress(timeout=timeout) is True


# End.


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
    make: Make, database: FakeDatabase, slate: Slate, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = make(slate)
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
    make: Make, database: FakeDatabase, slate: Slate, caplog: pytest.LogCaptureFixture
) -> None:
    process = make(slate)
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


# Owning.


def test_owning_is_known_without_asking_while_heartbeats_are_confirmed(
    process: TaskProcess, database: FakeDatabase
) -> None:
    one = claimed(process)
    assert process.owns(one)
    assert database.count("owns") == 0


def test_after_a_long_silence_the_database_is_asked_once(
    process: TaskProcess, database: FakeDatabase
) -> None:
    one = claimed(process)
    one.confirmed_at -= 10_000
    assert process.owns(one)
    assert database.count("owns") == 1
    database.rows["task"].run_lease += 1
    assert not process.owns(one)


@pytest.mark.parametrize("lost", [True, False])
def test_owning_is_what_is_known_while_the_database_does_not_answer(
    process: TaskProcess, database: FakeDatabase, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    one = claimed(process)
    one.confirmed_at -= 10_000
    if lost:
        one.answer(acknowledged=0, confirmed_at=0.0, lost=True)
    monkeypatch.setattr(database_thread, "COURTESY", 0.02)
    with database.hanging():
        began = time.monotonic()
        assert process.owns(one) is not lost
        assert process.owns(one) is not lost  # not asked again: the breaker is off
        assert time.monotonic() - began < 1


def test_a_lease_that_is_taken_for_lost_wrongly_is_asked_for(
    process: TaskProcess, database: FakeDatabase
) -> None:
    one = claimed(process)
    one.answer(acknowledged=0, confirmed_at=0.0, lost=True)
    assert process.owns(one)


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
    make: Make, database: FakeDatabase, slate: Slate
) -> None:
    process = make(slate)
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


# Stopping.


def test_the_stop_writes_what_is_pending_of_who_still_runs(
    process: TaskProcess, database: FakeDatabase
) -> None:
    claimed_one, unclaimed, silent = (
        claimed(process, "claimed"),
        begin(process, "unclaimed"),
        begin(process, "silent"),
    )
    claimed_one.set_progress(60)
    unclaimed.set_progress(70)
    assert process.stop(SOON)
    assert {name: row.progress for name, row in database.rows.items()} == {
        "claimed": {"percent": 60},
        "unclaimed": {"percent": 70},
    }
    assert silent.claim is None
    assert database.closed == database.opened == 1


def test_the_stop_ends_in_time_while_the_database_hangs(
    process: TaskProcess, database: FakeDatabase
) -> None:
    one = claimed(process)
    one.set_progress(60)
    with database.hanging():
        began = time.monotonic()
        assert not process.stop(0.05)
        assert time.monotonic() - began < 1


def test_a_first_look_tells_what_is_wrong(
    process: TaskProcess, database: FakeDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    database.go_away("no such host")
    process.start()
    eventually(lambda: "no such host" in caplog.text)


# Pages.


def test_with_a_page_the_worker_speaks_for_the_attempt(
    make: Make, database: FakeDatabase, slate: Slate
) -> None:
    process = make(slate, write_interval=0.01, heartbeat_interval=0.01)
    one = claimed(process)
    one.set_progress(60)
    (view,) = slate.pages()
    assert (view.task_id, view.lease) == ("task", one.lease)
    assert view.snapshot().json == '{"percent":60}'
    assert process.heartbeat.due() is None
    view.answer(acknowledged=1, confirmed_at=time.monotonic())
    assert not one.pending
    view.answer(acknowledged=1, confirmed_at=time.monotonic(), lost=True)
    assert one.lost


def test_a_page_serves_one_attempt_after_the_other(make: Make, slate: Slate) -> None:
    process = make(slate)
    pages: set[int] = set()
    for n in range(10):
        one = begin(process, f"task {n}")
        assert carried(slate) == [f"task {n}"]
        pages.add(id(one.page))
        process.end(one, COMPLETED)
        assert carried(slate) == []
    assert len(pages) == 1


def test_an_unconfirmed_end_keeps_its_page_and_lies_on_it(
    make: Make, database: FakeDatabase, slate: Slate
) -> None:
    process = make(slate)
    one = claimed(process)
    one.set_progress(60)
    database.go_away()
    process.end(one, FAILED)
    second = begin(process, "second")
    views = {view.task_id: view for view in slate.pages()}
    assert views["task"].end() is not None
    assert views["second"].end() is None
    views["task"].answer(acknowledged=0, confirmed_at=0.0, lost=True)
    assert not one.lost  # its own end may have taken the lease
    database.come_back()
    eventually(lambda: carried(slate) == ["second"])
    process.end(second, COMPLETED)


def test_without_a_page_to_be_had_the_process_heartbeats_itself(
    make: Make, database: FakeDatabase, tmp_path: Path
) -> None:
    slate = Slate.create(str(tmp_path), 1, 1_024)
    process = make(slate, write_interval=0.01, heartbeat_interval=0.02)
    first, second = claimed(process, "first"), claimed(process, "second")
    assert (first.page is None, second.page is None) == (False, True)
    second.set_progress(60)
    eventually(lambda: not second.pending)
    assert database.rows["second"].progress == {"percent": 60}
    assert database.rows["first"].beats == 0
    slate.close(unlink=True)


def test_an_id_too_long_for_a_page_costs_no_page(make: Make, slate: Slate) -> None:
    process = make(slate)
    long = begin(process, "x" * 3_000)
    long.set_progress(1)
    assert long.page is None
    pages = {id(begin(process, f"task {n}").page) for n in range(4)}
    assert len(pages) == 4
    assert sorted(carried(slate)) == [f"task {n}" for n in range(4)]


def test_what_a_thread_reports_late_does_not_reach_the_next_attempts_page(
    make: Make, slate: Slate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread of an ended task is stopped in the midst of a write to its page."""
    process = make(slate)
    one = begin(process)
    inside, go_on = threading.Event(), threading.Event()
    write = Page.write_brief

    def stop_inside(page: Page, generation: int, data: bytes) -> None:
        if b"11" in data:
            inside.set()
            go_on.wait(SOON)
        write(page, generation, data)

    monkeypatch.setattr(Page, "write_brief", stop_inside)
    reporter = threading.Thread(target=one.set_progress, args=(11,))
    reporter.start()
    assert inside.wait(SOON)
    ender = threading.Thread(target=process.end, args=(one, COMPLETED))
    ender.start()
    eventually(lambda: one.ended)
    starter = threading.Timer(0.0, go_on.set)
    starter.start()
    ender.join(SOON)
    second = begin(process, "second")
    reporter.join(SOON)
    one.set_progress(12)
    (view,) = slate.pages()
    assert (view.task_id, view.generation()) == ("second", 0)
    process.end(second, COMPLETED)


# Exceptions out of signal handlers, and forks.


def test_an_exception_at_any_point_of_a_flush_leaves_everything_usable(
    process: TaskProcess, database: FakeDatabase
) -> None:
    one = claimed(process)
    numbers = iter(range(100_000))

    def flush() -> None:
        one.update_metadata({"n": next(numbers)})
        one.flush_progress()

    strikes = 0
    for _ in struck_at_every_point(flush):
        strikes += 1
        one.update_metadata({"after": strikes})
        assert one.flush_progress() is True
        assert database.rows["task"].progress == one.progress
    assert strikes > 30


@pytest.mark.parametrize("claim", [True, False])
def test_an_exception_at_any_point_of_a_begin_leaves_an_attempt_that_can_be_ended(
    make: Make, database: FakeDatabase, slate: Slate, claim: bool
) -> None:
    process = make(slate)
    process.end(begin(process), COMPLETED)  # taking the page is the slate's own affair
    current: list[Attempt] = []

    def begin_one() -> None:
        current[:] = [attempt(f"task {time.monotonic_ns()}", process)]
        process.begin(current[0], claim=claim)

    strikes = 0
    for _ in struck_at_every_point(begin_one):
        strikes += 1
        if current:
            current[0].set_progress(60)
            process.end(current[0], FAILED)
            assert database.rows[current[0].task_id].state is JobState.FAILED
            current.clear()
        assert process.attempts() == 0
        # One that was struck while it was put on its page lies there until the next.
        process.end(begin(process, "next"), COMPLETED)
        assert carried(slate) == []
    assert strikes > 30


@pytest.mark.parametrize("claim", [True, False])
@pytest.mark.parametrize("transition", [COMPLETED, RETRYABLE])
def test_an_exception_at_any_point_of_an_end_leaves_no_running_ghost(
    make: Make, database: FakeDatabase, slate: Slate, claim: bool, transition: Transition
) -> None:
    process = make(slate)
    ones = iter(range(100_000))
    current: list[Attempt] = []
    strikes = 0

    def begin_and_end() -> None:
        process.end(current[0], transition)

    current[:] = [begin(process, f"task {next(ones)}", claim=claim)]
    current[0].set_progress(60)
    for _ in struck_at_every_point(begin_and_end):
        strikes += 1
        process.end(current[0], FAILED)
        eventually(lambda: process.attempts() == 0)
        assert carried(slate) == []
        eventually(
            lambda: database.rows[current[0].task_id].state in (JobState.FAILED, transition.to)
        )
        current[:] = [begin(process, f"task {next(ones)}", claim=claim)]
        current[0].set_progress(60)
    assert strikes > 10


def test_a_child_forked_while_other_threads_are_at_work_lets_go_of_the_attempts(
    process: TaskProcess, database: FakeDatabase
) -> None:
    one = claimed(process)
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            process.end(begin(process, "another"), COMPLETED)
            process.in_flight.all()

    threads = [threading.Thread(target=churn) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            child = os.fork()
            if child == 0:
                signal.alarm(10)
                status = 1
                try:
                    process.detach()
                    one.set_progress(99)
                    status = 0 if one.flush_progress(timeout=0.2) is True else 3
                finally:
                    os._exit(status)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join(SOON)
    assert database.rows["task"].progress is None
    one.set_progress(5)
    assert one.flush_progress() is True
    assert (database.opened, database.closed) == (1, 0)
