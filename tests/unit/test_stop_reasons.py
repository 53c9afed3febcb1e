"""Whether an attempt is asked to stop, and why: what it hears of, and what asking costs."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from celery_awa.model import JobState, StopReason, Transition
from celery_awa.runtime import attempt as attempt_module
from celery_awa.runtime.attempt import Attempt
from celery_awa.runtime.desk import Terms
from celery_awa.runtime.slate import Slate
from celery_awa.runtime.task_process import TaskProcess
from celery_awa.runtime.worker_pages import WorkerPages
from tests.fake_store import FakeDatabase
from tests.runtime_parts import Clock, StartProcess, StartWorker, attempt, begin, claimed
from tests.waiting import eventually

from .children import own_page

OFTEN = {"write_interval": 0.01, "heartbeat_interval": 0.01}


class Asked:
    """Stands for the process of an attempt whose worker may be stopping."""

    stopping = False

    def learn(self, attempt: Attempt, timeout: float) -> None:
        raise AssertionError("it asks the database")

    def flush(self, attempt: Attempt, timeout: float) -> bool:
        raise AssertionError("it asks the database")


def cancel(database: FakeDatabase) -> None:
    database.rows["task"].cancel_requested = True


def test_nothing_asks_an_attempt_to_stop_by_itself(process: TaskProcess) -> None:
    one = claimed(process)
    assert one.stop_reason is None
    assert one.should_stop is False


def test_of_several_reasons_the_first_in_their_order_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch, attempt_module)
    desk = Asked()
    one = attempt(desk=desk, terms=Terms(deadline=60.0, max_runtime=30.0))
    told: list[StopReason | None] = [one.stop_reason]
    clock.pass_by(30.0)
    told.append(one.stop_reason)
    desk.stopping = True
    told.append(one.stop_reason)
    clock.pass_by(30.0)
    told.append(one.stop_reason)
    one.answer(acknowledged=0, confirmed_at=1.0, cancel=True)
    told.append(one.stop_reason)
    one.answer(acknowledged=0, confirmed_at=1.0, lost=True)
    told.append(one.stop_reason)
    assert told == [None, *reversed(StopReason)]
    assert one.should_stop


def test_the_deadline_counts_from_the_attempts_begin_and_needs_no_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch, attempt_module)
    one, endless = attempt(may_run=5.0), attempt()
    clock.pass_by(4.99)
    assert one.stop_reason is None
    clock.pass_by(0.02)
    assert one.stop_reason is StopReason.DEADLINE
    assert endless.stop_reason is None


def test_a_heartbeat_brings_the_request_for_cancellation(
    start_process: StartProcess, database: FakeDatabase
) -> None:
    one = claimed(start_process(**OFTEN))
    cancel(database)
    eventually(lambda: one.stop_reason is StopReason.CANCEL)


def test_a_flush_brings_the_request_for_cancellation(
    process: TaskProcess, database: FakeDatabase
) -> None:
    one = claimed(process)
    cancel(database)
    one.set_progress(10)
    assert one.flush_progress() is True
    assert one.stop_reason is StopReason.CANCEL


def test_a_request_for_cancellation_stands_when_a_later_answer_does_not_repeat_it() -> None:
    one = attempt()
    one.answer(acknowledged=0, confirmed_at=1.0, cancel=True)
    one.answer(acknowledged=0, confirmed_at=2.0)
    assert one.stop_reason is StopReason.CANCEL


def test_a_worker_hands_the_request_for_cancellation_to_its_child(
    start_worker: StartWorker, database: FakeDatabase, slate: Slate
) -> None:
    start_worker(slate)
    one = attempt()
    one.page, _ = own_page(slate, database)
    assert one.stop_reason is None
    cancel(database)
    eventually(lambda: one.stop_reason is StopReason.CANCEL)
    one.page.clear()


def test_a_lost_lease_is_heard_of_from_the_page_and_from_a_flush(
    start_worker: StartWorker, process: TaskProcess, database: FakeDatabase, slate: Slate
) -> None:
    start_worker(slate)
    with_page, flushing = attempt(), claimed(process, "flushing")
    with_page.page, _ = own_page(slate, database)
    for row in database.rows.values():
        row.run_lease += 1
    flushing.set_progress(10)
    assert flushing.flush_progress() is False
    assert flushing.stop_reason is StopReason.LEASE_LOST
    eventually(lambda: with_page.stop_reason is StopReason.LEASE_LOST)
    with_page.page.clear()


def test_a_thread_that_outlives_its_task_is_told_that_it_is_over(process: TaskProcess) -> None:
    one = claimed(process)
    process.end(one, Transition(JobState.COMPLETED))
    assert one.stop_reason is StopReason.LEASE_LOST


def test_a_stopping_worker_asks_its_attempts_and_those_to_come(process: TaskProcess) -> None:
    running = [begin(process, f"task {n}") for n in range(2)]
    process.worker_stopping()
    later = begin(process, "later")
    assert [one.stop_reason for one in (*running, later)] == [StopReason.WORKER_STOPPING] * 3


def test_a_stopping_prefork_worker_is_heard_of_at_once_though_its_database_hangs(
    start_process: StartProcess, start_worker: StartWorker, database: FakeDatabase, slate: Slate
) -> None:
    """Attempts without a lease hear of it, those without a page, and those that begin later."""
    worker = start_worker(slate)
    child = start_process(slate)
    with_page = begin(child)
    with_lease = claimed(child, "claimed")
    without_page = begin(child, "x" * 3_000)
    with database.hanging():
        worker.worker_stopping()
        later = begin(child, "later")
        told = {one.stop_reason for one in (with_page, with_lease, without_page, later)}
    assert told == {StopReason.WORKER_STOPPING}
    assert without_page.page is None


def test_a_heartbeats_answer_leaves_the_stop_of_the_worker_in_place(
    start_process: StartProcess, start_worker: StartWorker, database: FakeDatabase, slate: Slate
) -> None:
    worker = start_worker(slate)
    one = claimed(start_process(slate))
    worker.worker_stopping()
    beats = database.rows["task"].beats
    eventually(lambda: database.rows["task"].beats > beats + 1)
    assert one.stop_reason is StopReason.WORKER_STOPPING
    cancel(database)
    eventually(lambda: one.stop_reason is StopReason.CANCEL)


def test_without_a_slate_there_is_nobody_to_tell(start_worker: StartWorker) -> None:
    start_worker(None).worker_stopping()


def test_a_slate_that_is_closed_tells_nothing(tmp_path: Path) -> None:
    slate = Slate.create(str(tmp_path), 1, 300)
    assert not slate.is_stopping()
    slate.close(unlink=True)
    slate.say_stopping()
    assert not slate.is_stopping()


def test_asking_sends_no_statement_and_waits_for_nothing(
    start_process: StartProcess, database: FakeDatabase, slate: Slate
) -> None:
    one = claimed(start_process(slate))
    assert one.page is not None
    statements = list(database.statements)
    with database.hanging():
        began = time.perf_counter()
        for _ in range(1_000):
            assert not one.should_stop
        took = time.perf_counter() - began
    assert database.statements == statements
    assert took < 0.5  # a thousand; a few milliseconds where nobody else is at work


def test_every_thread_may_ask(process: TaskProcess) -> None:
    one = claimed(process)
    heard: list[StopReason | None] = []
    process.worker_stopping()
    thread = threading.Thread(target=lambda: heard.append(one.stop_reason))
    thread.start()
    thread.join()
    assert heard == [StopReason.WORKER_STOPPING]


def test_in_a_process_forked_by_the_task_the_worker_is_none_of_its_business(
    process: TaskProcess,
) -> None:
    one = begin(process)
    process.worker_stopping()
    one.detach()
    assert one.stop_reason is None


def test_a_worker_without_attempts_sends_nothing_when_it_stops(
    start_worker: StartWorker, database: FakeDatabase, slate: Slate
) -> None:
    worker: WorkerPages = start_worker(slate)
    worker.worker_stopping()
    assert worker.stop(5.0)
    assert database.statements == []
