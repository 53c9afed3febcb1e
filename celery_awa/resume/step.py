"""A named part of a task's work that is done once, however many attempts the run takes."""

from __future__ import annotations

import json
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..progress import DEFAULT_LIMIT
from ..progress_values import encode_pairs
from .options import LoopOptions

if TYPE_CHECKING:
    from .iteration import Iteration
    from .resumption import Resumption


class Step:
    """``with self.step("load") as step:`` in a task; see ``AwaMixin.step``."""

    def __init__(self, resumption: Resumption, name: str) -> None:
        self.name = name
        self._resumption = resumption
        self._todo: bool | None = None
        self._asked = False
        self._cursor: Any = None

    @property
    def todo(self) -> bool:
        """Whether the step is still to be done; False once it is finished."""
        self._asked = True
        return self._inside()

    @property
    def cursor(self) -> Any:
        """What ``set_cursor`` kept last, as JSON has it; None if nothing, or once finished."""
        self._inside()
        return self._cursor

    def set_cursor(self, value: Any) -> None:
        """Keep how far the step is; the task stops here by itself if ``should_stop`` is true.

        ``value``: what ``update_metadata`` takes, written down at the call. Raises InvalidProgress
        and ProgressTooLarge, then nothing was changed; RuntimeError once the step is finished.
        """
        if not self._inside():
            raise RuntimeError(f"step {self.name!r} is finished: ask step.todo first")
        pair = encode_pairs({"cursor": value}, DEFAULT_LIMIT)["cursor"]
        cursor = json.loads(f"{{{pair}}}")["cursor"]
        resumption = self._resumption
        if resumption.attempt is not None:
            resumption.change_steps(replace(resumption.steps, cursor=cursor))
            resumption.advanced = resumption.advanced or cursor != self._cursor
        self._cursor = cursor
        resumption.look_for_stop()

    def iterate(self, source: Any, **options: Any) -> Iteration:
        """As the task's ``iterate``, same options; yields nothing once the step is finished."""
        todo = self._inside()
        self._asked = True
        return self._resumption.loop(source, LoopOptions(**options), self.name, todo=todo)

    def __enter__(self) -> Step:
        self._todo = self._resumption.meet(self)
        self._cursor = self._resumption.steps.cursor if self._todo else None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        todo, self._todo = self._todo, None
        self._resumption.open_step = None
        if error is not None or not todo:
            return
        if not self._asked:
            raise RuntimeError(
                f"step {self.name!r} did not ask whether it is to be done: Python cannot skip a "
                "with block, so put its work under `if step.todo:`, or loop over step.iterate()"
            )
        self._resumption.finish(self)

    def _inside(self) -> bool:
        if self._todo is None:
            raise RuntimeError(f"step {self.name!r} is asked outside its with block")
        return self._todo
