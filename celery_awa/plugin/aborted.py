"""Runs in workers without pool children, on the task's thread: attempts that were cut off.

SystemExit in the body, a greenlet that was killed, gevent's hard time limit. Celery keeps no
trace of most of these: no result, and in the greenlet pools the message is acknowledged as if the
task had succeeded. So what becomes of the job is ours to say. Pool children are not meant here:
their worker hears Celery's verdict.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from ..model import JobState
from . import envelope, lifecycle
from .current import attempt_of, here

STOPPED = "WorkerLostError: the worker was stopped while the task ran"


class CutOff(Enum):
    """Why Celery cuts an attempt off."""

    TERMINATED = "revoke(terminate=True)"
    STOPPED = "cold stop, or the connection to the broker lost"


#: What Celery is about to cut off, by task id.
_announced: dict[str, CutOff] = {}


def announce(task_id: str, why: CutOff) -> bool:
    """Celery is about to cut off the task's attempt, if its pool can; whether it runs here."""
    here_too = here.process is not None and any(
        attempt.task_id == task_id for attempt in here.process.in_flight.all()
    )
    if here_too:
        _announced[task_id] = why
    return here_too


def forget(task_id: str) -> None:
    """The attempt is over; it may have ended as if nobody had wanted to cut it off."""
    _announced.pop(task_id, None)


def end(task: Any, request: Any) -> None:
    """End an attempt that was cut off."""
    why = _announced.get(request.id)
    error = getattr(request, "awa_error", None) or "aborted"
    requeue = envelope.lost_policy(task) == "requeue"
    if why is CutOff.TERMINATED:
        lifecycle.end_whole(task, request, JobState.CANCELLED)
    elif getattr(request, "awa_timed_out", False) and _has_time_limit(task, request):
        lifecycle.end_whole(task, request, JobState.FAILED, error)
    elif why is CutOff.STOPPED and (requeue or task.acks_late):
        lifecycle.end_whole(task, request, JobState.AVAILABLE, unsent=True)
    elif why is CutOff.STOPPED:
        lifecycle.end_whole(task, request, JobState.FAILED, STOPPED, unsent=True)
    elif requeue:
        # Counted as a rescue, so that a task which always does this is not sent for ever.
        _forsake(request)
    else:
        # The result backend is told: the caller would wait for ever.
        lifecycle.end_whole(task, request, JobState.FAILED, error, unsent=True)


def _has_time_limit(task: Any, request: Any) -> bool:
    """Whether Celery hears of the timeout: then it stores the failure itself."""
    limit, _ = request.timelimit or (None, None)
    return bool(limit or task.time_limit or here.time_limit)


def _forsake(request: Any) -> None:
    attempt = attempt_of(request)
    if here.process is not None and attempt is not None:
        here.process.forsake(attempt)
