"""Runs in the process that executes the task, on the task's thread: ``retry()``.

The row is written before the message is published: Celery's signal for it comes after that, when
the next attempt may have started already (docs/adr/0005).
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
from ..model import Ended, JobState, Transition
from ..runtime.attempt import Attempt
from ..runtime.ending import error_text
from . import envelope, lifecycle, message
from .current import bugs_told, here, trouble

#: Where a request carries what publishes its continuation, for one signature.
CONTINUING = "awa_continuing"


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
        if lifecycle.superseded(self._attempt, ended):
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
            return lifecycle.end(self._task, request, transition)
        except Exception as exc:
            trouble.warn("bug", "celery-awa: a retry was not recorded", exc_info=exc)
            return None


def name_run(request: Any, signature: Any, attempt: Attempt, ended: Ended | None) -> None:
    """Put the run's name and the lease that it continues into the next message's headers."""
    run, lease = lifecycle.continued_by(request, attempt, ended)
    headers = dict(signature.options.get("headers") or {})
    if run:
        headers[message.RUN] = run
    if lease is not None:
        headers[message.FROM] = lease
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
