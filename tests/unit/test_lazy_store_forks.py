"""Forks beside a driver that is at work: they wait for it, and the child starts afresh."""

from __future__ import annotations

import concurrent.futures
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from celery_awa.runtime import fork_rest
from celery_awa.runtime.lazy_store import LazyStore


class Driver:
    """A use of the store that lasts until it is told to end."""

    def __init__(self) -> None:
        self.store = LazyStore(lambda: self, None)  # type: ignore[arg-type,return-value]  # never asked
        self.at_work, self.may_rest = threading.Event(), threading.Event()

    def work(self, opened: Callable[[], object]) -> None:
        self.at_work.set()
        assert self.may_rest.wait(10)


@pytest.fixture
def driver() -> Iterator[Driver]:
    driver = Driver()
    with ThreadPoolExecutor(1) as thread:
        used = thread.submit(driver.store.use, driver.work)
        assert driver.at_work.wait(10)
        yield driver
        driver.may_rest.set()
        used.result(10)


def fork(driver: Driver) -> int:
    """Fork, and use the store in the child; the child's exit status."""
    pid = os.fork()
    if not pid:
        driver.may_rest.set()
        signal = threading.Timer(5, os._exit, (1,))
        signal.start()
        driver.store.use(driver.work)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_fork_waits_until_the_driver_rests(driver: Driver) -> None:
    with ThreadPoolExecutor(1) as thread:
        forked = thread.submit(fork, driver)
        with pytest.raises(concurrent.futures.TimeoutError):
            forked.result(0.1)
        driver.may_rest.set()
        assert forked.result(10) == 0


def test_forks_wait_for_a_silent_network_once_and_for_a_second_at_most(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_rest, "FORK_WAIT", 0.2)
    began = time.monotonic()
    assert fork(driver) == 0
    first = time.monotonic() - began
    monkeypatch.setattr(fork_rest, "FORK_WAIT", 60)
    assert fork(driver) == 0
    assert first >= 0.2


def test_the_store_is_free_after_a_fork(driver: Driver) -> None:
    driver.may_rest.set()
    assert fork(driver) == 0
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(driver.store.use, driver.work).result(10) is False
