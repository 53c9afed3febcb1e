"""Attempts of one process: begun, claimed, flushed, whatever the database does."""

from __future__ import annotations

import threading
import time

import pytest

from celery_awa.errors import LeaseLost, StoreUnavailable
from celery_awa.model import Envelope, JobState, Transition
from celery_awa.runtime import database_thread
from celery_awa.runtime.task_process import TaskProcess
from tests.fake_store import FakeDatabase
from tests.runtime_parts import (
    SOON,
    StartProcess,
    attempt,
    begin,
    claimed,
    described,
    undescribable,
)
from tests.waiting import eventually

COMPLETED = Transition(JobState.COMPLETED)
FAILED = Transition(
    JobState.FAILED, error="ValueError: boom", envelope=Envelope(b"whole", whole=True)
)
RETRYABLE = Transition(JobState.RETRYABLE, run_in=5.0, unsent=True)


# Begin and claim.


def test_a_short_task_that_reports_nothing_asks_for_nothing(
    process: TaskProcess, database: FakeDatabase
) -> None:
    for _ in range(100):
        assert process.end(begin(process), COMPLETED) is None
    assert process.stop(SOON)
    assert database.opened == 0
    assert process.attempts() == 0


def test_an_attempt_is_claimed_once_it_ran_for_a_while(
    start_process: StartProcess, database: FakeDatabase
) -> None:
    process = start_process(claim_after=0.05)
    one = begin(process)
    assert one.claim is None
    eventually(lambda: one.lease)
    assert database.statements == ["claim"]


def test_who_reported_is_claimed_at_the_next_cycle(
    start_process: StartProcess, database: FakeDatabase
) -> None:
    process = start_process(write_interval=0.05, heartbeat_interval=0.1)
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


def test_flushes_that_wait_at_once_are_one_statement(
    process: TaskProcess, database: FakeDatabase
) -> None:
    one = claimed(process)
    one.set_progress(1)
    with database.hanging():
        process.database.post(lambda store: store.knows("something slow"))
        threads = [threading.Thread(target=one.flush_progress) for _ in range(3)]
        for thread in threads:
            thread.start()
        eventually(lambda: len(process.database._errands) == 4)
    for thread in threads:
        thread.join(SOON)
    assert database.count("heartbeat_with_progress") == 1
    assert not one.pending


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


# Owning.


def test_whether_a_job_is_still_its_own_the_database_is_asked(
    process: TaskProcess, database: FakeDatabase
) -> None:
    one = claimed(process)
    assert process.owns(one)
    assert database.count("owns") == 1
    database.rows["task"].run_lease += 1
    assert not process.owns(one)


def test_an_attempt_without_a_row_owns_it_without_asking(
    process: TaskProcess, database: FakeDatabase
) -> None:
    assert process.owns(begin(process))
    assert database.count("owns") == 0


@pytest.mark.parametrize("lost", [True, False])
def test_owning_is_what_is_known_while_the_database_does_not_answer(
    process: TaskProcess, database: FakeDatabase, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    one = claimed(process)
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
