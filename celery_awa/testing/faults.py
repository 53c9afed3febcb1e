"""What is to happen to an attempt under test, and where: after items of a loop, or after a step."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, Union

if TYPE_CHECKING:
    from .task_run import TaskRun

#: Items of all loops together; items of one loop, by its name; or a step's name.
After = Union[int, str, "tuple[str, int]"]

_ALLOWED = "a number of items from 1 on, a loop's name and such a number, or a step's name"


class NotReached(AssertionError):
    """The place where the attempt was to be crashed, interrupted or robbed was never reached.

    ``run`` is the :class:`TaskRun`, which went on without that.
    """

    def __init__(self, message: str, run: TaskRun) -> None:
        super().__init__(message)
        self.run = run


class Crash(BaseException):
    """The worker died here. Let it pass."""


class Fault(str, Enum):
    """What happens; the value is the argument that asks for it."""

    CRASH = "crash_after"
    INTERRUPT = "interrupt_after"
    LOSE_LEASE = "lose_lease_after"


class Plan:
    """One fault of one attempt, or none; told how far the attempt is."""

    def __init__(self, fault: Fault | None = None, after: Any = None) -> None:
        self.fault = fault
        self.reached = False
        #: Finished in this attempt: items by loop, and steps.
        self.items: dict[str, int] = {}
        self.steps: list[str] = []
        self._after = after
        self._loop: str | None = None
        self._count: int | None = None
        self._step: str | None = None
        if fault is not None:
            self._loop, self._count, self._step = _parsed(fault, after)

    def item_finished(self, loop: str, done: int) -> bool:
        """The loop has finished so many items in this attempt; whether the fault strikes now."""
        self.items[loop] = done
        if self._count is None:
            return False
        items = sum(self.items.values()) if self._loop is None else self.items.get(self._loop, 0)
        return self._strikes(items >= self._count)

    def step_finished(self, step: str) -> bool:
        """The step is finished; whether the fault strikes now."""
        self.steps.append(step)
        return self._strikes(step == self._step)

    def _strikes(self, there: bool) -> bool:
        strikes = there and not self.reached
        self.reached = self.reached or there
        return strikes

    def __str__(self) -> str:
        if self.fault is None:
            return "no fault"
        return f"{self.fault.value}={self._after!r}"


def planned(**faults: Any) -> Plan:
    """The plan for the arguments of ``run_task``; ValueError or TypeError for bad ones."""
    given = [(Fault(name), after) for name, after in faults.items() if after is not None]
    if len(given) > 1:
        names = " and ".join(fault.value for fault, _ in given)
        raise ValueError(f"{names} exclude each other: give one of them an attempt")
    return Plan(*given[0]) if given else Plan()


def _parsed(fault: Fault, after: Any) -> tuple[str | None, int | None, str | None]:
    """The loop (None: all), its items, and the step."""
    bad = f"{fault.value} is {after!r}; it must be {_ALLOWED}"
    if isinstance(after, str):
        if not after:
            raise ValueError(bad)
        return None, None, after
    loop, count = after if isinstance(after, tuple) and len(after) == 2 else (None, after)
    named = loop is None or isinstance(loop, str)
    if not named or isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(bad)
    if count < 1 or loop == "":
        raise ValueError(bad)
    return loop, count, None
