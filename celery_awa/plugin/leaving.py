"""Runs in the process that executes the task, on the task's thread: attempts that go on later.

An interruption, a snooze and a wait end the attempt, not the run, and count neither as a failure
nor as a retry. The row is written first; then the message goes out again under its id, at once and
past the task's class. If that fails, the job is unsent, and the next pass of a rescuer sends it.
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any, NoReturn

from celery.exceptions import Ignore, Reject

from ..errors import NotInAttempt
from ..model import Ended, JobState, StopReason, Transition
from ..resume.stops import Park, Snooze, Stop
from ..runtime.attempt import Attempt
from ..runtime.ending import error_text
from ..runtime.trouble import logger
from . import envelope, lifecycle, message, wire
from .current import bugs_told, here, trouble
from .sending import continuing


def leave(task: Any, request: Any, attempt: Attempt, stop: Stop) -> NoReturn:
    """End the attempt as it was stopped; raises Celery's Ignore, since there is no result yet."""
    reason = getattr(stop, "reason", None)
    if reason is StopReason.LEASE_LOST:
        raise Ignore(f"celery-awa: task {attempt.task_id} has a newer attempt, or ended")
    if reason is StopReason.DEADLINE:
        # What becomes of it is its policy's to say, and a rescuer's to do.
        if here.process is not None:
            with bugs_told("an attempt past its deadline was not given up"):
                here.process.forsake(attempt)
        raise Ignore(f"celery-awa: the deadline of task {attempt.task_id} is over")
    ended = None
    with bugs_told("an attempt that stopped was not recorded"):
        ended = lifecycle.end(task, request, _transition(task, request, stop))
    if lifecycle.superseded(attempt, ended):
        raise Ignore(f"celery-awa: task {attempt.task_id} was cancelled, or has a newer attempt")
    if not isinstance(stop, Park):
        _send(task, request, attempt, ended, stop)
    logger.info("celery-awa: task %s %s", attempt.task_id, stop)
    raise Ignore(f"celery-awa: task {attempt.task_id} {stop}")


def _transition(task: Any, request: Any, stop: Stop) -> Transition:
    whole = envelope.of_begun(task, request)
    if isinstance(stop, Park):
        return Transition(
            JobState.WAITING_EXTERNAL,
            uncounted=True,
            envelope=whole,
            callback_id=stop.token,
            callback_timeout=stop.timeout,
        )
    if isinstance(stop, Snooze):
        return Transition(
            JobState.SCHEDULED, run_in=stop.seconds, unsent=True, uncounted=True, envelope=whole
        )
    return Transition(JobState.AVAILABLE, unsent=True, uncounted=True, envelope=whole)


def _send(task: Any, request: Any, attempt: Attempt, ended: Ended | None, stop: Stop) -> None:
    run = attempt.run_token or (ended.run_token if ended else None)
    lease = attempt.lease or (ended.lease if ended else None)
    eta = None
    if isinstance(stop, Snooze) and stop.seconds > 0:
        eta = datetime.now(timezone.utc) + timedelta(seconds=stop.seconds)
    try:
        kept = wire.begun(task, request)
        run = run or message.headers_of(request).get(message.RUN)
        here.publish(task.app, continuing(kept, run, lease.run_lease if lease else None, eta))
    except Exception as exc:
        trouble.warn(
            "publish",
            "celery-awa: the message of task %s cannot be sent now, a rescuer will: %s",
            attempt.task_id,
            error_text(exc),
        )
        if ended is None:  # nor does a row hold it: the broker's own copy is all there is
            raise Reject(exc, requeue=True) from exc
        return
    if ended is not None and ended.lease is not None and here.process is not None:
        # The message is out: whatever happens here, the task must not hear of it.
        with bugs_told("a message that was sent still counts as unsent"):
            here.process.sent(ended.lease)


def again_in_memory(attempt: Attempt, stop: Stop) -> None:
    """In eager mode the attempt goes on at once, from its checkpoint, as an eager retry does."""
    if isinstance(stop, Park):
        raise NotInAttempt("wait_for_callback: nobody can call back in eager mode") from None
    attempt.resumption = None
    attempt.start_from(attempt.buffer.value())
