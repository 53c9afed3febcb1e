"""Runs in pool child and worker, in whichever thread Celery sends from: Celery's life cycle, ours.

Each receiver names a guarded, repeatable transition. Celery swallows and logs what a receiver
raises; ours tell it as every other trouble of ours is told.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from celery import current_app, signals, states
from celery.exceptions import Reject

from ..model import JobState, Transition
from ..runtime.ending import error_text
from ..runtime.trouble import logger
from . import aborted, checks, lifecycle, publish, start, verdict
from .bootstep import HeartbeatStep
from .current import attempt_of, bugs_told, here, is_ours, trouble


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
    failure = _failure_of_celery(request)
    if failure is not None and (attempt is None or not attempt.ended):
        _leave_without_signal(task, request, failure)
    elif attempt is not None and not attempt.ended:
        _leave(task, request, state)
    lifecycle.let_go(request, retried=state == states.RETRY)
    aborted.forget(request.id)


def _failure_of_celery(request: Any) -> Exception | None:
    """What strikes Celery's own steps around the body: a result backend that is away, a hook.

    Then it sends no signal but this one, while the exception passes. MemoryError ends a pool
    child, which is its worker's to judge.
    """
    passing = sys.exc_info()[1]
    if request.is_eager or isinstance(passing, MemoryError) or not isinstance(passing, Exception):
        return None
    return passing


def _leave_without_signal(task: Any, request: Any, failure: Exception) -> None:
    if isinstance(failure, Reject) and failure.requeue:
        lifecycle.end_whole(task, request, JobState.AVAILABLE, unsent=True)
        return
    # As Celery takes it, also where the body had returned. To be told, if nobody could be.
    error = getattr(request, "awa_error", None) or error_text(failure)
    lifecycle.end_whole(task, request, JobState.FAILED, error, unsent=True)


def _leave(task: Any, request: Any, state: str | None) -> None:
    error = getattr(request, "awa_error", None)
    if state == states.IGNORED:
        lifecycle.end_whole(task, request, JobState.CANCELLED)
    elif state == states.REJECTED and getattr(request, "awa_requeue", False):
        lifecycle.end_whole(task, request, JobState.AVAILABLE, unsent=True)
    elif state in (states.REJECTED, states.FAILURE):
        lifecycle.end_whole(task, request, JobState.FAILED, error)
    elif state == states.SUCCESS:
        # A time limit that struck in our receiver, say: nobody else would end it any more.
        lifecycle.end(task, request, Transition(JobState.COMPLETED))
    elif state is None and not here.is_child:
        aborted.end(task, request)


def on_process_init(**_: Any) -> None:
    """In a pool child, before its first task."""
    try:
        start.start_child(current_app._get_current_object())
    except Exception as exc:
        trouble.warn("bug", "celery-awa: a pool child goes without it", exc_info=exc)


def on_process_shutdown(**_: Any) -> None:
    """In a pool child that leaves in order."""
    start.stop_child()


def on_worker_shutting_down(**_: Any) -> None:
    """In a worker, in the handler of the signal that stops it: attempts may look for this."""
    with bugs_told("no attempt knows that its worker stops"):
        start.worker_stopping()


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
    (signals.worker_shutting_down, on_worker_shutting_down),
    (signals.task_success, on_success),
    (signals.task_failure, on_failure),
    (signals.task_retry, on_retry),
    (signals.task_revoked, on_revoked),
    (signals.task_postrun, on_postrun),
    (signals.before_task_publish, publish.name_run),
)
