"""Runs in the process that executes the task, on the task's thread: attempts that go on later.

An interruption, a snooze and a wait end the attempt, not the run, and count neither as a failure
nor as a retry. The row is written first; then the message goes out again under its id, at once and
past the task's class. If that fails, the job is unsent, and the next pass of a rescuer sends it.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any, NoReturn, TypeVar

from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded

from ..errors import NotInAttempt, Unsendable
from ..model import Ended, Envelope, JobState, StopReason, Transition
from ..resume.stops import Park, Snooze, Stop
from ..runtime.attempt import Attempt
from ..runtime.ending import error_text
from ..runtime.trouble import logger
from . import envelope, lifecycle, wire
from .current import bugs_told, here, trouble
from .sending import continuing

T = TypeVar("T")

#: So often may a task in eager mode leave off: there it goes on at once, and a task that waits for
#: something outside would never end.
MOST_IN_MEMORY = 100


def leave(task: Any, request: Any, attempt: Attempt, stop: Stop) -> NoReturn:
    """End the attempt as it was stopped; raises Celery's Ignore, since there is no result yet."""
    _unstruck(lambda: lifecycle.settle(attempt))
    if stop.reason is StopReason.LEASE_LOST:
        raise Ignore(f"celery-awa: task {attempt.task_id} has a newer attempt, or ended")
    if stop.reason is StopReason.DEADLINE:
        _unstruck(lambda: _forsake(attempt))
        raise Ignore(f"celery-awa: the deadline of task {attempt.task_id} is over")
    kept = _unstruck(lambda: _message(task, request))
    transition = _transition(stop, envelope.of_message(task, request, kept))
    ended = _unstruck(lambda: _end(task, request, transition))
    if lifecycle.superseded(attempt, ended):
        raise Ignore(f"celery-awa: task {attempt.task_id} was cancelled, or has a newer attempt")
    if not isinstance(stop, Park):
        _unstruck(lambda: _send(task, request, attempt, ended, stop, kept))
        attempt.ended = True  # whatever became of the row: its message is out, nothing cancels it
    logger.info("celery-awa: task %s %s", attempt.task_id, stop)
    raise Ignore(f"celery-awa: task {attempt.task_id} {stop}")


def _unstruck(step: Callable[[], T]) -> T:
    """Take a step, again if a time limit strikes in it: that was the body's, which is over.

    Each step is bounded, and may be taken twice.
    """
    try:
        return step()
    except SoftTimeLimitExceeded:
        return step()


def _forsake(attempt: Attempt) -> None:
    # What becomes of it is its policy's to say, and a rescuer's to do.
    if here.process is not None:
        with bugs_told("an attempt past its deadline was not given up"):
            here.process.forsake(attempt)


def _message(task: Any, request: Any) -> wire.Message | None:
    made = None
    with bugs_told("the message of a task that goes on later cannot be made"):
        made = wire.begun(task, request)
    return made  # noqa: RET504  # what it raises goes no further


def _end(task: Any, request: Any, transition: Transition) -> Ended | None:
    ended = None
    with bugs_told("an attempt that stopped was not recorded"):
        ended = lifecycle.end(task, request, transition)
    return ended  # noqa: RET504  # as in _message


def _transition(stop: Stop, whole: Envelope | None) -> Transition:
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


def _send(
    task: Any,
    request: Any,
    attempt: Attempt,
    ended: Ended | None,
    stop: Stop,
    kept: wire.Message | None,
) -> None:
    run, lease = lifecycle.continued_by(request, attempt, ended)
    eta = None
    if isinstance(stop, Snooze) and stop.seconds > 0:
        eta = datetime.now(timezone.utc) + timedelta(seconds=stop.seconds)
    try:
        if kept is None:
            raise Unsendable("its message cannot be made")
        here.publish(task.app, continuing(kept, run, lease, eta))
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
        # The message is out: whatever happens here, the task must not hear of it. Where the end is
        # not known yet, it is sent once more when that is written: the first copy may come too
        # early to be taken for the next of the run.
        with bugs_told("a message that was sent still counts as unsent"):
            here.process.sent(ended.lease)


def again_in_memory(attempt: Attempt, stop: Stop, times: int) -> None:
    """In eager mode the attempt goes on at once, from its checkpoint, as an eager retry does."""
    if isinstance(stop, Park):
        raise NotInAttempt("wait_for_callback: nobody can call back in eager mode") from None
    if times > MOST_IN_MEMORY:
        raise NotInAttempt(
            f"it left off {MOST_IN_MEMORY} times; in eager mode it goes on at once, without a wait"
        ) from None
    attempt.resumption = None
    attempt.start_from(attempt.buffer.value())
