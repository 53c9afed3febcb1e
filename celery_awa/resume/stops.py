"""Raised on the task's thread to leave off there; the task's wrapper ends the attempt by them.

They are no Exceptions, so that ``except Exception`` in a task's body lets them pass, as it should.
Said after "task <id>", each tells what becomes of the task.
"""

from __future__ import annotations

from ..model import StopReason


class Stop(BaseException):
    """The attempt leaves off here, and the task goes on later: let it pass."""

    #: What asked the task to stop, if anything did.
    reason: StopReason | None = None


class Interrupt(Stop):
    """The task goes on as soon as a worker takes it; ``reason``: what asked it to stop, if any."""

    def __init__(self, reason: StopReason | None = None) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return "was interrupted" + (f": {self.reason}" if self.reason is not None else "")


class Snooze(Stop):
    """The task goes on in ``seconds``."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds

    def __str__(self) -> str:
        return f"goes on in {self.seconds:g} s"


class Park(Stop):
    """The task waits for a callback, ``timeout`` seconds at most; None: for ever."""

    def __init__(self, token: str, timeout: float | None) -> None:
        super().__init__(token, timeout)
        self.token = token
        self.timeout = timeout

    def __str__(self) -> str:
        # Without the token, which is a secret.
        limit = "" if self.timeout is None else f", for {self.timeout:g} s at most"
        return f"waits for a callback{limit}"
