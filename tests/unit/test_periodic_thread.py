"""The thread that passes now and then: when it passes, and that it leaves off when told to."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from celery_awa.errors import StoreUnavailable
from celery_awa.runtime import periodic_thread
from celery_awa.runtime.periodic_thread import PeriodicThread
from celery_awa.runtime.trouble import Trouble
from tests.runtime_parts import SOON
from tests.waiting import eventually

Make = Callable[..., PeriodicThread]
LONG = 1_000.0


class Work:
    """Counts its passes, and does with each what the test wants."""

    def __init__(self) -> None:
        self.passes = 0
        self.error: Exception | None = None
        self.flowing = threading.Event()
        self.flowing.set()

    def __call__(self) -> None:
        self.passes += 1
        assert self.flowing.wait(SOON)
        if self.error is not None:
            raise self.error


@pytest.fixture
def work() -> Iterator[Work]:
    work = Work()
    yield work
    work.flowing.set()


@pytest.fixture
def make(work: Work) -> Iterator[Make]:
    made: list[PeriodicThread] = []

    def make(interval: float) -> PeriodicThread:
        made.append(PeriodicThread(work, interval, Trouble(), name="test"))
        made[-1].start()
        return made[-1]

    yield make
    work.flowing.set()
    for one in made:
        assert one.stop(SOON)


def test_it_passes_again_and_again(make: Make, work: Work) -> None:
    make(0.01)
    eventually(lambda: work.passes > 3)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> queue.Queue[float]:
    """How long the threads mean to wait until they pass."""
    told: queue.Queue[float] = queue.Queue()

    class Bell(periodic_thread.Bell):
        def wait(self, timeout: float) -> bool:
            if timeout > SOON:  # else somebody waits for a thread to end
                told.put(timeout / LONG)
            return super().wait(timeout)

    monkeypatch.setattr(periodic_thread, "Bell", Bell)
    return told


def test_threads_that_start_together_do_not_pass_together_and_none_is_late(
    pauses: queue.Queue[float], make: Make
) -> None:
    first, further = [], []
    for _ in range(20):
        thread = make(LONG)
        first.append(pauses.get(timeout=SOON))
        thread.wake()
        further.append(pauses.get(timeout=SOON))
    assert len({*first, *further}) == 40
    assert max(first) - min(first) > 0.2
    assert all(0.1 < pause <= 1 for pause in first)
    assert all(0.8 <= pause <= 1 for pause in further)


def test_who_wakes_it_gets_a_pass_at_once(make: Make, work: Work) -> None:
    thread = make(LONG)
    thread.wake()
    eventually(lambda: work.passes == 1)
    thread.wake()
    eventually(lambda: work.passes == 2)


def test_who_wakes_it_during_a_pass_gets_one_more(make: Make, work: Work) -> None:
    work.flowing.clear()
    thread = make(LONG)
    thread.wake()
    eventually(lambda: work.passes == 1)
    thread.wake()
    thread.wake()
    work.flowing.set()
    eventually(lambda: work.passes == 2)
    assert thread.stop(SOON)
    assert work.passes == 2


def test_a_pass_that_fails_is_told_and_followed_by_others(
    make: Make, work: Work, caplog: pytest.LogCaptureFixture
) -> None:
    work.error = ZeroDivisionError("a fault of ours")
    make(0.01)
    eventually(lambda: work.passes > 2)
    assert [record.message for record in caplog.records] == ["celery-awa: unexpected error"]


def test_that_the_database_is_away_is_told_elsewhere(
    make: Make, work: Work, caplog: pytest.LogCaptureFixture
) -> None:
    work.error = StoreUnavailable()
    make(0.01)
    eventually(lambda: work.passes > 2)
    assert caplog.records == []


def test_it_stops_while_it_waits(make: Make, work: Work) -> None:
    thread = make(LONG)
    began = time.monotonic()
    assert thread.stop(SOON)
    assert thread.stop(SOON)
    assert time.monotonic() - began < SOON
    assert work.passes == 0


def test_a_pass_that_does_not_end_is_not_waited_for_longer(make: Make, work: Work) -> None:
    work.flowing.clear()
    thread = make(LONG)
    thread.wake()
    eventually(lambda: work.passes == 1)
    assert not thread.stop(0.05)
    assert thread.over


def test_where_no_thread_can_be_started_that_is_told(
    work: Work, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    thread = PeriodicThread(work, LONG, Trouble(), name="test")
    with caplog.at_level(logging.WARNING):
        thread.start()
    assert "no thread for rescues: can't start new thread" in caplog.text
    assert thread.stop(SOON)


def test_in_a_forked_child_it_is_over_and_there_is_nothing_to_wait_for(make: Make) -> None:
    thread = make(LONG)
    pid = os.fork()
    if not pid:
        threading.Timer(SOON, os._exit, (1,)).start()
        thread.wake()
        os._exit(0 if thread.over and thread.stop(60) else 2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert not thread.over
