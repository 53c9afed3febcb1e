"""Who waits for a database that does not answer: by courtesy one task, for a second, once.

The tests at the end take the bound and the breaker away, and show that these checks would tell.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing

import pytest

from celery_awa.errors import StoreUnavailable
from celery_awa.model import JobState, Transition
from celery_awa.runtime import database_thread
from celery_awa.runtime.attempt import Attempt
from celery_awa.runtime.database_thread import COURTESY, DatabaseThread
from celery_awa.runtime.errand import Errand
from celery_awa.runtime.task_process import TaskProcess
from tests.faults import Proxy
from tests.runtime_parts import SOON, StartProcess, begin, claimed
from tests.waiting import eventually

from .jobs import Database

pytest_plugins = ["tests.integration.stores", "tests.integration.runtime"]

Proxied = tuple[Proxy, str]

TASKS = 20
FAILED = Transition(JobState.FAILED, error="ValueError: boom")


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """For how long each caller was ready to wait, of those that waited in vain."""
    in_vain: list[float] = []
    wait = Errand.wait

    def noting(errand: Errand[object], timeout: float) -> bool:
        done = wait(errand, timeout)
        if not done:
            in_vain.append(timeout)
        return done

    monkeypatch.setattr(Errand, "wait", noting)
    return in_vain


@pytest.fixture
def process(proxied: Proxied, start_process: StartProcess) -> TaskProcess:
    return start_process(proxied[1])


@pytest.fixture
def running(process: TaskProcess) -> list[Attempt]:
    """Attempts with their rows, and something to report."""
    attempts = [claimed(process, f"running {n}") for n in range(TASKS)]
    for one in attempts:
        one.set_progress(40)
    return attempts


def begin_and_end(process: TaskProcess, running: list[Attempt]) -> list[Attempt]:
    """All that tasks do at their starts and ends without having asked for it."""
    begun = []
    for number, one in enumerate(running):
        assert process.owns(one)
        process.end(one, FAILED)
        begun.append(begin(process, f"begun {number}", claim=True, retries=1))
    return begun


def test_one_task_waits_a_second_and_after_it_none(
    process: TaskProcess,
    proxied: Proxied,
    private_url: str,
    running: list[Attempt],
    waits: list[float],
) -> None:
    proxy, _ = proxied
    proxy.swallow()
    begun = begin_and_end(process, running)
    assert waits == [COURTESY] == [1.0]
    assert process.database.answering is False
    # Who asks for a fact waits for as long as he said, whatever the breaker says.
    begun[0].set_progress(10)
    for timeout in (0.05, 0.2):
        with pytest.raises(StoreUnavailable):
            begun[0].flush_progress(timeout=timeout)
    assert waits == [1.0, 0.05, 0.2]
    proxy.deliver()
    eventually(lambda: process.database.answering and process.attempts() == TASKS)
    eventually(lambda: all(one.lease for one in begun))
    # The first success lets them wait again, and it is worth their while.
    del waits[:]
    ended = process.end(begun[0], FAILED)
    assert ended is not None
    assert waits == []
    with closing(Database(private_url)) as look:
        for number in range(TASKS):
            row = look.row(f"running {number}")
            assert (row["state"], row["progress"]) == ("failed", {"percent": 40})


def test_a_database_that_refuses_is_waited_for_by_nobody(
    process: TaskProcess, proxied: Proxied, running: list[Attempt], waits: list[float]
) -> None:
    """A refusal comes at once, and who waits goes with it: long before his second is over."""
    proxy, _ = proxied
    proxy.refuse()
    begin_and_end(process, running)
    assert len(waits) <= 1
    assert process.database.answering is False
    proxy.accept()
    eventually(lambda: process.attempts() == TASKS)


def test_a_slow_network_costs_each_task_its_answer_and_no_more(
    process: TaskProcess, proxied: Proxied, waits: list[float]
) -> None:
    proxy, _ = proxied
    one = claimed(process)
    proxy.delay(0.1)
    for percent in (10, 20):
        one.set_progress(percent)
        assert one.flush_progress(timeout=SOON) is True
    proxy.delay(1.0)
    assert process.end(one, FAILED) is None
    later = begin(process, "later", claim=True, retries=1)
    assert waits == [1.0]
    proxy.delay(0)
    eventually(lambda: later.lease is not None and process.attempts() == 1)


# The same checks without what they check.


def test_without_the_breaker_each_would_wait_for_its_second(
    process: TaskProcess,
    proxied: Proxied,
    running: list[Attempt],
    waits: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DatabaseThread, "answering", True)
    monkeypatch.setattr(database_thread, "COURTESY", 0.01)
    proxied[0].swallow()
    begin_and_end(process, running)
    assert waits == [0.01] * 3 * TASKS  # the look at the lease, the end, the next start
    proxied[0].deliver()


def test_without_the_bound_the_first_would_wait_for_ever(
    process: TaskProcess,
    proxied: Proxied,
    running: list[Attempt],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ends_within(seconds: float, end: Callable[[], object]) -> bool:
        task = threading.Thread(target=end)
        task.start()
        task.join(seconds)
        ended = not task.is_alive()
        proxied[0].deliver()
        task.join(SOON)
        assert not task.is_alive()
        return ended

    proxied[0].swallow()
    assert ends_within(3 * COURTESY, lambda: process.end(running[0], FAILED))
    eventually(lambda: process.database.answering)
    monkeypatch.setattr(database_thread, "COURTESY", 3600.0)
    proxied[0].swallow()
    assert not ends_within(3 * COURTESY, lambda: process.end(running[1], FAILED))
