"""Runs on the rescue thread: tells attempts that are silent from a database that did not hear them.

After an outage every attempt looks stale, and the longest so the one whose worker comes back last.
Taking it then would make the outage change a task's result.
"""

from __future__ import annotations

import math
import time

from ..model import Thresholds

#: Seconds within which a worker that lives finds the database again: it gives up a silent
#: connection, or one that it is just opening, makes a pause and connects.
RETURN_WITHIN = 12.0
#: Seconds without a word with the database that hide no outage, however short the intervals.
SHORT_GAP = 3.0


class Contact:
    """Since when the database has answered this rescuer, without a gap that hides an outage.

    A gap of half of ``stale_after`` hides none that counts: a heartbeat before it, the pause of
    whoever comes back after it, and the gap itself come to less than ``stale_after``.
    """

    def __init__(self, thresholds: Thresholds) -> None:
        self._gap = max(thresholds.stale_after / 2, SHORT_GAP)
        # Where heartbeats come in quick succession, nobody who wants that waits so long.
        self._needed = min(RETURN_WITHIN, 2 * thresholds.duplicate_after)
        self._since = self._last = -math.inf

    def answered(self) -> None:
        """It answered just now."""
        now = time.monotonic()
        if now - self._last > self._gap:
            self._since = now
        self._last = now

    def broke(self) -> None:
        """It did not answer."""
        self._last = -math.inf

    @property
    def silence_counts(self) -> bool:
        """Whether it has answered for long enough that everybody had the time to come back."""
        return self._last - self._since >= self._needed
