"""Runs wherever a task does: what a task reports, and what it is told."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..model import StopReason
from ..progress import ProgressBuffer
from ..progress_brief import UNSET, Unset
from ..runtime.attempt import Attempt, check_timeout
from ..runtime.checkpoint import check_keys
from . import lifecycle
from .current import current_attempt

NOTHING: Mapping[str, Any] = MappingProxyType({})


class Reporting:
    """The part of :class:`~celery_awa.AwaMixin` that reports, reads and flushes.

    Outside an attempt reporting checks its input and does nothing, and ``checkpoint`` is empty.
    """

    @property
    def attempt(self) -> Attempt | None:
        """The running attempt, a handle for other threads; None outside one."""
        return self._awa_attempt()

    @property
    def should_stop(self) -> bool:
        """Whether this attempt is asked to stop; ``stop_reason`` says why.

        Cheap and without I/O: look between two steps of the work. Nobody stops an attempt that
        does not look. False outside an attempt and in eager mode.
        """
        return self.stop_reason is not None

    @property
    def stop_reason(self) -> StopReason | None:
        """Why this attempt is asked to stop, the gravest reason first; None: it is not.

        LEASE_LOST: a newer attempt has the job, or it has ended; whatever this one returns is
        dropped. CANCEL: somebody asked for the job's cancellation. DEADLINE: it has run for
        longer than ``deadline``. WORKER_STOPPING: its worker is shutting down. MAX_RUNTIME: it has
        run for longer than ``max_runtime``. The first two come with the answer to a heartbeat.
        None outside an attempt and in eager mode.
        """
        attempt = self._awa_attempt()
        return None if attempt is None else attempt.stop_reason

    @property
    def progress(self) -> dict[str, Any] | None:
        """The progress as it is now, a copy; None if nothing was ever reported.

        Keys where set: ``percent``, ``message``, ``current``, ``total``, ``metadata``. Before
        this attempt has its row, reading waits for it: StoreUnavailable after 5 seconds,
        LeaseLost if a newer attempt has the task.
        """
        attempt = self._awa_attempt()
        return None if attempt is None else attempt.progress

    @property
    def checkpoint(self) -> Mapping[str, Any]:
        """What earlier attempts of this run left; read-only, empty in a new run.

        That is what ``update_metadata`` and ``checkpoint_in`` were given, and under keys that begin
        with ``awa`` what loops and steps keep. Waits and raises as ``progress`` does.
        """
        attempt = self._awa_attempt()
        return NOTHING if attempt is None else attempt.checkpoint

    def set_progress(
        self,
        percent: float | Unset | None = UNSET,
        message: str | None = None,
        *,
        current: float | None = None,
        total: float | None = None,
    ) -> None:
        """Report how far the work is. Sends nothing and never waits.

        ``percent``: int or float, clamped to 0–100 and rounded down; None: unknown. Left out, it
        is computed from ``current`` and ``total``, which are kept beside it. ``message``: what
        is being done; None removes it. All four are replaced as a whole. Raises InvalidProgress,
        and ProgressTooLarge for a snapshot above ``awa_max_progress_bytes``; then nothing has
        changed.
        """
        attempt = self._awa_attempt()
        buffer = ProgressBuffer() if attempt is None else attempt.buffer
        buffer.set_progress(percent, message, current=current, total=total)

    def update_metadata(self, values: Mapping[str, Any]) -> None:
        """Merge into the checkpoint that the next attempt finds. Sends nothing and never waits.

        A mapping with text keys, merged at the top level; nested values are replaced, None is
        kept. docs/progress.md lists what values may be. Raises InvalidProgress and
        ProgressTooLarge; then nothing has changed.
        """
        attempt = self._awa_attempt()
        if attempt is None:
            check_keys(values)
            ProgressBuffer().update_metadata(values)
        else:
            attempt.update_metadata(values)

    def flush_progress(self, timeout: float = 5.0) -> bool:
        """Write what was reported now and wait until the database has confirmed it.

        True: the next attempt will read this, or something newer. False: this attempt has lost
        its lease. Raises StoreUnavailable if that cannot be told within ``timeout`` seconds, and
        InvalidProgress for a timeout that is not a number above 0.
        """
        attempt = self._awa_attempt()
        if attempt is None:
            check_timeout(timeout)
            return True
        lifecycle.settle(attempt, ends=False)
        return attempt.flush_progress(timeout)

    def _awa_attempt(self) -> Attempt | None:
        """The attempt of this very task; the outer one's is not a nested task's to report to."""
        attempt = current_attempt()
        if attempt is None or attempt.owner is not self:
            return None
        return attempt
