"""Progress of any loop: no cursor, no stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, TypeVar

from .pace import Pace
from .resumable import Resumable

T = TypeVar("T")
#: Seconds between two reports.
INTERVAL = 0.1


def track(
    attempt: Resumable | None,
    iterable: Iterable[T],
    total: float | None,
    message: str | Callable[[T], str] | None,
) -> Iterator[T]:
    """Yield the items, and report at most every 0.1 s, at the first item and after the last."""
    if attempt is None:
        return iter(iterable)
    if total is None and isinstance(iterable, Sized):
        total = len(iterable)
    return _tracked(attempt, iterable, total, message)


def _tracked(
    attempt: Resumable,
    iterable: Iterable[T],
    total: float | None,
    message: str | Callable[[T], str] | None,
) -> Iterator[T]:
    now = time.monotonic()
    pace = Pace(0, now)
    due = now
    done = 0
    item: Any = None

    def report() -> None:
        text = message(item) if callable(message) else message
        attempt.report(current=done, total=total, message=text, rate=pace.rate(done, now))

    for item in iterable:
        now = time.monotonic()
        if now >= due:
            report()
            due = now + INTERVAL
        yield item
        done += 1
    now = time.monotonic()
    if done or not callable(message):
        report()
