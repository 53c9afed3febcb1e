"""Runs wherever a task does: what a task author sees.

``AwaMixin`` holds everything and calls super throughout, so it goes first among the bases.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from celery import Task
from celery.exceptions import Ignore, Retry

from ..resume.stops import Stop
from ..runtime.attempt import Attempt
from . import leaving, lifecycle, options, retrying, signals, verdict
from .current import attempt_of, running
from .resuming import Resuming

#: Seconds after which a task that newer code has left is looked at again.
_UNTIL_NEWER = 30.0


class AwaMixin(Resuming):
    """Progress and checkpoints for a Celery task class; goes first among its bases.

    Outside an attempt (a direct or nested call, no worker) reporting checks its input and does
    nothing, ``checkpoint`` is empty, and loops and steps just run.
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

    #: Seconds after which an attempt is asked to make way for others: ``iterate`` and ``step`` stop
    #: at their next checkpoint, and the task is sent again. None: as long as it likes.
    max_runtime: float | None = None

    #: Seconds without any report after which a running attempt counts as stalled; None: never. At
    #: least two heartbeats make sense, since reports are written in batches.
    stall_after: float | None = None

    #: What becomes of a stalled attempt: "show" flags it in reads; "stop" takes its job away as
    #: ``deadline`` does, and ``lost_policy`` says what follows.
    stall_policy: str = "show"

    #: The version of what this code keeps in its checkpoint. One of another version is handed to
    #: ``migrate_checkpoint``. Raise it when loops, steps or keys change their meaning.
    checkpoint_version: int = 0

    def migrate_checkpoint(
        self, metadata: dict[str, Any], version: int
    ) -> Mapping[str, Any] | None:
        """Make the checkpoint that code of another ``version`` left fit; yours to override.

        Called on the task's thread before its body, with a copy. What it returns is the checkpoint;
        None discards it. Keys that begin with ``awa`` hold loops and steps: leave them out to begin
        those anew. By default an older version's is discarded, and before a newer one's the task
        snoozes, since in a deploy a worker with newer code will take it.
        """
        if version > self.checkpoint_version:
            self.snooze(_UNTIL_NEWER)
        return None

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
                attempt.migrate()
                result = self._awa_body(attempt, args, kwargs)
        except Stop as stop:
            leaving.leave(self, request, attempt, stop)
        except BaseException as exc:
            lifecycle.settle(attempt)
            lifecycle.note_raised(request, exc)
            if isinstance(exc, Exception) and not isinstance(exc, Retry):
                lifecycle.refuse_if_lost(attempt, exc)
            raise
        lifecycle.refuse_if_lost(attempt)
        return result

    def _awa_body(self, attempt: Attempt, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        request = self.request  # type: ignore[attr-defined]  # celery.Task's
        call = super().__call__  # type: ignore[misc]  # see on_bound
        if getattr(call, "__func__", None) is Task.__call__:
            # Celery's own would push a second, empty request where its worker has not patched it
            # (eager mode). Marked as its patch marks it, so that a nested call still gets its own.
            request._protected = 1
            call = self.run  # type: ignore[attr-defined]  # celery.Task's
        times = 0
        while True:
            try:
                return call(*args, **kwargs)
            except Stop as stop:
                if not request.is_eager:
                    raise
                lifecycle.settle(attempt)
                times += 1
                leaving.again_in_memory(attempt, stop, times)

    def retry(self, *args: Any, **kwargs: Any) -> Any:
        """Celery's ``retry``; the row is written before its message is published."""
        attempt = attempt_of(self.request)  # type: ignore[attr-defined]  # celery.Task's
        if attempt is None:
            return super().retry(*args, **kwargs)  # type: ignore[misc]  # see on_bound
        lifecycle.settle(attempt)
        if self.request.is_eager:  # type: ignore[attr-defined]  # celery.Task's
            lifecycle.keep_for_eager_retry(attempt)
            return super().retry(*args, **kwargs)  # type: ignore[misc]  # see on_bound
        retry = retrying.Retrying(self, attempt, kwargs.get("exc") or sys.exc_info()[1])
        setattr(self.request, retrying.CONTINUING, retry)  # type: ignore[attr-defined]  # celery.Task's
        with retrying.publish_failure_kept(retry):
            return super().retry(*args, **kwargs)  # type: ignore[misc]  # see on_bound

    def signature_from_request(self, request: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Celery's, whose message is published through us where ``retry`` asks for it."""
        signature = super().signature_from_request(request, *args, **kwargs)  # type: ignore[misc]  # see on_bound
        lost = verdict.deciding()
        if lost is not None:
            return lost.awa_continue(signature)
        return retrying.continue_run(self, request, signature)

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


class AwaTask(AwaMixin, Task):  # type: ignore[misc]  # celery ships no types
    """A Celery task with progress and checkpoints: ``@app.task(base=AwaTask, bind=True)``."""

    abstract = True
