"""Runs on the database thread, handed over and waited for by any other: one piece of work."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, TypeVar

from ..errors import RowLocked, SchemaError, StoreUnavailable
from ..store.protocol import Store
from .bell import Bell
from .breaker import Pauses

T = TypeVar("T")

#: Seconds until a statement is tried again whose row was locked (it waited 0.5 s already).
LOCKED_PAUSE = 0.2


class Errand(Generic[T]):
    """Work for the thread. It must be safe to repeat: an answer can be lost on the way.

    ``kept``: it is tried until it succeeds, whether somebody waits or not. ``brief``: who waits
    does so by courtesy only, and goes at the first failure. ``settled`` is called once, when the
    errand was answered, refused or dropped, on the thread that found out.
    """

    def __init__(
        self,
        number: int,
        work: Callable[[Store], T],
        *,
        kept: bool = False,
        brief: bool = False,
        settled: Callable[[], None] | None = None,
    ) -> None:
        self.number = number
        self.kept = kept
        #: Not before this, in ``time.monotonic()``.
        self.start = 0.0
        self.done = False
        self.answer: T | None = None
        self.error: BaseException | None = None
        #: Why it was not done yet.
        self.reason = ""
        self._work = work
        self._brief = brief
        self._settled = settled
        self._pauses = Pauses()
        self._bell = Bell()

    def wait(self, timeout: float) -> bool:
        """Wait for so many seconds at most; True once it is done. For one thread, once."""
        self._bell.wait(timeout)
        return self.done

    def run(self, store: Store) -> None:
        """Try it. Raises only what asks for another try."""
        try:
            self.answer = self._work(store)
        except (StoreUnavailable, RowLocked, SchemaError):
            raise
        except BaseException as exc:
            self.error = exc

    def postpone(self, problem: Exception) -> None:
        """It is to be tried again, later."""
        self.reason = str(problem)
        locked = isinstance(problem, RowLocked)
        self.start = time.monotonic() + (LOCKED_PAUSE if locked else self._pauses.next())
        if self._brief and not locked:
            self._bell.ring()

    def settle(self, error: BaseException | None = None) -> None:
        """It will not be tried any more."""
        self.error = error or self.error
        # First: who notes it elsewhere looks at this after that, and ``settled`` before.
        self.done = True
        try:
            if self._settled is not None:
                self._settled()
        except Exception as exc:
            self.error = self.error or exc
        finally:
            self._bell.ring()
