"""Runs in the process that executes tasks: the attempts which run in it now, any thread."""

from __future__ import annotations

import threading

from .attempt import Attempt


class InFlight:
    """The attempts of this process, from their begin until their end is confirmed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._attempts: dict[str, Attempt] = {}

    def add(self, attempt: Attempt) -> None:
        with self._lock:
            self._attempts[attempt.token] = attempt

    def discard(self, attempt: Attempt) -> None:
        with self._lock:
            self._attempts.pop(attempt.token, None)

    def all(self) -> list[Attempt]:
        with self._lock:
            return list(self._attempts.values())

    def __len__(self) -> int:
        return len(self._attempts)
