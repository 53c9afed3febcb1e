"""Runs in the worker's own process: Celery's verdict on attempts that could not end themselves.

A child was lost, hit its hard time limit or was stopped, or a message was revoked. Called on the
worker's main thread, in signal handlers too, or the pool's result thread; writing is queued, so
nothing here waits.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from billiard.exceptions import TimeLimitExceeded, WorkerLostError
from celery.utils.imports import symbol_by_name
from celery.worker import state

from ..model import JobState, NewAttempt, Transition
from ..runtime.ending import error_text
from . import aborted, envelope, message, retrying, wire
from .aborted import CutOff
from .current import bugs_told, here

_deciding: ContextVar[LostRequest | None] = ContextVar("celery_awa_deciding", default=None)
deciding = _deciding.get
#: Whether what Celery is cutting off is an attempt of this very process.
_ends_itself: ContextVar[bool] = ContextVar("celery_awa_ends_itself", default=False)
_LOST = (WorkerLostError, TimeLimitExceeded, SystemExit, KeyboardInterrupt)


class LostRequest:
    """Mixin over a task's Celery request class: hears the verdict while Celery gives it."""

    _awa_decided = False
    _awa_error: str | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # A request is executed once: a message that is delivered again makes another.
        envelope.keep(self, message.new_token())

    def cancel(self, pool: Any, *args: Any, **kwargs: Any) -> Any:
        """Celery stops the attempt itself: at a cold stop, or without its broker."""
        # Our row first, as in ``reject``; and a greenlet may be gone when this returns.
        with _cutting_off(self, CutOff.STOPPED):
            return super().cancel(pool, *args, **kwargs)  # type: ignore[misc]  # see on_failure

    def terminate(self, pool: Any, *args: Any, **kwargs: Any) -> Any:
        """Celery was asked to revoke the attempt while it runs."""
        with _cutting_off(self, CutOff.TERMINATED):
            return super().terminate(pool, *args, **kwargs)  # type: ignore[misc]  # see on_failure

    def on_failure(self, exc_info: Any, *args: Any, **kwargs: Any) -> Any:
        error = getattr(exc_info.exception, "exc", exc_info.exception)
        lost = isinstance(error, _LOST)
        self._awa_error = error_text(error) if lost else None
        try:
            with _watching(self, lost):
                return super().on_failure(exc_info, *args, **kwargs)  # type: ignore[misc]  # Celery's Request follows in the MRO
        except Exception:
            # It meant to store a failure. Celery before 5.7 cannot, for a SystemExit.
            if lost:
                self.awa_decide(JobState.FAILED, self._awa_error)
            raise

    def on_timeout(self, soft: bool, timeout: float) -> Any:
        with _watching(self, not soft):
            answer = super().on_timeout(soft, timeout)  # type: ignore[misc]  # see on_failure
        if not soft and not state.should_terminate:
            # Celery before 5.7 sends no signal here.
            self.awa_decide(JobState.FAILED, error_text(f"TimeLimitExceeded: {timeout}"))
        return answer

    def reject(self, requeue: bool = False) -> Any:
        # Our row first: the copy may be running a moment after it was returned.
        if requeue and _deciding.get() is self:
            self.awa_decide(JobState.AVAILABLE, unsent=True)
        return super().reject(requeue=requeue)  # type: ignore[misc]  # see on_failure

    def _success_was_stored(self) -> Any:
        stored = super()._success_was_stored()  # type: ignore[misc]  # Celery 5.7's; see on_failure
        if stored:
            self.awa_decide(JobState.COMPLETED)
        return stored

    def awa_continue(self, signature: Any) -> Any:
        """The signature of ``retry_on_worker_lost``, naming the lease that it continues."""
        request: Any = self
        lease = None
        if here.pages is not None:
            with bugs_told("a retried message does not name its lease"):
                lease = here.pages.lease_of(request.id, request.worker_pid)
        headers = dict(signature.options.get("headers") or {})
        headers.pop(message.FROM, None)
        if lease is not None:
            headers[message.FROM] = lease
        signature.options["headers"] = headers
        signature.apply_async = functools.partial(self._publish, signature, signature.apply_async)
        return signature

    def _publish(self, signature: Any, apply_async: Any, *args: Any, **kwargs: Any) -> Any:
        result = apply_async(*args, **kwargs)
        # After it: if it fails, Celery goes on to another verdict. The next attempt may claim
        # before this is written, and then it is the row's.
        run_in = retrying.seconds_until(signature.options)
        self.awa_decide(JobState.RETRYABLE, self._awa_error, run_in=run_in, signature=signature)
        return result

    def awa_decide(
        self,
        to: JobState,
        error: str | None = None,
        *,
        run_in: float | None = None,
        unsent: bool = False,
        signature: Any = None,
    ) -> None:
        """Pass the verdict on, the first one only: the hard limit's signal fires twice.

        ``signature``: what was published in the message's place.
        """
        if self._awa_decided or here.pages is None:
            return
        self._awa_decided = True
        request: Any = self
        transition = Transition(to, error=error, run_in=run_in, unsent=unsent)
        with bugs_told("a verdict of Celery's was not written"):
            _queue(request.task, request._context, request.worker_pid, transition, signature)

    def awa_stopped(self) -> None:
        """Celery stops the child; what that wrote of its attempt's end goes before this.

        Celery does not say whether the child had ended its task by then.
        """
        if self._awa_decided or here.pages is None:
            return
        self._awa_decided = True
        request: Any = self
        task, context = request.task, request._context
        if task.acks_late or envelope.lost_policy(task) == "requeue":
            transition = Transition(JobState.AVAILABLE, unsent=True)
        else:
            transition = Transition(JobState.FAILED, error=aborted.STOPPED, unsent=True)
        whole = _whole(task, context, transition)
        describe = functools.partial(_describe, task, context)
        here.pages.end_cancelled(context.id, request.worker_pid, whole, describe)


