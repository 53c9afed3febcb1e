"""A database that comes back: what waited for it is bounded, and not all come back at once."""

from __future__ import annotations

import itertools
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from celery_awa.model import JobState, Lease, Transition
from celery_awa.runtime.breaker import FIRST_PAUSE, LONGEST_PAUSE
from celery_awa.runtime.completed import LIMIT
from celery_awa.runtime.database_thread import KEPT_LIMIT, DatabaseThread
from celery_awa.runtime.trouble import Trouble
from celery_awa.store.canonical import open_store
from celery_awa.store.protocol import Store
from tests.conftest import SCHEMA
from tests.faults import Proxy
from tests.runtime_parts import SOON, StartProcess, begin, claimed, is_done, knows
from tests.waiting import eventually

from .jobs import Database

pytest_plugins = ["tests.integration.stores", "tests.integration.runtime"]

Proxied = tuple[Proxy, str]

PROCESSES = 40
COMPLETED = Transition(JobState.COMPLETED)
FAILED = Transition(JobState.FAILED, error="ValueError: boom")


class Looking:
    """A process that wants to know something of the database, and when it tried to connect."""

    def __init__(self, url: str) -> None:
        self.tried_at: list[float] = []
        self._url = url
        self.database = DatabaseThread(self._open, Trouble())

    def _open(self) -> Store:
        self.tried_at.append(time.monotonic())
        return open_store(self._url, SCHEMA)

    @property
    def next_try(self) -> float:
        return self.database._breaker.retry_at


@pytest.fixture
def looking(proxied: Proxied) -> Iterator[list[Looking]]:
    """As many processes as a small site has, each with a connection of its own."""
    processes = [Looking(proxied[1]) for _ in range(PROCESSES)]
    with ExitStack() as stack:
        for one in processes:
            stack.callback(one.database.stop, SOON)
        yield processes


def test_forty_processes_look_for_it_seldom_and_come_back_one_by_one(
    looking: list[Looking], proxied: Proxied
) -> None:
    proxy, _ = proxied
    for one in looking:
        one.database.ask(knows("task"), SOON)
    assert proxy.served == PROCESSES
    proxy.turn_away()
    for one in looking:
        one.tried_at.clear()
    # Each with several that want something: it is the process that pauses, not the errand.
    waiting = [one.database.post(knows(f"task {n}")) for one in looking for n in range(5)]
    eventually(lambda: all(len(one.tried_at) >= 7 for one in looking), timeout=40)

    for one in looking:
        # The first came at once, in place of the connection that had died.
        gaps = [later - earlier for earlier, later in itertools.pairwise(one.tried_at)]
        least = [min(FIRST_PAUSE * 2**n, LONGEST_PAUSE) / 2 for n in range(len(gaps))]
        assert all(gap >= pause for gap, pause in zip(gaps, least, strict=True)), gaps

    planned = sorted(one.next_try for one in looking)
    proxy.accept()
    eventually(lambda: all(map(is_done, waiting)), timeout=20)
    # Nobody who comes back comes twice.
    assert proxy.served == 2 * PROCESSES
    assert proxy.connections == PROCESSES
    # 13 a second on the average, in whatever second it comes back.
    assert max(bisect_left(planned, at + 1) - n for n, at in enumerate(planned)) <= 32
    assert planned[-1] - planned[0] > LONGEST_PAUSE / 3


def test_what_waits_for_it_is_bounded_and_what_was_given_up_is_counted(
    start_process: StartProcess,
    proxied: Proxied,
    private_url: str,
    our_warnings: Callable[[], list[str]],
) -> None:
    proxy, url = proxied
    process = start_process(url)
    running = claimed(process, "running")
    proxy.turn_away()
    too_many = 300
    for number in range(KEPT_LIMIT + too_many):
        one = begin(process, f"failed {number}")
        one.set_progress(60)
        process.end(one, FAILED)
    assert len(process.database._errands) == KEPT_LIMIT
    assert len(process._ends) == KEPT_LIMIT
    assert process.attempts() == KEPT_LIMIT + 1
    assert process.database.dropped == too_many

    for number in range(LIMIT + too_many):
        one = begin(process, f"completed {number}")
        one.set_progress(100)
        process.end(one, COMPLETED)
    assert len(process._completed._waiting) == LIMIT
    assert process.attempts() == KEPT_LIMIT + 1
    assert process.database.dropped == 2 * too_many

    # Each report of a running task takes the place of the last.
    for number in range(100_000):
        running.set_progress(message=f"number {number}")
    assert len(running.snapshot().json or "") < 100

    # One line each, not one for each write.
    told = our_warnings()
    assert len(told) == 2
    assert any(line.startswith("celery-awa dropped 1 writes:") for line in told)

    proxy.accept()
    eventually(lambda: process.attempts() == 1, timeout=40)
    assert running.flush_progress(timeout=SOON) is True
    assert process.stop(20)
    with closing(Database(private_url)) as look:
        rows = look.execute("SELECT task_id, state, progress FROM {schema}.jobs_hot")
    kept = {row["task_id"]: (row["state"], row["progress"]) for row in rows}
    # The newest of the ends; the first of the rows that nobody waits for.
    assert kept == {
        **{
            f"failed {n}": ("failed", {"percent": 60})
            for n in range(too_many, KEPT_LIMIT + too_many)
        },
        **{f"completed {n}": ("completed", None) for n in range(LIMIT)},
        "running": ("running", {"message": "number 99999"}),
    }


def test_what_is_posted_without_a_pause_stays_bounded_too(
    start_process: StartProcess, proxied: Proxied
) -> None:
    """What no task waits for: messages that were published, revocations of what never began."""
    proxy, url = proxied
    process = start_process(url)
    proxy.turn_away()
    for number in range(3 * KEPT_LIMIT):
        process.sent(Lease(number, 1))
    assert len(process.database._errands) <= KEPT_LIMIT
    assert process.database.dropped >= 2 * KEPT_LIMIT
    proxy.accept()
    eventually(lambda: not process.database._errands, timeout=20)
