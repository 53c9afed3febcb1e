"""Runs in the process that executes the task, on the task's thread: begin, end, replace.

A replacement's row goes before its message is published: Celery's signal for it comes after that,
when the next attempt may have started already (docs/adr/0005).
"""

from __future__ import annotations

import functools
from typing import Any

from celery.exceptions import Ignore, Reject

from ..model import Answer, Ended, JobState, Transition, Verdict
from ..runtime.attempt import Attempt
from ..runtime.desk import Terms
from ..runtime.ending import error_text
from ..runtime.task_process import TaskProcess
from ..runtime.trouble import logger
from ..settings import Settings
from . import envelope, message, wire
from .current import ON_REQUEST, attempt_of, bugs_told, here, is_ours

_DEFAULTS = Settings()
#: What eager attempts that are to be retried left, by task id.
_kept_by_eager: dict[str, dict[str, Any] | None] = {}


class Dropped(Ignore):  # type: ignore[misc]  # celery ships no types
    """A copy of a message that must not run: a live attempt has the job, or the run is over."""


def begin(task: Any) -> Attempt | None:
    """The attempt that this call of a task begins; None for direct and nested calls.

    Raises Dropped for a copy that must not run. Any fault of ours is told and costs the attempt
    its row only.
    """
    request = task.request_stack.top
    if request is None or request.called_directly or request.id is None:
        return None
    if attempt_of(request) is not None or not is_ours(task):
        return None
    attempt = _new_attempt(task, request)
    setattr(request, ON_REQUEST, attempt)
    if request.is_eager:
        attempt.start_from(_kept_by_eager.pop(request.id, None))
    elif here.process is not None:
        _enter(here.process, task, request, attempt)
    return attempt


def _new_attempt(task: Any, request: Any) -> Attempt:
    from_lease = message.take_from_lease(request)
    request.awa_from_lease = from_lease

    def describe(token: str) -> Any:
        return message.describe(task, request, token, from_lease=from_lease)

    process = None if request.is_eager else here.process
    settings = process.settings if process is not None else _DEFAULTS
    return Attempt(
        wire.token_of(request) or message.new_token(),
        request.id,
        describe,
        process,
        envelope=lambda: envelope.while_running(task, request),
        owner=task,
        limit=settings.max_progress_bytes,
        number=(request.retries or 0) + 1,
        terms=_terms(task, request),
    )


def _terms(task: Any, request: Any) -> Terms:
    # Nobody is asked to stop where nobody keeps what it would go on from.
    bounded = not request.is_eager and here.process is not None
    return Terms(
        deadline=task.deadline if bounded else None,
        max_runtime=task.max_runtime if bounded else None,
        version=task.checkpoint_version,
        migrate=task.migrate_checkpoint,
    )


def _enter(process: TaskProcess, task: Any, request: Any, attempt: Attempt) -> None:
    look = False
    with bugs_told("it cannot be told whether the transport flags redeliveries"):
        look = bool(task.acks_late) and not _flags_redelivery(task.app)
    with bugs_told("an attempt could not begin"):
        claim = process.settings.claim_after == 0 or _continues(request) or _is_only_copy(task)
        process.begin(attempt, claim=claim, look=look)
    if attempt.claim is not None:
        _drop_unless_yours(process, attempt, attempt.claim.verdict)


def _continues(request: Any) -> bool:
    """Whether the message is known not to be the first of its run."""
    redelivered = (request.delivery_info or {}).get("redelivered")
    return bool(request.retries or redelivered or request.awa_from_lease is not None)


def _is_only_copy(task: Any) -> bool:
    """Whether our row is to bring the task back, since the broker has forgotten its message."""
    return not task.acks_late and envelope.lost_policy(task) == "requeue"


def _drop_unless_yours(process: TaskProcess, attempt: Attempt, verdict: Verdict) -> None:
    if verdict is Verdict.YOURS:
        return
    held = verdict is Verdict.HELD
    why = "a live attempt has it" if held else "its run is over, or a newer message is awaited"
    with bugs_told("a copy that must not run was not forgotten"):
        process.end(attempt, Transition(None))  # the lease is not ours: writes nothing
        # Celery says "ignored" alone.
        logger.info("celery-awa: a copy of task %s is dropped: %s", attempt.task_id, why)
    raise Dropped(f"celery-awa: a copy of task {attempt.task_id} is dropped: {why}")


