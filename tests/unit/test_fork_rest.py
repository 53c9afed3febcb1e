"""Forks beside a library that is at work: they wait for it, and the child starts afresh."""

from __future__ import annotations

import concurrent.futures
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from celery_awa.runtime import fork_rest
from celery_awa.runtime.fork_rest import ForkRest


class Library:
    """A use that lasts until it is told to end."""

    def __init__(self) -> None:
        self.rest = ForkRest()
        self.at_work, self.may_rest = threading.Event(), threading.Event()

    def work(self) -> None:
        with self.rest.work():
            self.at_work.set()
            assert self.may_rest.wait(10)


@pytest.fixture
def library() -> Iterator[Library]:
    library = Library()
    with ThreadPoolExecutor(1) as thread:
        used = thread.submit(library.work)
        assert library.at_work.wait(10)
        yield library
        library.may_rest.set()
        used.result(10)


def fork(library: Library) -> int:
    """Fork, and use the library in the child; the child's exit status."""
    pid = os.fork()
    if not pid:
        library.may_rest.set()
        threading.Timer(5, os._exit, (1,)).start()
        library.work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_fork_waits_for_rest(library: Library) -> None:
    with ThreadPoolExecutor(1) as thread:
        forked = thread.submit(fork, library)
        with pytest.raises(concurrent.futures.TimeoutError):
            forked.result(0.1)
        library.may_rest.set()
        assert forked.result(10) == 0


def test_forks_wait_for_one_use_once_and_for_a_second_at_most(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_rest, "FORK_WAIT", 0.2)
    began = time.monotonic()
    assert fork(library) == 0
    first = time.monotonic() - began
    monkeypatch.setattr(fork_rest, "FORK_WAIT", 60)
    assert fork(library) == 0
    assert first >= 0.2


def test_a_fork_goes_on_after_a_use_that_was_waited_for_in_vain(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_rest, "FORK_WAIT", 0.01)
    assert fork(library) == 0
    library.may_rest.set()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(library.work).result(10)
        assert fork(library) == 0
        thread.submit(library.work).result(10)


def test_a_use_that_forks_itself_goes_on_in_both() -> None:
    rest = ForkRest()
    with rest.work():
        pid = os.fork()
    with rest.work():
        pass
    if not pid:
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
