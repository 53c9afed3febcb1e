"""How fast a loop goes: a count a second, smoothed over the last seconds of this attempt. Pure."""

from __future__ import annotations

#: Seconds over which it is smoothed, and between two looks at least.
_WINDOW, _LEAST = 5.0, 0.1


class Pace:
    """Watches a count grow from ``start``, where this attempt began at ``now``.

    Times are of a clock that never goes back, as ``time.monotonic()``.
    """

    def __init__(self, start: float, now: float) -> None:
        self._began = self._at = now
        self._count = start
        self._exact: float | None = None
        self._rate: float | None = None

    def rate(self, count: float, now: float) -> float | None:
        """The pace, now that so much is done, to three digits; None in the first moments."""
        passed = now - self._at
        if passed < _LEAST:
            return self._rate
        latest = max(count - self._count, 0) / passed
        # At first the plain average since the begin, later one that forgets what is long ago.
        weight = min(passed / min(now - self._began, _WINDOW), 1.0)
        before = self._exact or 0.0
        self._exact = before + weight * (latest - before)
        self._rate = float(f"{self._exact:.3g}")
        self._at, self._count = now, count
        return self._rate