@functools.lru_cache(maxsize=8)
def _flags_redelivery(app: Any) -> bool:
    transport = app.connection_for_read().transport
    return getattr(transport, "driver_type", None) in message.FLAGS_REDELIVERY


def settle(attempt: Attempt, *, ends: bool = True) -> None:
    """Have loops and steps keep what is finished, before the attempt ends or is flushed."""
    if attempt.resumption is not None:
        with bugs_told("the last cursor was not kept"):
            attempt.resumption.settle(ends=ends)


def refuse_if_lost(attempt: Attempt, cause: BaseException | None = None) -> None:
    """After the body: an attempt whose lease is gone publishes neither result nor callbacks."""
    process = here.process
    if process is None or attempt.ended or attempt.claim is None:
        return
    owned = True
    with bugs_told("it cannot be told whether a lease is lost"):
        owned = process.owns(attempt)
    if owned:
        return
    attempt.answer(acknowledged=0, confirmed_at=0.0, lost=True)
    raise Ignore(f"celery-awa: task {attempt.task_id} has a newer attempt, or ended") from cause


def superseded(attempt: Attempt, ended: Ended | None) -> bool:
    """Whether a newer attempt or an end has the job, so that this one must publish nothing."""
    if attempt.lost and here.process is not None:
        return not here.process.owns(attempt)  # a row that was deleted reads as lost too
    return ended is not None and ended.answer is Answer.GONE


def continued_by(
    request: Any, attempt: Attempt, ended: Ended | None
) -> tuple[str | None, int | None]:
    """What the next message of a run names: the run, and the lease that it continues."""
    named = message.headers_of(request).get(message.RUN)
    run = attempt.run_token or (ended.run_token if ended else None) or named
    lease = (ended.lease if ended is not None else None) or attempt.lease
    return run, None if lease is None else lease.run_lease


def note_raised(request: Any, exc: BaseException) -> None:
    """Remember of an exception what the end of the attempt needs; not the exception itself."""
    request.awa_requeue = exc.requeue if isinstance(exc, Reject) else None
    request.awa_timed_out = _is_green_timeout(exc)
    request.awa_error = error_text(exc)


def _is_green_timeout(exc: BaseException) -> bool:
    """Whether this is what gevent cuts a greenlet off with when its time is over."""
    return any(
        (base.__module__, base.__qualname__) == ("gevent.timeout", "Timeout")
        for base in type(exc).__mro__
    )


def end(task: Any, request: Any, transition: Transition) -> Ended | None:
    """End the attempt of this request, begun or not, once; the way every signal takes."""
    process = here.process
    attempt = attempt_of(request)
    if process is None or request is None or request.id is None or request.is_eager:
        return None
    if attempt is None:
        # It ended before its body was called, for instance in a before_start hook.
        attempt = _new_attempt(task, request)
        setattr(request, ON_REQUEST, attempt)
    return process.end(attempt, transition)


def end_whole(
    task: Any, request: Any, to: JobState, error: str | None = None, *, unsent: bool = False
) -> None:
    """End an attempt otherwise than by success: with the whole envelope, so it can be sent."""
    attempt = attempt_of(request)
    if here.process is None or (attempt is not None and attempt.ended):
        return
    end(
        task,
        request,
        Transition(to, error=error, unsent=unsent, envelope=envelope.build(task, request)),
    )


def before_replace(task: Any, attempt: Attempt) -> None:
    """The row goes before the replacement is published, which may start at once under its id."""
    ended = None
    with bugs_told("the row of a replaced task was not removed"):
        ended = end(task, task.request, Transition(None))
    if superseded(attempt, ended):
        raise Ignore("celery-awa: this task has a newer attempt, or ended")


def replace_failed(attempt: Attempt) -> None:
    """The replacement was not published: this attempt goes on, and will have a row again."""
    if here.process is not None and attempt.ended:
        with bugs_told("an attempt goes on without a row"):
            here.process.reopen(attempt)


def let_go(request: Any, *, retried: bool) -> None:
    """After the last signal: break the circle of request and attempt, which holds the arguments."""
    request.__dict__.pop(ON_REQUEST, None)
    if request.is_eager and not retried:
        _kept_by_eager.pop(request.id, None)


def keep_for_eager_retry(attempt: Attempt) -> None:
    """Eager retries run in this process: hand the progress on in memory."""
    _kept_by_eager[attempt.task_id] = attempt.buffer.value()
