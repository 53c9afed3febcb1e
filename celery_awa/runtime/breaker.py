"""Runs on the database thread, read by any: whether the database answers, and when to try again."""

from __future__ import annotations

import random
import time

from .trouble import Trouble

#: Seconds between two tries while the database is away: doubling, each jittered by half.
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 3.0

# Not the module's own functions: a task that seeded them is to get the numbers it counts on. And
# without a state, which forked children would share and so come back all at once.
_random = random.SystemRandom()


class Pauses:
    """The pauses between the tries of one thing."""

    def __init__(self) -> None:
        self._next = FIRST_PAUSE

    def next(self) -> float:
        """Seconds until the next try, longer from failure to failure."""
        pause, self._next = self._next, min(self._next * 2, LONGEST_PAUSE)
        return pause * _random.uniform(0.5, 1.5)

    def reset(self) -> None:
        """It worked."""
        self._next = FIRST_PAUSE


class Breaker:
    """``answering`` is False from a failure until the database thread succeeded again.

    Who waits by courtesy only looks at it first.
    """

    def __init__(self, trouble: Trouble) -> None:
        self.answering = True
        self.reason = ""
        #: Until then nothing is tried, in ``time.monotonic()``.
        self.retry_at = 0.0
        self._trouble = trouble
        self._pauses = Pauses()

    def slow(self) -> None:
        """Somebody waited in vain (any thread): nobody else is to do so."""
        self.answering = False

    def failed(self, exc: Exception) -> None:
        self.answering = False
        self.reason = str(exc)
        self.retry_at = time.monotonic() + self._pauses.next()
        self._trouble.warn(
            "database", "celery-awa cannot use its database, tasks go on without it: %s", exc
        )

    def succeeded(self) -> None:
        self._pauses.reset()
        self.retry_at, self.reason = 0.0, ""
        if not self.answering:
            self.answering = True
            self._trouble.over("database", "celery-awa can use its database again")
