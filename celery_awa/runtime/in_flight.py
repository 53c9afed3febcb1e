"""Runs in the process that executes tasks: the attempts which run in it now, any thread."""

from __future__ import annotations

from .attempt import Attempt


class InFlight:
    """The attempts of this process, from their begin until their end is confirmed.

    Without a lock: each step on the dictionary is one of the interpreter's, and a process that a
    task forks while another thread is in here finds nothing locked.
    """

    def __init__(self) -> None:
        self._attempts: dict[str, Attempt] = {}

    def add(self, attempt: Attempt) -> None:
        self._attempts[attempt.token] = attempt

    def discard(self, attempt: Attempt) -> None:
        self._attempts.pop(attempt.token, None)

    def all(self) -> list[Attempt]:
        return list(self._attempts.copy().values())

    def __len__(self) -> int:
        return len(self._attempts)
