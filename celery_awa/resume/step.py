"""A named part of a task's work that is done once, however many attempts it takes."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .iteration import Iteration
    from .resumption import Resumption


class Step:
    """``with self.step("load") as step:`` in a task; see :meth:`celery_awa.AwaMixin.step`."""

    def __init__(self, resumption: Resumption, name: str) -> None:
        self.name = name
        self._resumption = resumption
        self._todo: bool | None = None
        self._asked = False

    @property
    def todo(self) -> bool:
        """Whether the step is still to be done; False once it is finished."""
        self._inside()
        self._asked = True
        return bool(self._todo)

    @property
    def cursor(self) -> Any:
        """What ``set_cursor`` kept last; None at first, and once the step is finished."""
        self._inside()
        return self._resumption.cursor() if self._todo else None

    def set_cursor(self, value: Any) -> None:
        """Keep how far the step is, as a JSON value; the task stops here if it is asked to.

        Raises InvalidProgress and ProgressTooLarge for what cannot be kept, RuntimeError in a step
        that is finished.
        """
        self._inside()
        if not self._todo:
            raise RuntimeError(f"step {self.name!r} is finished: ask step.todo first")
        self._resumption.set_cursor(value)

    def iterate(self, source: Any, **options: Any) -> Iteration:
        """As the task's ``iterate``, with a cursor of this step; yields nothing once finished."""
        self._inside()
        self._asked = True
        loop = self._resumption.iterate(source, **options)
        if not self._todo:
            loop.close()
        return loop

    def __enter__(self) -> Step:
        self._todo = self._resumption.enter(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None and not self._asked:
            self._resumption.leave(self, finished=False)
            raise RuntimeError(
                f"step {self.name!r} did not ask whether it is to be done: Python cannot skip a "
                "with block, so put its work under `if step.todo:`, or loop over step.iterate()"
            )
        self._resumption.leave(self, finished=error is None and bool(self._todo))

    def _inside(self) -> None:
        if self._todo is None:
            raise RuntimeError(f"step {self.name!r} was not entered: use it in a with statement")
