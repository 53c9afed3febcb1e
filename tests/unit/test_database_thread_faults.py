"""The thread's connection and its breaker; exceptions out of signal handlers, and forks."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable

import pytest

from celery_awa.errors import RowLocked, StoreUnavailable
from celery_awa.runtime import breaker, database_thread
from celery_awa.runtime.breaker import LONGEST_PAUSE, Pauses
from celery_awa.runtime.database_thread import DatabaseThread
from celery_awa.runtime.lazy_store import LazyStore
from celery_awa.runtime.trouble import Trouble
from tests.fake_store import FakeDatabase, FakeStore
from tests.runtime_parts import (
    SOON,
    MakeThread,
    Pass,
    failing,
    knows,
    struck_at_every_point,
)
from tests.waiting import eventually

# The connection.


def test_nothing_to_do_opens_no_connection(make_thread: MakeThread, database: FakeDatabase) -> None:
    thread = make_thread(idle_after=10.0)
    service = Pass()
    thread.add_service(service)
    service.at = time.monotonic()
    thread.expect(service.at)
    assert service.passed.wait(SOON)
    assert thread.stop(SOON)
    assert database.opened == 0


def test_an_idle_connection_is_closed_and_opened_again(
    make_thread: MakeThread, database: FakeDatabase
) -> None:
    thread = make_thread(idle_after=0.02)
    thread.ask(knows("task"), SOON)
    database.until(lambda: database.closed == 1)
    thread.ask(knows("task"), SOON)
    assert database.opened == 2


def test_without_a_bound_a_connection_stays(thread: DatabaseThread, database: FakeDatabase) -> None:
    thread.ask(knows("task"), SOON)
    assert thread._store.idle_at is None
    thread.ask(knows("task"), SOON)
    assert (database.opened, database.closed) == (1, 0)


def test_a_connection_that_died_idle_is_replaced_within_the_same_call(
    thread: DatabaseThread, database: FakeDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    thread.ask(knows("task"), SOON)
    database.end_connections()
    assert thread.ask_briefly(knows("task")) is False
    assert thread.answering
    assert (database.opened, database.closed) == (2, 1)
    assert caplog.records == []


def test_a_service_finds_a_connection_that_died_idle_replaced(
    thread: DatabaseThread, database: FakeDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    service = Pass(lambda opened: opened().knows("service"))
    thread.add_service(service)
    thread.ask(knows("task"), SOON)
    database.end_connections()
    service.at = time.monotonic()
    thread.expect(service.at)
    database.until(lambda: database.opened == 2)
    thread.ask(knows("task"), SOON)
    assert (service.passes, thread.answering, caplog.records) == (2, True, [])


def test_a_new_connection_that_fails_is_not_replaced_at_once(database: FakeDatabase) -> None:
    store = LazyStore(database.open, None)
    database.raising["knows"] = StoreUnavailable("not this statement")
    with pytest.raises(StoreUnavailable):
        store.use(lambda opened: opened().knows("task"))
    assert (database.opened, database.closed) == (1, 1)


# The breaker.


def test_the_breaker_is_off_from_a_failure_until_a_success(
    thread: DatabaseThread, database: FakeDatabase
) -> None:
    assert thread.answering
    database.go_away()
    posted = thread.post(knows("task"))
    eventually(lambda: not thread.answering)
    database.come_back()
    eventually(lambda: posted.done)
    assert thread.answering


def test_nobody_waits_by_courtesy_while_the_breaker_is_off(
    thread: DatabaseThread, database: FakeDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_thread, "COURTESY", 3600.0)
    database.go_away()
    posted = thread.post(knows("kept"))
    eventually(lambda: not thread.answering)
    with database.hanging():
        with pytest.raises(StoreUnavailable, match="it is away"):
            thread.ask_briefly(knows("asked"))
        assert thread.wait_briefly(posted) is False
    assert len(thread._errands) == 1


def test_who_waits_by_courtesy_goes_at_the_first_failure(
    thread: DatabaseThread, database: FakeDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_thread, "COURTESY", 3600.0)
    database.go_away()
    with pytest.raises(StoreUnavailable, match="it is away"):
        thread.ask_briefly(knows("task"))
    assert not thread.answering


def test_after_one_courtesy_in_vain_the_next_does_not_wait(
    thread: DatabaseThread, database: FakeDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    with database.hanging():
        monkeypatch.setattr(database_thread, "COURTESY", 0.02)
        with pytest.raises(StoreUnavailable):
            thread.ask_briefly(knows("task"))
        monkeypatch.setattr(database_thread, "COURTESY", 3600.0)
        with pytest.raises(StoreUnavailable):
            thread.ask_briefly(knows("task"))
    thread.ask(knows("task"), SOON)
    assert thread.answering


def test_a_locked_row_does_not_turn_the_breaker_off(
    thread: DatabaseThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_thread, "COURTESY", 0.05)
    with pytest.raises(StoreUnavailable):
        thread.ask_briefly(failing(RowLocked("held")))
    assert thread.answering


def test_after_a_failure_nothing_else_is_tried_until_the_pause_is_over(
    thread: DatabaseThread, database: FakeDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breaker, "FIRST_PAUSE", 3600.0)
    service = Pass(lambda opened: opened())
    monkeypatch.setattr(thread, "_breaker", breaker.Breaker(Trouble()))
    thread.add_service(service)
    database.go_away()
    posted = [thread.post(knows("task")) for _ in range(5)]
    eventually(lambda: not thread.answering)
    service.at = 0.0
    thread.expect(0.0)
    for one in posted:
        thread.cancel(one)
    assert thread.stop(SOON)
    assert (database.tries, service.passes) == (1, 0)


def test_a_success_makes_the_next_pause_short_again() -> None:
    one = breaker.Breaker(Trouble())
    for _ in range(10):
        one.failed(StoreUnavailable())
    assert one.retry_at - time.monotonic() > 1
    one.succeeded()
    assert one.retry_at == 0.0
    one.failed(StoreUnavailable())
    assert one.retry_at - time.monotonic() < 0.2


def test_a_pass_that_asks_nothing_does_not_turn_the_breaker_on(
    thread: DatabaseThread, database: FakeDatabase
) -> None:
    service = Pass()
    thread.add_service(service)
    database.go_away()
    posted = thread.post(knows("task"))
    eventually(lambda: not thread.answering)
    thread.cancel(posted)
    service.at = 0.0
    thread.expect(0.0)
    assert service.passed.wait(SOON)
    assert thread.stop(SOON)
    assert not thread.answering


def test_pauses_grow_to_a_bound_with_jitter() -> None:
    runs = [[pauses.next() for _ in range(12)] for pauses in (Pauses() for _ in range(20))]
    for run in runs:
        bounds = [min(0.1 * 2**n, LONGEST_PAUSE) for n in range(12)]
        assert all(0.5 * b <= pause <= 1.5 * b for pause, b in zip(run, bounds, strict=True))
    assert len({run[0] for run in runs}) > 1
    pauses = Pauses()
    while pauses.next() <= 1:
        continue
    pauses.reset()
    assert pauses.next() <= 0.15


def test_pauses_leave_the_random_numbers_of_a_task_alone() -> None:
    import random

    before = random.getstate()
    Pauses().next()
    assert random.getstate() == before


def test_an_outage_is_warned_of_once_and_its_end_told(
    thread: DatabaseThread, database: FakeDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "celery_awa")
    posted = []
    for _ in range(3):
        database.go_away("no route to it")
        posted.append(thread.post(knows("task")))
        eventually(lambda: not thread.answering)
        database.come_back()
        eventually(lambda: posted[-1].done)
    levels = [record.levelno for record in caplog.records]
    assert levels == [logging.WARNING, logging.INFO]
    assert "no route to it" in caplog.records[0].getMessage()


# Exceptions out of signal handlers.


@pytest.mark.parametrize("verb", ["ask", "ask_briefly", "post", "expect"])
def test_an_exception_at_any_point_leaves_the_thread_usable(
    thread: DatabaseThread, verb: str
) -> None:
    calls: dict[str, Callable[[], object]] = {
        "ask": lambda: thread.ask(knows("task"), SOON),
        "ask_briefly": lambda: thread.ask_briefly(knows("task")),
        "post": lambda: thread.wait_briefly(thread.post(knows("task"), brief=True)),
        "expect": lambda: thread.expect(0.0),
    }
    strikes = 0
    for _ in struck_at_every_point(calls[verb]):
        strikes += 1
        assert thread.ask(knows("task"), SOON) is False
    assert strikes >= 5
    eventually(lambda: not thread._errands)


def test_an_exception_while_the_thread_is_started_leaves_it_startable(
    make_thread: MakeThread,
) -> None:
    strikes = 0
    threads = iter(make_thread, None)
    current: list[DatabaseThread] = []

    def first_post() -> None:
        current[:] = [next(threads)]
        current[0].post(knows("task"))

    for _ in struck_at_every_point(first_post):
        strikes += 1
        assert not current or current[0].ask(knows("task"), SOON) is False
    assert strikes > 10


def test_a_real_signal_that_strikes_who_waits_leaves_the_thread_usable(
    thread: DatabaseThread, database: FakeDatabase
) -> None:
    def strike(*_: object) -> None:
        raise TimeoutError

    def ask_struck_by(timer: threading.Timer) -> None:
        timer.start()
        thread.ask(knows("struck"), SOON)

    before = signal.signal(signal.SIGUSR1, strike)
    try:
        for _ in range(50):
            timer = threading.Timer(0.002, os.kill, (os.getpid(), signal.SIGUSR1))
            with database.hanging(), pytest.raises(TimeoutError):
                ask_struck_by(timer)
            timer.join()
            assert thread.ask(knows("task"), SOON) is False
    finally:
        signal.signal(signal.SIGUSR1, before)
    eventually(lambda: not thread._errands)


# Forks.


def in_child(work: Callable[[], bool]) -> bool:
    """What the work answers in a forked child; False if it raises or takes 10 seconds."""
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        try:
            os._exit(0 if work() else 1)
        finally:
            os._exit(2)
    return os.waitpid(child, 0)[1] == 0


def test_a_forked_child_neither_uses_nor_closes_the_connection(
    thread: DatabaseThread, database: FakeDatabase
) -> None:
    thread.ask(knows("task"), SOON)

    def child() -> bool:
        own = DatabaseThread(database.open, Trouble())
        answered = own.ask(knows("task"), SOON) is False
        inherited, opened = database.stores
        return answered and inherited.abandoned and not inherited.closed and not opened.abandoned

    assert in_child(child)
    assert thread.ask(knows("task"), SOON) is False
    assert (database.opened, database.closed) == (1, 0)
    assert not database.stores[0].abandoned


def test_one_inherited_connection_in_a_bad_state_keeps_no_other_from_being_left(
    make_thread: MakeThread, database: FakeDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = [make_thread(), make_thread(), make_thread()]
    for one in threads:
        one.ask(knows("task"), SOON)
    abandon = FakeStore.abandon

    def fail_once(store: FakeStore) -> None:
        monkeypatch.setattr(FakeStore, "abandon", abandon)
        raise OSError("bad file descriptor")

    monkeypatch.setattr(FakeStore, "abandon", fail_once)
    assert in_child(lambda: sum(store.abandoned for store in database.stores) == 2)


def test_in_a_forked_child_asking_the_parents_thread_ends_in_time(thread: DatabaseThread) -> None:
    thread.ask(knows("task"), SOON)

    def child() -> bool:
        with pytest.raises(StoreUnavailable):
            thread.ask(knows("task"), 0.05)
        return True

    assert in_child(child)
