"""Runs in pool child and worker, in whichever thread Celery sends from: Celery's life cycle, ours.

Each receiver names a guarded, repeatable transition. Celery swallows and logs what a receiver
raises; ours tell it as every other trouble of ours is told.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from celery import current_app, signals, states

from ..model import JobState, Transition
from ..runtime.ending import error_text
from ..runtime.trouble import logger
from . import checks, lifecycle, publish, start, verdict
from .bootstep import HeartbeatStep
from .current import attempt_of, here, is_ours, trouble


def connect() -> None:
    """Listen to Celery, once a process; every task class of ours asks for it."""
    for signal, receiver in _RECEIVERS:
        signal.connect(receiver, weak=False, dispatch_uid=f"celery-awa {receiver.__name__}")


def quiet(receiver: Callable[..., None]) -> Callable[..., None]:
    """A receiver of ours, for our tasks only, whose bugs stay ours."""

    @functools.wraps(receiver)
    def guarded(sender: Any = None, **kwargs: Any) -> None:
        try:
            if is_ours(sender):
                receiver(sender, **kwargs)
        except Exception as exc:
            trouble.warn("bug", "celery-awa: %s failed", receiver.__name__, exc_info=exc)

    return guarded


@quiet
def on_success(task: Any, /, **_: Any) -> None:
    """In the executing process, after Celery stored the result."""
    lifecycle.end(task, task.request, Transition(JobState.COMPLETED))


@quiet
def on_failure(task: Any, /, exception: Any = None, **_: Any) -> None:
    """In the executing process; in a prefork worker for what its child could not end."""
    if verdict.deciding() is not None:
        verdict.failed(exception)
    else:
        lifecycle.end_whole(task, task.request, JobState.FAILED, error_text(exception))


@quiet
def on_retry(task: Any, /, request: Any = None, reason: Any = None, **_: Any) -> None:
    """Confirms what ``retry`` did before it published; a Retry raised by hand lands here."""
    if attempt_of(request) is not None:
        error = error_text(reason.exc) if getattr(reason, "exc", None) else None
        lifecycle.end_whole(task, request, JobState.RETRYABLE, error)


@quiet
def on_revoked(task: Any, /, request: Any = None, terminated: bool = False, **_: Any) -> None:
    """In the worker: before the start, at expiry, or while a child is being terminated."""
    verdict.revoked(task, request, terminated=terminated)


@quiet
def on_postrun(task: Any, /, state: str | None = None, **_: Any) -> None:
    """In the executing process: the last thing that always runs while Python unwinds."""
    request = task.request
    attempt = attempt_of(request)
    if attempt is not None and not attempt.ended:
        _leave(task, request, state)
    lifecycle.let_go(request, retried=state == states.RETRY)


def _leave(task: Any, request: Any, state: str | None) -> None:
    error = getattr(request, "awa_error", None)
    if state == states.IGNORED:
        lifecycle.end_whole(task, request, JobState.CANCELLED)
    elif state == states.REJECTED and getattr(request, "awa_requeue", False):
        lifecycle.end_whole(task, request, JobState.AVAILABLE, unsent=True)
    elif state == states.REJECTED:
        lifecycle.end_whole(task, request, JobState.FAILED, error)
    elif state is None and not here.is_child:
        # Aborted, and no verdict will come. With acks_late the message comes back some day.
        to = JobState.AVAILABLE if task.acks_late else JobState.FAILED
        lifecycle.end_whole(task, request, to, error or "aborted", unsent=bool(task.acks_late))


def on_process_init(**_: Any) -> None:
    """In a pool child, before its first task."""
    try:
        start.start_child(current_app._get_current_object())
    except Exception as exc:
        trouble.warn("bug", "celery-awa: a pool child goes without it", exc_info=exc)


def on_process_shutdown(**_: Any) -> None:
    """In a pool child that leaves in order."""
    start.stop_child()


def on_worker_ready(sender: Any = None, **_: Any) -> None:
    """In a worker: tasks of ours whose worker has no step of ours."""
    names = sorted(task.name for task in checks.our_tasks(sender.app))
    if names and not checks.has_step(sender.app, HeartbeatStep):
        logger.warning(
            "celery-awa is not installed in this worker, so reports of %s are in vain: "
            "call celery_awa.install(app) where the app is made",
            ", ".join(names),
        )


_RECEIVERS = (
    (signals.worker_process_init, on_process_init),
    (signals.worker_process_shutdown, on_process_shutdown),
    (signals.worker_ready, on_worker_ready),
    (signals.task_success, on_success),
    (signals.task_failure, on_failure),
    (signals.task_retry, on_retry),
    (signals.task_revoked, on_revoked),
    (signals.task_postrun, on_postrun),
    (signals.before_task_publish, publish.name_run),
)
