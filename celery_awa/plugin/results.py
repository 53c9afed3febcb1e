"""Called on the rescue thread, or in the command ``rescue``: the result backend of lost jobs.

What is told goes where Celery's own worker would tell it: the task's result, its chord, the
rest of its chain, its errbacks.
"""

from __future__ import annotations

import builtins
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from billiard.exceptions import TimeLimitExceeded, WorkerLostError
from celery import states
from celery.app.task import Context
from celery.backends.base import DisabledBackend
from celery.backends.rpc import RPCBackend
from celery.exceptions import SecurityError, TaskRevokedError
from kombu.exceptions import ContentDisallowed, DecodeError, OperationalError
from kombu.serialization import loads, prepare_accept_content

from ..errors import CallbackFailed
from ..model import JobState, LostJob, UnsentJob
from ..runtime.ending import error_text
from . import envelope
from .current import trouble

_FINAL = {
    states.SUCCESS: JobState.COMPLETED,
    states.FAILURE: JobState.FAILED,
    states.REVOKED: JobState.CANCELLED,
}
#: By the first word of an error. Not Celery's own TimeoutError, which says to who waits for a
#: result that the waiting took too long.
_ERRORS: dict[str, type[Exception]] = {
    "CallbackFailed": CallbackFailed,
    "TimeLimitExceeded": TimeLimitExceeded,
    "TimeoutError": builtins.TimeoutError,
    "WorkerLostError": WorkerLostError,
}
#: Seconds for one answer of Redis.
TIMEOUT = 4.0
_UNREADABLE = (ContentDisallowed, DecodeError, SecurityError)


@dataclass(frozen=True, slots=True)
class Found:
    """A final result: the state, and the value or exception."""

    state: JobState
    result: Any


class Results:
    """An app's result backend, or each task's own."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._of_app: Any = None

    def final(self, job: LostJob | UnsentJob) -> Found | None:
        """The final result of this run, if the backend holds one. Raises if it cannot be asked."""
        backend = self._backend(job.kind)
        if isinstance(backend, (DisabledBackend, RPCBackend)) or job.attempted_at is None:
            return None  # the results of RPC are messages, which are the caller's to take
        try:
            # Past the backend's cache, and past its retries, which may never end.
            meta = backend._get_task_meta_for(job.task_id)
        except _UNREADABLE:
            return None  # by whichever state: nobody is told anything by it
        state = _FINAL.get(meta["status"])
        if state is None or not _is_since(job.attempted_at, self._done_at(backend, meta)):
            return None
        return Found(state, meta.get("result"))

    def tell(self, job: UnsentJob) -> None:
        """Store the end of a failed or cancelled job, and have chord, chain and errbacks know.

        Does nothing where somebody else has stored a final result of this run. After a result of
        our own the rest is done again: telling may have broken off there. Raises if they cannot
        be told now. What would fail each time costs chord, chain and errbacks, not the result.
        """
        error = _error_of(job)
        known = self.final(job)
        if known is not None and not _is(known, job.state, error):
            return
        try:
            self._tell(job, error, self._request(job), known)
        except Exception as exc:  # a class that is not here, a backend's chord
            if self._passes(job.kind, exc):
                raise
            # Raises where it is the backend that is away, whatever it calls that.
            self._tell(job, error, None, known)
            trouble.warn(
                "untold",
                "celery-awa: only the result of task %s says how it ended, not its chord, chain "
                "and errbacks: %s",
                job.task_id,
                error_text(exc),
                exc_info=exc,
            )

    def _tell(self, job: UnsentJob, error: Exception, request: Any, known: Found | None) -> None:
        backend = self._backend(job.kind)
        store = known is None and self._stores(job.kind, request)
        if isinstance(backend, RPCBackend) and request is None:
            return  # it answers to an address, and that was not kept
        if job.state is JobState.CANCELLED:
            backend.mark_as_revoked(job.task_id, *error.args, request=request, store_result=store)
            return
        backend.mark_as_failure(
            job.task_id, error, request=request, store_result=store, call_errbacks=False
        )
        if request is not None and request.errbacks:
            _call_errbacks(backend, request, error)

    def _passes(self, kind: str, error: Exception) -> bool:
        """Whether this is an error of a connection, to the result backend or to the broker."""
        backend = self._backend(kind)
        connection = self._app.connection_for_write()
        away = (
            OperationalError,
            OSError,
            *connection.connection_errors,
            *getattr(backend, "connection_errors", ()),
        )
        return isinstance(error, away) or bool(backend.exception_safe_to_retry(error))

    def _backend(self, kind: str) -> Any:
        task = self._app.tasks.get(kind)
        if task is not None and task.backend is not self._app.backend:
            return task.backend
        if self._of_app is None:
            # Not the app's own object, which others may use.
            self._of_app = _impatient(self._app._get_backend())
        return self._of_app

    def _stores(self, kind: str, request: Any) -> bool:
        """Whether a failure is to be stored: said by the message, else the task, else the app."""
        task, conf = self._app.tasks.get(kind), self._app.conf
        ignore = None if request is None else request.__dict__.get("ignore_result")
        if ignore is None:
            ignore = conf.task_ignore_result if task is None else task.ignore_result
        if not ignore:
            return True
        if task is None:
            return bool(conf.task_store_errors_even_if_ignored)
        return bool(task.store_errors_even_if_ignored)

    def _request(self, job: UnsentJob) -> Any:
        """The request as Celery's worker would have it. None without an envelope."""
        if job.envelope is None:
            return None
        message = envelope.opened(job.envelope)
        args, kwargs, canvas = loads(
            message.body,
            message.content_type,
            message.content_encoding,
            accept=prepare_accept_content(self._app.conf.accept_content),
        )
        return Context(
            message.headers,
            **(canvas or {}),
            args=args,
            kwargs=kwargs,
            called_directly=False,
            properties=message.properties,
            reply_to=message.properties.get("reply_to"),
            correlation_id=message.properties.get("correlation_id"),
            hostname=None,
            delivery_info={
                "exchange": message.exchange,
                "routing_key": message.routing_key,
                "priority": message.properties.get("priority"),
                "redelivered": False,
            },
        )

    def _done_at(self, backend: Any, meta: dict[str, Any]) -> datetime | None:
        done: datetime | str | None = meta.get("date_done")
        if isinstance(done, str):
            done = datetime.fromisoformat(done.replace("Z", "+00:00"))
        if done is None or done.tzinfo is not None:
            return done
        # SQLAlchemy's columns lose the zone, which was the app's.
        from_sql = any(
            c.__module__.startswith("celery.backends.database") for c in type(backend).__mro__
        )
        return done.replace(tzinfo=self._app.timezone if from_sql else timezone.utc)


