"""What one attempt's loops and steps know of each other. For the task's own thread only.

A task's other threads may report through the attempt, but may neither loop nor step: what is
finished could not be told.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

from ..errors import AwaError, CheckpointMismatch
from ..model import StopReason
from ..runtime.checkpoint import COMMITTED_STATE, STATE
from ..runtime.trouble import Trouble
from .checked import Message, name_of
from .iteration import Iteration
from .options import LoopOptions
from .resumable import Resumable
from .sources.choose import as_source
from .state import StepsState, found_loop, found_loops, found_steps
from .step import Step
from .stops import Interrupt
from .track import track

T = TypeVar("T")

_trouble = Trouble()


class Resumption:
    """``attempt``: None outside one, where loops and steps just run.

    ``let_pass``: exceptions by which a task leaves its body on purpose; they are no item's error.
    """

    def __init__(
        self, attempt: Resumable | None, *, let_pass: tuple[type[BaseException], ...] = ()
    ) -> None:
        self.attempt = attempt
        self.let_pass = let_pass
        #: Whether this attempt has finished anything: before that it makes no way for others.
        self.advanced = False
        self.steps = StepsState()
        self.open_step: Step | None = None
        #: How many steps this attempt has met.
        self._met = 0
        self._names: set[str] = set()
        #: What is kept of loops that are not running, by name.
        self._loops: dict[str, dict[str, Any]] = {}
        #: Loops that were begun and have not ended, the last of which may be running.
        self._begun: list[Iteration] = []
        self._committed: Mapping[str, Any] = {}
        self._kept: Mapping[str, Any] | None = None

    # --- for tasks ---

    def iterate(self, source: Any, **options: Any) -> Iteration:
        """See ``AwaMixin.iterate``. In a step's block it is a loop of that step."""
        if self.open_step is not None:
            return self.open_step.iterate(source, **options)
        return self.loop(source, LoopOptions(**options))

    def step(self, name: str) -> Step:
        """See ``AwaMixin.step``."""
        return Step(self, name_of("step", name))

    def track(
        self, iterable: Iterable[T], *, total: float | None = None, message: Message = None
    ) -> Iterator[T]:
        """See ``AwaMixin.track``."""
        return track(self.attempt, iterable, total, message)

    def interrupt(self) -> NoReturn:
        """Leave off here; raises Interrupt."""
        raise Interrupt(self.attempt.stop_reason if self.attempt is not None else None)

    # --- for the attempt ---

    def settle(self, *, ends: bool = True) -> None:
        """Keep what is finished and not kept yet; before each end of the attempt and each flush.

        ``ends``: the attempt does not go on, so the item that is worked on has killed nobody. What
        cannot be kept for its form or size is logged.
        """
        if self._kept is None:
            return
        if ends:
            for loop in self._begun:
                loop.end_tries()
        try:
            self.keep()
        except AwaError as exc:
            _trouble.warn("settle", "celery-awa: the last cursor was not kept: %s", exc)

    # --- for loops and steps ---

    def look_for_stop(self) -> None:
        """Raise Interrupt if the attempt is asked to stop."""
        reason = self.attempt.stop_reason if self.attempt is not None else None
        # Who stopped before anything was finished would never advance.
        if reason is not None and (self.advanced or reason is not StopReason.MAX_RUNTIME):
            raise Interrupt(reason)

    def keep(self) -> None:
        """Keep all that is finished, if it has changed."""
        if self.attempt is None:
            return
        whole = self._composed()
        if whole != self._kept:
            self.attempt.keep(whole)
            self._kept = whole

    def kept_loop(self, name: str) -> dict[str, Any]:
        """What was last kept of a loop; {} for nothing."""
        return found_loops((self._kept or {}).get("iterations")).get(name, {})

    def loop(
        self, source: Any, options: LoopOptions, step: str | None = None, *, todo: bool = True
    ) -> Iteration:
        """A new loop, of a step where one is named; ``todo``: whether that is still to be done."""
        chosen = as_source(source)
        name = options.name if step is None else f"{step}/{options.name}"
        if self.attempt is not None:
            self._learn()
            if name in self._names:
                raise RuntimeError(
                    f"a second loop named {name!r} in one attempt: tell them apart with name="
                )
            self._names.add(name)
        found = found_loop(self._loops.get(name), self._committed.get(name))
        if not todo:
            found = replace(found, finished=True)
        return Iteration(self, chosen, name, options, found)

    def begin(self, loop: Iteration) -> None:
        """A loop begins, or goes on after an error of its source."""
        if self.attempt is None:
            return
        if loop in self._begun:
            self._begun.remove(loop)
        self._tell_outer(f"the loop {loop.name!r}")
        self._begun.append(loop)

    def ended(self, loop: Iteration) -> None:
        """A loop has come to its end."""
        if loop in self._begun:
            self._begun.remove(loop)
            self._loops[loop.name] = loop.state()

    def meet(self, step: Step) -> bool:
        """Begin a step; False if it is finished.

        Raises RuntimeError for one in the wrong place, CheckpointMismatch for another than the
        checkpoint knows, and Interrupt.
        """
        if self.attempt is None:
            return True
        self._learn()
        self._check_place(step.name)
        position, names = self._met, self.steps.names
        if names[position : position + 1] not in ((), (step.name,)):
            raise CheckpointMismatch(
                f"the checkpoint knows {names[position]!r} as step {position + 1}, the code has "
                f"come to {step.name!r}: raise the task's checkpoint_version where its steps change"
            )
        self.look_for_stop()
        if position == len(names):
            self.change_steps(replace(self.steps, names=(*names, step.name)))
        self._tell_outer(f"the step {step.name!r}")
        self._met += 1
        self.open_step = step
        return position >= self.steps.finished

    def change_steps(self, changed: StepsState) -> None:
        """Keep this of the steps; unchanged if that is refused."""
        before, self.steps = self.steps, changed
        try:
            self.keep()
        except AwaError:
            self.steps = before
            raise

    def finish(self, step: Step) -> None:
        """Keep that the step is finished, without what its loops kept.

        No look for a stop: what comes next looks, and if nothing does, the task is done.
        """
        if self.attempt is None:
            return
        inside = f"{step.name}/"
        self._begun = [loop for loop in self._begun if not loop.name.startswith(inside)]
        self._loops = {
            name: state for name, state in self._loops.items() if not name.startswith(inside)
        }
        self.advanced = True
        self.change_steps(StepsState(self.steps.names, self._met))
        if self.attempt.on_step is not None:
            self.attempt.on_step(step.name)

    def _learn(self) -> None:
        if self._kept is not None or self.attempt is None:
            return
        kept = self.attempt.checkpoint.get(STATE)
        self._committed = found_loops(self.attempt.committed.get(COMMITTED_STATE))
        kept = kept if isinstance(kept, dict) else {}
        self._loops, self.steps = (
            found_loops(kept.get("iterations")),
            found_steps(kept.get("steps")),
        )
        self._kept = kept

    def _check_place(self, name: str) -> None:
        if self.open_step is not None:
            raise RuntimeError(
                f"step {name!r} begins inside step {self.open_step.name!r}: steps do not nest"
            )
        if name in self.steps.names[: self._met]:
            raise RuntimeError(f"a second step named {name!r} in one attempt: give it another name")
        if self._met > self.steps.finished:
            raise RuntimeError(
                f"step {name!r} cannot begin: {self.steps.names[self._met - 1]!r} was left by an "
                "exception and is not finished; catch inside its block what may fail there"
            )

    def _tell_outer(self, what: str) -> None:
        if self._begun:
            self._begun[-1].begins_inside(what)

    def _composed(self) -> dict[str, Any]:
        loops = {**self._loops, **{loop.name: loop.state() for loop in self._begun}}
        whole: dict[str, Any] = {}
        if any(loops.values()):
            whole["iterations"] = {name: state for name, state in loops.items() if state}
        if self.steps.names:
            whole["steps"] = self.steps.as_json()
        return whole