@contextmanager
def _watching(request: LostRequest, lost: bool) -> Iterator[None]:
    """What Celery decides in here is a verdict on this request, if its child is lost."""
    token = _deciding.set(request if lost else None)
    try:
        yield
    finally:
        _deciding.reset(token)


@contextmanager
def _cutting_off(request: Any, why: CutOff) -> Iterator[None]:
    """Celery cuts the attempt of this request off in here, if its pool can."""
    ends_itself = False
    if request.time_start:  # else it is not known to run
        with bugs_told("a verdict of Celery's was not written"):
            ends_itself = aborted.announce(request.id, why)
            if why is CutOff.STOPPED:
                request.awa_stopped()
    token = _ends_itself.set(ends_itself)
    try:
        yield
    finally:
        _ends_itself.reset(token)


def failed(exception: BaseException) -> None:
    """Celery stored a failure for the request that it is deciding on."""
    request = _deciding.get()
    if request is not None:
        request.awa_decide(JobState.FAILED, error_text(exception))


def revoked(task: Any, context: Any, *, terminated: bool) -> None:
    """Celery revoked a message: before its start, at expiry, or a running one by terminating.

    Only termination is about a running attempt. Another copy of the message may run meanwhile,
    here or elsewhere, and goes on.
    """
    service = here.pages or here.process
    transition = Transition(JobState.CANCELLED)
    if here.pages is not None and terminated:
        _queue(task, context, None, transition)
    elif terminated and _ends_itself.get():
        return  # with what it reported last
    elif service is not None:
        described = replace(_describe(task, context, None), unstarted=True)
        service.end_unstarted(described, _whole(task, context, transition))


def _queue(
    task: Any, context: Any, pid: int | None, transition: Transition, signature: Any = None
) -> None:
    if here.pages is not None:
        describe = functools.partial(_describe, task, context)
        whole = _whole(task, context, transition, signature)
        here.pages.end_lost(context.id, pid, whole, describe, token=wire.token_of(context))


def _whole(task: Any, context: Any, transition: Transition, signature: Any = None) -> Transition:
    if transition.to is JobState.COMPLETED:
        return transition
    return replace(transition, envelope=envelope.build(task, context, signature))


def _describe(task: Any, context: Any, token: str | None) -> NewAttempt:
    """An attempt as of the verdict: what begins after it is newer."""
    from_lease = message.headers_of(context).get(message.FROM)
    described = message.describe(task, context, token or message.new_token(), from_lease=from_lease)
    return replace(described, began_at=time.monotonic())


def hear_verdicts(task: Any) -> None:
    """Make a task's request class one of ours, whatever it was (worker start, before messages)."""
    base = symbol_by_name(task.Request)
    if not issubclass(base, LostRequest):
        task.Request = type(f"Awa{base.__name__}", (LostRequest, base), {})
