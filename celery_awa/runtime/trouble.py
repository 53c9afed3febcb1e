"""Runs in any process and thread: says what is wrong, once in a while, and never raises."""

from __future__ import annotations

import logging
import os
import time
import weakref

from .. import native

logger = logging.getLogger("celery_awa")

#: Seconds between two warnings of one kind.
EVERY = 60.0


class Trouble:
    """Warnings limited to one a minute and kind; what was held back is counted."""

    def __init__(self) -> None:
        # Can be taken again by its thread: a signal's handler may have something to say.
        self._lock = native.rlock()
        self._next: dict[str, float] = {}
        self._held_back: dict[str, int] = {}
        #: Kinds of which a warning was logged, and not yet that it is over.
        self._told: set[str] = set()
        _all.add(self)

    def warn(
        self,
        kind: str,
        message: str,
        *arguments: object,
        exc_info: BaseException | None = None,
    ) -> None:
        """Log a warning unless one of this kind was logged within the last minute."""
        now = time.monotonic()
        with self._lock:
            if now < self._next.get(kind, 0.0):
                self._held_back[kind] = self._held_back.get(kind, 0) + 1
                return
            self._next[kind] = now + EVERY
            self._told.add(kind)
            held_back = self._held_back.pop(kind, 0)
        if held_back:
            message += f" (and {held_back} more like it since the last warning)"
        _log(logging.WARNING, message, arguments, exc_info)

    def over(self, kind: str, message: str) -> None:
        """Say that the trouble is over, if it was told of. The minute goes on all the same."""
        with self._lock:
            told = kind in self._told
            self._told.discard(kind)
        if told:
            _log(logging.INFO, message, (), None)

    def _begin_anew(self) -> None:
        self._lock = native.rlock()
        self._next, self._held_back, self._told = {}, {}, set()


def _log(
    level: int, message: str, arguments: tuple[object, ...], exc_info: BaseException | None
) -> None:
    try:
        logger.log(level, message, *arguments, exc_info=exc_info)
    except Exception:  # a handler of the user's: there is nobody left to tell
        pass


_all: weakref.WeakSet[Trouble] = weakref.WeakSet()


def _leave_inherited() -> None:
    # Another thread of the parent may have held the lock at the fork, and is not here to let go.
    # What the parent told of is its own: this process has troubles of its own to tell of.
    for trouble in list(_all):
        trouble._begin_anew()


os.register_at_fork(after_in_child=_leave_inherited)
