"""Runs in any process and thread: how one thread wakes another.

A soft time limit or a signal may strike a task's thread in the midst of ``ring`` or ``wait``. An
Event or a Condition can keep its lock then, and block whoever comes next for ever; a bare lock
changes in one step of the interpreter, so it is either done or not. Between a greenlet and a real
thread it is a real lock too, and the greenlet lets others run while it waits.
"""

from __future__ import annotations

from .. import native


class Bell:
    """Rung before the other side waits, it is not lost; rung twice, it is heard once."""

    def __init__(self) -> None:
        self._silence = native.lock()
        self._silence.acquire()

    def ring(self) -> None:
        try:
            self._silence.release()
        except RuntimeError:  # it rings already
            pass

    def wait(self, timeout: float) -> bool:
        """Wait for so many seconds at most; whether it rang."""
        return native.acquire(self._silence, timeout)
