"""What loops and steps ask of the attempt that they run in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ..model import StopReason
from ..progress_brief import UNSET, Unset


class Resumable(Protocol):
    """An attempt, as loops and steps see it; all of it is called on the task's thread."""

    #: For celery_awa.testing: called after each finished piece of a loop with the loop's name and
    #: how many items it has done in this attempt. True: keep, and look for a stop, now. Where it is
    #: set, no checkpoint falls due by the clock.
    on_item: Callable[[str, int], bool] | None
    #: The same, after each finished step, with its name.
    on_step: Callable[[str], None] | None

    @property
    def checkpoint(self) -> Mapping[str, Any]:
        """The metadata that this attempt began with; may wait, StoreUnavailable and LeaseLost."""
        ...

    @property
    def committed(self) -> Mapping[str, Any]:
        """Of the checkpoint what was committed in the task's own transactions; waits as well."""
        ...

    @property
    def stop_reason(self) -> StopReason | None:
        """Why the attempt is asked to stop; None: it is not."""
        ...

    def keep(self, state: Mapping[str, Any]) -> None:
        """Replace what loops and steps keep. Costs microseconds.

        Raises InvalidProgress and ProgressTooLarge; then nothing was changed.
        """
        ...

    def report(
        self,
        *,
        current: float,
        total: float | None,
        percent: float | Unset | None = UNSET,
        message: str | None = None,
        rate: float | None = None,
    ) -> None:
        """Report how far the loop is; ``rate``: of ``current``, a second."""
        ...

    def commit(self, connection: Any, values: Mapping[str, Any]) -> None:
        """Write into the checkpoint in the caller's open transaction."""
        ...
