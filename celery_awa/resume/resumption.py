"""What one attempt's loops and steps know; made when the first of them is begun.

For the task's own thread: a task's other threads report through the attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, TypeVar

from ..errors import CheckpointMismatch
from ..model import StopReason
from ..runtime.checkpoint import COMMITTED_STATE, STATE
from .checked import name_of, seconds, whole_number
from .item_errors import ItemErrors, check_item_errors
from .iteration import Iteration, Options
from .resumable import Resumable
from .sources.choose import as_source
from .step import Step
from .stops import Interrupt
from .track import track

T = TypeVar("T")

_ITERATIONS, _STEPS = "iterations", "steps"


class Resumption:
    """``attempt``: None outside one, where loops and steps just run.

    ``let_pass``: exceptions by which a task leaves its body on purpose, which are no item's error.
    """

    def __init__(
        self, attempt: Resumable | None, *, let_pass: tuple[type[BaseException], ...] = ()
    ) -> None:
        self.attempt = attempt
        self.let_pass = let_pass
        #: Whether this attempt has finished an item or a step.
        self.advanced = False
        self._state: dict[str, Any] | None = None
        self._used: set[str] = set()
        self._met = 0
        self._loop: Iteration | None = None
        self._step: Step | None = None

    # What a task calls.

    def iterate(
        self,
        source: Any,
        *,
        name: str = "items",
        batch_size: int | None = None,
        checkpoint_every: int = 100,
        checkpoint_interval: float = 0.1,
        on_item_error: ItemErrors = "raise",
        kill_limit: int | None = None,
        message: str | Callable[[Any], str] | None = None,
    ) -> Iteration:
        """See :meth:`celery_awa.AwaMixin.iterate`."""
        if batch_size is not None:
            whole_number("batch_size", batch_size)
        if kill_limit is not None:
            whole_number("kill_limit", kill_limit)
        check_item_errors(on_item_error)
        options = Options(
            batch_size,
            whole_number("checkpoint_every", checkpoint_every),
            seconds("checkpoint_interval", checkpoint_interval),
            on_item_error,
            kill_limit,
            message,
        )
        chosen = as_source(source)
        full_name = self._begin_loop(name_of("loop", name))
        self._loop = Iteration(self, chosen, full_name, options)
        return self._loop

    def step(self, name: str) -> Step:
        """See :meth:`celery_awa.AwaMixin.step`."""
        return Step(self, name_of("step", name))

    def track(
        self,
        iterable: Iterable[T],
        *,
        total: float | None = None,
        message: str | Callable[[T], str] | None = None,
    ) -> Iterator[T]:
        """See :meth:`celery_awa.AwaMixin.track`."""
        return track(self.attempt, iterable, total, message)

    def interrupt(self) -> NoReturn:
        """See :meth:`celery_awa.AwaMixin.interrupt`."""
        raise Interrupt(self.attempt.stop_reason if self.attempt is not None else None)

    def settle(self) -> None:
        """Keep what is finished and not kept yet: before an end of the attempt, and a flush."""
        if self._loop is not None:
            self._loop.settle()

    # What loops and steps call.

    def check_stop(self) -> None:
        """Raise Interrupt if the task is asked to stop.

        ``max_runtime`` counts once something was finished: else it might never advance.
        """
        reason = self.attempt.stop_reason if self.attempt is not None else None
        if reason is not None and (self.advanced or reason is not StopReason.MAX_RUNTIME):
            raise Interrupt(reason)

    def kept(self, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """What was kept of a loop, and what was committed of it in transactions."""
        committed: Any = None
        if self.attempt is not None:
            committed = self.attempt.committed.get(COMMITTED_STATE)
        committed = committed.get(name) if isinstance(committed, dict) else None
        return (
            dict(self._part(_ITERATIONS).get(name) or {}),
            committed if isinstance(committed, dict) else {},
        )

    def keep_loop(self, name: str, state: dict[str, Any]) -> None:
        """Keep a loop's state."""
        self._part(_ITERATIONS)[name] = state
        self._keep()

    def loop_ended(self, loop: Iteration) -> None:
        """The loop is over, or was closed: another may begin."""
        if self._loop is loop:
            self._loop = None

    def enter(self, step: Step) -> bool:
        """Begin a step, which must be the next that the checkpoint knows; False if it is finished.

        Raises CheckpointMismatch for another one, RuntimeError for one inside another or a loop.
        """
        self._may_enter(step)
        steps = self._part(_STEPS)
        names = steps.setdefault("names", [])
        if self._met < len(names):
            if names[self._met] != step.name:
                raise CheckpointMismatch(
                    f"the checkpoint's step {self._met + 1} is {names[self._met]!r}, the code's is "
                    f"{step.name!r}: raise the task's checkpoint_version to discard or migrate it"
                )
        else:
            names.append(step.name)
        todo: bool = self._met >= steps.get("finished", 0)
        if todo:
            self.check_stop()
        self._met += 1
        self._step = step
        return todo

    def leave(self, step: Step, *, finished: bool) -> None:
        """The step's block was left."""
        self._step = None
        if not finished:
            return
        self._part(_STEPS)["finished"] = self._met
        self._part(_STEPS).pop("cursor", None)
        loops = self._part(_ITERATIONS)
        for name in [name for name in loops if name.startswith(f"{step.name}/")]:
            del loops[name]
        self.advanced = True
        self._keep()
        if self.attempt is not None and self.attempt.on_step is not None:
            self.attempt.on_step(step.name)

    def cursor(self) -> Any:
        """What the present step kept last."""
        return self._part(_STEPS).get("cursor")

    def set_cursor(self, value: Any) -> None:
        """Keep the present step's cursor, and stop if the task is asked to."""
        steps = self._part(_STEPS)
        before = steps.get("cursor")
        steps["cursor"] = value
        try:
            self._keep()
        except BaseException:
            steps["cursor"] = before
            raise
        self.advanced = True
        self.check_stop()

    # Steps.

    def _begin_loop(self, name: str) -> str:
        if self._loop is not None and self._loop.begun:
            raise RuntimeError(
                f"the loop {self._loop.name!r} has not ended: an inner loop can be a plain one or "
                "self.track(); after a break, close() the first one"
            )
        if self._step is not None:
            name = f"{self._step.name}/{name}"
        if name in self._used:
            raise RuntimeError(f"a second loop {name!r} in one attempt: give it a name= of its own")
        self._used.add(name)
        return name

    def _may_enter(self, step: Step) -> None:
        if self._step is not None:
            raise RuntimeError(f"step {step.name!r} is inside step {self._step.name!r}")
        if self._loop is not None and self._loop.begun:
            raise RuntimeError(f"step {step.name!r} is inside the loop {self._loop.name!r}")
        if step.name in self._part(_STEPS).get("names", [])[: self._met]:
            raise RuntimeError(f"a second step {step.name!r} in one attempt: give it another name")

    def _part(self, part: str) -> dict[str, Any]:
        if self._state is None:
            kept = self.attempt.checkpoint.get(STATE) if self.attempt is not None else None
            kept = kept if isinstance(kept, dict) else {}
            self._state = {
                name: dict(kept[name]) if isinstance(kept.get(name), dict) else {}
                for name in (_ITERATIONS, _STEPS)
            }
            if "names" in self._state[_STEPS]:
                self._state[_STEPS]["names"] = list(self._state[_STEPS]["names"])
        found: dict[str, Any] = self._state[part]
        return found

    def _keep(self) -> None:
        if self.attempt is not None and self._state is not None:
            self.attempt.keep({name: part for name, part in self._state.items() if part})
