"""Runs wherever a task does: what a task author sees.

``AwaMixin`` holds everything and calls super throughout, so it goes first among the bases.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from celery import Task
from celery.exceptions import Ignore, Retry

from ..model import StopReason
from ..progress import ProgressBuffer
from ..progress_brief import UNSET, Unset
from ..runtime.attempt import Attempt, check_timeout
from . import lifecycle, options, signals, verdict
from .current import attempt_of, current_attempt, running

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class AwaMixin:
    """Progress and checkpoints for a Celery task class; goes first among its bases.

    Outside an attempt (a direct or nested call, no worker) reporting checks its input and does
    nothing, and ``checkpoint`` is empty.
    """

    #: Marks the classes of ours, through proxies too.
    awa_task = True

    #: What becomes of a task whose worker died, where Celery gave no verdict: "requeue" sends it
    #: again, "fail" fails it. None: "requeue" where ``acks_late``, which is Celery's own word for
    #: "safe to run twice", else "fail".
    lost_policy: str | None = None

    #: How often it is sent again without having advanced, which is a change of its checkpoint.
    #: Then it fails. A run is sent again 20 times in all, whatever its checkpoint says.
    max_rescues: int = 3

    #: Seconds that one attempt may run; None: as long as it likes. An attempt that runs for
    #: longer is asked to stop, loses its job and is treated by ``lost_policy``. It is not killed.
    deadline: float | None = None

    @classmethod
    def on_bound(cls, app: Any) -> None:
        """Raises SettingsError for an option with a value that is not allowed."""
        super().on_bound(app)  # type: ignore[misc]  # celery.Task comes after us in the MRO
        options.check(cls)
        signals.connect()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        attempt = lifecycle.begin(self)
        if attempt is None:
            with running(None):
                return super().__call__(*args, **kwargs)  # type: ignore[misc]  # see on_bound
        request = self.request  # type: ignore[attr-defined]  # celery.Task's
        try:
            with running(attempt):
                result = self._awa_body(request, args, kwargs)
        except Exception as exc:
            lifecycle.note_raised(request, exc)
            if not isinstance(exc, Retry):
                lifecycle.refuse_if_lost(attempt, exc)
            raise
        except BaseException as exc:
            lifecycle.note_raised(request, exc)
            raise
        lifecycle.refuse_if_lost(attempt)
        return result

    def _awa_body(self, request: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = super().__call__  # type: ignore[misc]  # see on_bound
        if getattr(call, "__func__", None) is not Task.__call__:
            return call(*args, **kwargs)
        # Celery's own would push a second, empty request where its worker has not patched it
        # (eager mode). Marked as its patch marks it, so that a nested call still gets its own.
        request._protected = 1
        return self.run(*args, **kwargs)  # type: ignore[attr-defined]  # celery.Task's

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
        longer than ``deadline``. WORKER_STOPPING: its worker is shutting down. The first two come
        with the answer to a heartbeat. None outside an attempt and in eager mode.
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
        """What earlier attempts of this run left through ``update_metadata``; read-only.

        Empty in a new run. Waits and raises as ``progress`` does.
        """
        attempt = self._awa_attempt()
        return _NOTHING if attempt is None else attempt.checkpoint

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
        buffer = ProgressBuffer() if attempt is None else attempt.buffer
        buffer.update_metadata(values)

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
        return attempt.flush_progress(timeout)

    def retry(self, *args: Any, **kwargs: Any) -> Any:
        """Celery's ``retry``; the row is written before its message is published."""
        attempt = attempt_of(self.request)  # type: ignore[attr-defined]  # celery.Task's
        if attempt is None:
            return super().retry(*args, **kwargs)  # type: ignore[misc]  # see on_bound
        if self.request.is_eager:  # type: ignore[attr-defined]  # celery.Task's
            lifecycle.keep_for_eager_retry(attempt)
            return super().retry(*args, **kwargs)  # type: ignore[misc]  # see on_bound
        retrying = lifecycle.Retrying(self, attempt, kwargs.get("exc") or sys.exc_info()[1])
        setattr(self.request, lifecycle.CONTINUING, retrying)  # type: ignore[attr-defined]  # celery.Task's
        with lifecycle.publish_failure_kept(retrying):
            return super().retry(*args, **kwargs)  # type: ignore[misc]  # see on_bound

    def signature_from_request(self, request: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Celery's, whose message is published through us where ``retry`` asks for it."""
        signature = super().signature_from_request(request, *args, **kwargs)  # type: ignore[misc]  # see on_bound
        lost = verdict.deciding()
        if lost is not None:
            return lost.awa_continue(signature)
        return lifecycle.continue_run(self, request, signature)

    def on_replace(self, sig: Any) -> Any:
        """Celery's, which publishes the replacement; our row goes first."""
        attempt = attempt_of(self.request)  # type: ignore[attr-defined]  # celery.Task's
        if attempt is None or self.request.is_eager:  # type: ignore[attr-defined]  # celery.Task's
            return super().on_replace(sig)  # type: ignore[misc]  # see on_bound
        lifecycle.before_replace(self, attempt)
        try:
            return super().on_replace(sig)  # type: ignore[misc]  # see on_bound
        except Ignore:
            raise
        except BaseException:
            lifecycle.replace_failed(attempt)
            raise

    def _awa_attempt(self) -> Attempt | None:
        """The attempt of this very task; the outer one's is not a nested task's to report to."""
        attempt = current_attempt()
        if attempt is None or attempt.owner is not self:
            return None
        return attempt


class AwaTask(AwaMixin, Task):  # type: ignore[misc]  # celery ships no types
    """A Celery task with progress and checkpoints: ``@app.task(base=AwaTask, bind=True)``."""

    abstract = True
