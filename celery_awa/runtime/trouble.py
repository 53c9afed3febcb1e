"""Runs in any process and thread: says what is wrong, once in a while, and never raises."""

from __future__ import annotations

import logging
import threading
import time

logger = logging.getLogger("celery_awa")

#: Seconds between two warnings of one kind.
EVERY = 60.0


class Trouble:
    """Warnings limited to one a minute and kind; what was held back is counted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next: dict[str, float] = {}
        self._held_back: dict[str, int] = {}

    def warn(
        self, kind: str, message: str, *arguments: object, exc_info: BaseException | None = None
    ) -> None:
        """Log a warning unless one of this kind was logged within the last minute."""
        now = time.monotonic()
        with self._lock:
            if now < self._next.get(kind, 0.0):
                self._held_back[kind] = self._held_back.get(kind, 0) + 1
                return
            self._next[kind] = now + EVERY
            held_back = self._held_back.pop(kind, 0)
        if held_back:
            message += f" (and {held_back} more like it since the last warning)"
        logger.warning(message, *arguments, exc_info=exc_info)

    def over(self, kind: str, message: str) -> None:
        """Say that the trouble is over, if it was told of; the next one is told at once."""
        with self._lock:
            told = self._next.pop(kind, None) is not None
            self._held_back.pop(kind, None)
        if told:
            logger.info(message)
