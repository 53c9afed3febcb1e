"""Runs on the database thread: what it does from time to time, beside its errands."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from ..errors import RowLocked
from ..store.protocol import Store
from .breaker import Pauses
from .errand import LOCKED_PAUSE

NEVER = float("inf")


class Service(Protocol):
    """One subject, one pass at a time."""

    def due(self) -> float | None:
        """When it wants to run next, in ``time.monotonic()``; None: not now."""
        ...

    def run_once(self, open_store: Callable[[], Store]) -> object:
        """One pass. Opens the store only if it has something to say."""
        ...


class Attended:
    """A service, and when it may run again after it failed: one that fails holds up no other."""

    def __init__(self, service: Service) -> None:
        self.run_once = service.run_once
        self._service = service
        self._pauses = Pauses()
        self._not_before = 0.0

    def due(self) -> float:
        """When it is to run next."""
        due = self._service.due()
        return NEVER if due is None else max(due, self._not_before)

    def passed(self, problem: Exception | None) -> None:
        """It ran, and this went wrong."""
        if problem is None:
            self._pauses.reset()
            return
        pause = LOCKED_PAUSE if isinstance(problem, RowLocked) else self._pauses.next()
        self._not_before = time.monotonic() + pause
