"""Waiting for a condition with a deadline: the only place in the tests that sleeps."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def eventually(
    probe: Callable[[], T], *, timeout: float = 10.0, what: str = "", interval: float = 0.02
) -> T:
    """Call the probe until its answer is true, and return that answer.

    A probe may also assert: its AssertionError counts as "not yet". Raises AssertionError with
    the last answer after ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    while True:
        last = _ask(probe)
        if last and not isinstance(last, AssertionError):
            return last
        if time.monotonic() >= deadline:
            raise AssertionError(_too_late(what or _name(probe), timeout, last)) from None
        time.sleep(interval)


def hold(path: str | Path | None, *, timeout: float = 60.0) -> None:
    """Wait until the file exists: how a test tells a task in another process to go on."""
    if path is not None:
        eventually(Path(path).exists, timeout=timeout, what=f"{path} was created")


def _ask(probe: Callable[[], T]) -> T | AssertionError:
    try:
        return probe()
    except AssertionError as not_yet:
        return not_yet


def _name(probe: Callable[[], object]) -> str:
    return getattr(probe, "__qualname__", repr(probe))


def _too_late(what: str, timeout: float, last: object) -> str:
    return f"not within {timeout:g} s: {what}; the last answer was {last!r}"
