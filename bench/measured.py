"""The Celery app of the benchmarks; the worker loads it by name.

Its environment names Redis, the prefix of all keys there, and the database.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from celery import Celery

import celery_awa
from celery_awa import AwaTask

REDIS_VARIABLE = "AWA_BENCH_REDIS_URL"
PREFIX_VARIABLE = "AWA_BENCH_PREFIX"

_redis = os.environ[REDIS_VARIABLE]
_options = {"global_keyprefix": os.environ[PREFIX_VARIABLE]}

app = Celery("measured", broker=_redis, backend=_redis)
app.conf.update(broker_transport_options=_options, result_backend_transport_options=_options)
celery_awa.install(app)


@app.task(base=AwaTask, bind=True)
def report(self: AwaTask, rounds: int, calls: int, slow_calls: int) -> dict[str, list[float]]:
    """Seconds a call, one figure a round, of each way to report; the ways take turns."""
    ways: dict[str, tuple[Callable[[int], Any], int]] = {
        "set_progress": (lambda i: self.set_progress(i % 100, "x"), calls),
        "update_metadata": (lambda i: self.update_metadata({"last_id": i}), calls),
        "update_state": (
            lambda i: self.update_state(
                state="PROGRESS", meta={"percent": i % 100, "message": "x", "last_id": i}
            ),
            slow_calls,
        ),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, (call, times) in ways.items():
            found[name].append(_seconds_a_call(call, times))
    return found


def _seconds_a_call(call: Callable[[int], Any], times: int) -> float:
    start = time.perf_counter()
    for i in range(times):
        call(i)
    return (time.perf_counter() - start) / times


@app.task(base=AwaTask, bind=True)
def loop(self: AwaTask, rounds: int, count: int) -> dict[str, list[float]]:
    """Seconds an item, one figure a round, of each way to loop; the ways take turns."""
    numbers = range(count)
    ways: dict[str, Callable[[int], Any]] = {
        "plain": lambda turn: numbers,
        "iterate": lambda turn: self.iterate(numbers, name=f"loop {turn}"),
        "track": lambda turn: self.track(numbers),
        "set_progress": lambda turn: _reporting(self, numbers),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds):
        for name, begin in ways.items():
            start = time.perf_counter()
            for _ in begin(turn):
                pass
            found[name].append((time.perf_counter() - start) / count)
    return found


def _reporting(task: AwaTask, numbers: range) -> Any:
    for number in numbers:
        yield number
        task.set_progress(number % 100, "x")


@app.task(ignore_result=True)
def plain() -> None:
    """Does nothing, on Celery's own base."""


@app.task(base=AwaTask, ignore_result=True)
def ours() -> None:
    """Does nothing and reports nothing, on ours."""


@app.task
def clock() -> float:
    """When the worker came to this message."""
    return time.time()
