"""Exceptions out of signal handlers that strike a task in our midst, and forks."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from celery_awa.model import Envelope, JobState, Transition
from celery_awa.runtime.attempt import Attempt
from celery_awa.runtime.slate import Slate
from celery_awa.runtime.task_process import TaskProcess
from tests.fake_store import FakeDatabase
from tests.runtime_parts import (
    SOON,
    StartProcess,
    attempt,
    begin,
    carried,
    claimed,
    struck_at_every_point,
)
from tests.waiting import eventually

COMPLETED = Transition(JobState.COMPLETED)
FAILED = Transition(
    JobState.FAILED, error="ValueError: boom", envelope=Envelope(b"whole", whole=True)
)
RETRYABLE = Transition(JobState.RETRYABLE, run_in=5.0, unsent=True)


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
    start_process: StartProcess, database: FakeDatabase, slate: Slate, claim: bool
) -> None:
    process = start_process(slate)
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
    start_process: StartProcess,
    database: FakeDatabase,
    slate: Slate,
    claim: bool,
    transition: Transition,
) -> None:
    process = start_process(slate)
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


def test_an_exception_at_any_point_of_a_forsaking_leaves_a_stale_row(
    process: TaskProcess, database: FakeDatabase
) -> None:
    ones = iter(range(100_000))
    current: list[Attempt] = []
    strikes = 0

    def begin_one() -> None:
        current[:] = [claimed(process, f"task {next(ones)}")]
        current[0].set_progress(60)

    begin_one()
    for _ in struck_at_every_point(lambda: process.forsake(current[0])):
        strikes += 1
        process.forsake(current[0])
        row = database.rows[current[0].task_id]
        eventually(lambda row=row: row.heartbeat_at is None)
        assert row.progress == {"percent": 60}
        eventually(lambda: process.attempts() == 0)
        begin_one()
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
