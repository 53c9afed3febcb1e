"""Many processes lose one database: how often they look for it, and how they come back to it.

Their pauses are played through without waiting for them, so the machine's speed plays no part.
"""

from __future__ import annotations

import heapq
import itertools
import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator

import pytest

from celery_awa.errors import StoreUnavailable
from celery_awa.runtime import breaker
from celery_awa.runtime.breaker import LONGEST_PAUSE, Breaker, Pauses
from celery_awa.runtime.trouble import Trouble
from tests.runtime_parts import Clock

PROCESSES, OUTAGE = 40, 300.0


def tries(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[float, int]]:
    """When which process tries, from the moment at which all lose the database at once."""
    clock = Clock(monkeypatch, breaker)
    began = clock.now
    breakers = [Breaker(Trouble()) for _ in range(PROCESSES)]
    for one in breakers:
        one.failed(StoreUnavailable())
    due = [(one.retry_at, number) for number, one in enumerate(breakers)]
    heapq.heapify(due)
    while True:
        clock.now, number = heapq.heappop(due)
        yield clock.now - began, number
        breakers[number].failed(StoreUnavailable())
        heapq.heappush(due, (breakers[number].retry_at, number))


def most_within(times: list[float], seconds: float) -> int:
    """The most of these moments, which are in order, in one stretch of that length."""
    return max(bisect_left(times, begin + seconds) - n for n, begin in enumerate(times))


def during(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The tries of an outage of five minutes, but for its first ten seconds."""
    all_of_them = itertools.takewhile(lambda one: one[0] < OUTAGE, tries(monkeypatch))
    return [time for time, _ in all_of_them if time > 10]


def at_return(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When each process tries next, once the database is back."""
    first: dict[int, float] = {}
    for time, number in tries(monkeypatch):
        if time >= OUTAGE:
            first.setdefault(number, time - OUTAGE)
        if len(first) == PROCESSES:
            return sorted(first.values())
    raise AssertionError("it ends by its return")


def test_while_it_is_away_each_looks_for_it_every_three_seconds_or_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = during(monkeypatch)
    wanted = PROCESSES * (OUTAGE - 10) / LONGEST_PAUSE
    assert 0.8 * wanted < len(times) < 1.2 * wanted
    assert most_within(times, 1.0) <= 32  # 13 on the average
    assert most_within(times, 0.1) <= 12  # 1.3


def test_when_it_comes_back_all_are_back_soon_and_not_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = at_return(monkeypatch)
    assert times[-1] <= 1.5 * LONGEST_PAUSE
    assert most_within(times, 0.1) <= 12
    assert most_within(times, 1.0) <= 32


def test_without_jitter_all_would_come_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Never:
        def uniform(self, low: float, high: float) -> float:
            return (low + high) / 2

    monkeypatch.setattr(breaker, "_random", Never())
    assert most_within(during(monkeypatch), 0.1) == PROCESSES
    assert most_within(at_return(monkeypatch), 0.1) == PROCESSES


def test_forked_processes_draw_pauses_of_their_own() -> None:
    def drawn_in_child() -> float:
        reading, writing = os.pipe()
        if os.fork() == 0:
            os.write(writing, str(Pauses().next()).encode())
            os._exit(0)
        os.close(writing)
        os.wait()
        with os.fdopen(reading) as answer:
            return float(answer.read())

    assert max(Counter(drawn_in_child() for _ in range(4)).values()) == 1
