"""Runs in the worker or in a command of its own: a thread for what may wait, now and then.

``wake`` and ``stop`` are called from any thread, ``wake`` from a signal's handler too.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable

from ..errors import StoreUnavailable
from .bell import Bell
from .trouble import Trouble

#: Parts of the interval: of the first pause, so that what starts together does not pass
#: together, and of each further one.
FIRST_PAUSE, PAUSE = (0.2, 1.0), (0.8, 1.0)
#: Seconds until the next pass where the last one left something in doubt.
SOON = 1.0

# See runtime/breaker.py for why not the module's own functions.
_random = random.SystemRandom()


class PeriodicThread:
    """Calls ``work`` at least every ``interval`` seconds, from the end of one to the next.

    ``work`` looks at ``over`` wherever it can leave off. While the database is away it may raise
    StoreUnavailable: that is told of elsewhere. ``soon``: whether the next pass is to come within
    a second.
    """

    def __init__(
        self,
        work: Callable[[], object],
        interval: float,
        trouble: Trouble,
        *,
        name: str,
        soon: Callable[[], bool] = lambda: False,
    ) -> None:
        self._work = work
        self._soon = soon
        self._interval = interval
        self._trouble = trouble
        self._name = name
        # A fork copies no thread, but gevent's copies its greenlets.
        self._process = os.getpid()
        self._stopping = False
        self._running = False
        self._bell = Bell()
        self._left = Bell()

    @property
    def over(self) -> bool:
        """Whether it is to stop, or is a forked child's copy, which does nothing."""
        return self._stopping or os.getpid() != self._process

    def start(self) -> None:
        """Once. The first pass comes one jittered interval later."""
        self._running = True
        try:
            threading.Thread(target=self._loop, name=self._name, daemon=True).start()
        except RuntimeError as exc:
            self._running = False
            self._trouble.warn("thread", "celery-awa: no thread for rescues: %s", exc)

    def wake(self) -> None:
        """A pass now, or once more when the present one has ended. Does not wait."""
        self._bell.ring()

    def stop(self, timeout: float) -> bool:
        """Wait for so many seconds at most until it has left off; whether it has."""
        self._stopping = True
        self._bell.ring()
        if self._running and os.getpid() == self._process:
            self._left.wait(timeout)
            return not self._running
        return True

    def _loop(self) -> None:
        try:
            pause = FIRST_PAUSE
            while not self.over:
                seconds = self._interval * _random.uniform(*pause)
                self._bell.wait(min(SOON, seconds) if self._soon() else seconds)
                pause = PAUSE
                if not self.over:
                    self._pass()
        finally:
            self._running = False
            self._left.ring()

    def _pass(self) -> None:
        try:
            self._work()
        except StoreUnavailable:
            pass  # the breaker has told of it
        except Exception as exc:
            self._trouble.warn("bug", "celery-awa: unexpected error", exc_info=exc)
