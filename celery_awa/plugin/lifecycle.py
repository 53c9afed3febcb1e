"""Runs in the process that executes the task, on the task's thread: begin, retry, replace, leave.

Retry and replace act before their message is published: Celery's signals for them come after
it, when the next attempt may have started already (docs/adr/0005).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any

from celery.exceptions import Ignore, Reject

from ..errors import LeaseLost
from ..model import Answer, Ended, JobState, Transition, Verdict
from ..runtime.attempt import Attempt
from ..runtime.ending import error_text
from ..runtime.task_process import TaskProcess
from ..runtime.trouble import logger
from ..settings import Settings
from . import envelope, message, wire
from .current import ON_REQUEST, attempt_of, bugs_told, here, is_ours, trouble

#: Where a request carries what publishes its continuation, for one signature.
CONTINUING = "awa_continuing"
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
        deadline=None if request.is_eager else task.deadline,
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


def continue_run(task: Any, request: Any, signature: Any) -> Any:
    """A signature made from a request: published through us if the request is being continued."""
    request = task.request if request is None else request
    continuing = request.__dict__.pop(CONTINUING, None)
    return signature if continuing is None else continuing.wrap(signature)


class Retrying:
    """One ``retry()`` of an attempt: writes its row before its message goes out."""

    def __init__(self, task: Any, attempt: Attempt, error: BaseException | None) -> None:
        self._task = task
        self._attempt = attempt
        self._error = error_text(error) if error is not None else None
        self.kept = False

    def wrap(self, signature: Any) -> Any:
        """The signature, publishing through us."""
        signature.apply_async = functools.partial(self._publish, signature, signature.apply_async)
        return signature

    def _publish(self, signature: Any, apply_async: Callable[..., Any], *a: Any, **k: Any) -> Any:
        ended = self._write(signature)
        if superseded(self._attempt, ended):
            raise LeaseLost
        self.kept = ended is not None
        name_run(self._task.request, signature, self._attempt, ended)
        result = apply_async(*a, **k)
        if ended is not None and ended.lease is not None and here.process is not None:
            # The message is out: whatever happens here, Celery must not hear of a failure.
            with bugs_told("a retry still counts as unsent"):
                here.process.sent(ended.lease)
        return result

    def _write(self, signature: Any) -> Ended | None:
        request = self._task.request
        transition = Transition(
            JobState.RETRYABLE,
            error=self._error,
            run_in=seconds_until(signature.options),
            unsent=True,
            envelope=envelope.build(self._task, request, signature),
        )
        try:
            return end(self._task, request, transition)
        except Exception as exc:
            trouble.warn("bug", "celery-awa: a retry was not recorded", exc_info=exc)
            return None


def name_run(request: Any, signature: Any, attempt: Attempt, ended: Ended | None) -> None:
    """Put the run's name and the lease that it continues into the next message's headers."""
    headers = dict(signature.options.get("headers") or {})
    named = message.headers_of(request).get(message.RUN)
    run = attempt.run_token or (ended.run_token if ended else None) or named
    if run:
        headers[message.RUN] = run
    lease = ended.lease if ended is not None else attempt.lease
    if lease is not None:
        headers[message.FROM] = lease.run_lease
    signature.options["headers"] = headers


def seconds_until(options: dict[str, Any]) -> float:
    """Seconds from now until a signature with these options is to run."""
    eta, countdown = options.get("eta"), options.get("countdown")
    if isinstance(eta, datetime):
        aware = eta if eta.tzinfo else eta.replace(tzinfo=timezone.utc)
        return max(0.0, aware.timestamp() - time.time())
    return float(countdown or 0.0)


@contextmanager
def publish_failure_kept(retrying: Retrying) -> Iterator[None]:
    """Around ``retry()``: Celery makes a failed publish a rejection, which loses the task.

    If the row says that a message is due, the attempt ends in Ignore instead.
    """
    try:
        yield
    except Reject as exc:
        if isinstance(exc.reason, LeaseLost):
            raise Ignore("celery-awa: this task has a newer attempt, or ended") from exc
        if retrying.kept:
            raise Ignore(f"celery-awa: retry not published, kept as unsent: {exc.reason}") from exc
        raise


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