def _impatient(backend: Any) -> Any:
    """One that does not wait minutes for a Redis that says nothing, as by default."""
    options = getattr(backend, "connparams", None)
    if isinstance(options, dict):
        for name in ("socket_timeout", "socket_connect_timeout"):
            options[name] = min(options.get(name) or TIMEOUT, TIMEOUT)
    return backend


def _is_since(began: datetime, done: datetime | None) -> bool:
    """Whether a result is of an attempt that began then, or of one that ended before.

    Backends keep seconds, milliseconds or microseconds; as finely as the result tells its time,
    so finely are they compared. The start is by the database's clock, the end by the worker's. A
    worker whose clock is late by some seconds is not believed about an attempt that took less:
    the job is dealt with as if it had no result. One whose clock is early could be believed about
    an earlier run of the same id, if that ended within those seconds before this one began.
    """
    if done is None:
        return False
    unit = 1_000_000 if done.microsecond == 0 else 1_000 if done.microsecond % 1_000 == 0 else 1
    return done >= began - timedelta(microseconds=began.microsecond % unit)


def _error_of(job: UnsentJob) -> Exception:
    """What is stored: for a failed job an exception of the kind that its error names."""
    if job.state is JobState.CANCELLED:
        return TaskRevokedError("revoked")  # type: ignore[no-any-return]  # celery ships no types
    name, _, text = (job.error or "").partition(": ")
    if name in _ERRORS:
        return _ERRORS[name](text)
    return WorkerLostError(job.error or "the job was lost")  # type: ignore[no-any-return]  # billiard ships no types


def _is(known: Found, state: JobState, error: Exception) -> bool:
    """Whether this result is what we stored of this error."""
    return known.state is state and getattr(known.result, "args", None) == error.args


def _call_errbacks(backend: Any, request: Any, error: Exception) -> None:
    """As Celery does in its worker: some are called here, others are sent."""
    try:
        backend._call_task_errbacks(request, error, None)
    except OperationalError:
        raise  # not sent
    except Exception as exc:
        # It was called, and would fail each time.
        trouble.warn(
            "errback", "celery-awa: an errback of task %s failed", request.id, exc_info=exc
        )
