"""Progress of any loop: it keeps no cursor and never stops."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import TypeVar

from . import checked
from .checked import Message
from .pace import Pace
from .resumable import Resumable

T = TypeVar("T")

#: Seconds between two reports at least, but for the first and the last.
_INTERVAL = 0.1


def track(
    attempt: Resumable | None, iterable: Iterable[T], total: float | None, message: Message
) -> Iterator[T]:
    """The items; reports at the first, after the last, and at most every 0.1 s in between."""
    checked.total(total)
    checked.message(message)
    if attempt is None:
        return iter(iterable)
    if total is None and isinstance(iterable, Sized):
        total = len(iterable)
    return _tracked(_reporter(attempt, total, message), iterable)


def _tracked(report: Callable[..., None], iterable: Iterable[T]) -> Iterator[T]:
    done, due, monotonic = 0, float("-inf"), time.monotonic
    told: tuple[T, ...] = ()
    for item in iterable:
        if monotonic() >= due:
            report(done, item)
            due = monotonic() + _INTERVAL
        yield item
        done += 1
        told = (item,)
    report(done, *told)


def _reporter(attempt: Resumable, total: float | None, message: Message) -> Callable[..., None]:
    pace = Pace(0, time.monotonic())

    def report(done: int, *items: object) -> None:
        text = None if callable(message) else message
        for item in items:
            text = message(item) if callable(message) else message
        rate = pace.rate(done, time.monotonic())
        attempt.report(current=done, total=total, message=text, rate=rate)

    return report
