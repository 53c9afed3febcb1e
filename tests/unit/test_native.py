"""Real threads and locks where nothing is patched; beside greenlets: tests/integration."""

from __future__ import annotations

import signal
import threading
import time

from celery_awa import native
from tests.runtime_parts import SOON
from tests.waiting import eventually


def test_a_lock_is_waited_for_and_no_longer_than_asked() -> None:
    lock = native.lock()
    assert native.acquire(lock, 0)
    began = time.monotonic()
    assert not native.acquire(lock, 0.05)
    assert 0.05 <= time.monotonic() - began < SOON
    assert not native.acquire(lock, -1)
    threading.Timer(0.05, lock.release).start()
    assert native.acquire(lock, float("inf"))


def test_a_thread_has_its_name_and_is_waited_for_by_nobody() -> None:
    found: list[threading.Thread] = []
    native.start_thread(lambda: found.append(threading.current_thread()), "of-its-own")
    (thread,) = eventually(lambda: found)
    assert thread.name == "of-its-own"
    assert thread.daemon
    assert thread is not threading.current_thread()


def test_no_thread_is_beside_greenlets_where_there_are_none() -> None:
    found: list[bool] = []
    native.start_thread(lambda: found.append(native.beside_greenlets()), "real")
    assert eventually(lambda: found) == [False]
    assert native.green() is None
    assert not native.beside_greenlets()


def test_only_its_thread_takes_a_lock_again() -> None:
    lock, found = native.rlock(), []
    with lock, lock:
        native.start_thread(lambda: found.append(lock.acquire(blocking=False)), "other")
        assert eventually(lambda: found) == [False]


def test_signals_that_it_blocks_go_to_other_threads() -> None:
    found: list[set[signal.Signals]] = []

    def look() -> None:
        found.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))

    native.start_thread(look, "blocking", blocks=[signal.SIGTERM])
    native.start_thread(look, "not blocking")
    eventually(lambda: len(found) == 2)
    assert sorted(signal.SIGTERM in blocked for blocked in found) == [False, True]
