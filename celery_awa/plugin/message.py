"""Runs wherever an attempt begins or a message is published: what messages say of runs.

``awa_run`` names the run. ``awa_from`` is the lease that a message continues. Celery copies
custom headers on retry and drops them on replace, which is just what a run's name needs.
"""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import Mapping
from typing import Any

from celery.utils.saferepr import saferepr

from ..model import NewAttempt
from ..runtime.ending import clean
from . import envelope

RUN, FROM = "awa_run", "awa_from"
#: Transports whose worker side reads the mark of a message that was delivered before.
FLAGS_REDELIVERY = frozenset({"amqp", "redis", "qpid"})
MAX_REPR = 4_096

_prefix = uuid.uuid4().hex[:20]
_count = itertools.count()


def _new_prefix() -> None:
    global _prefix
    _prefix = uuid.uuid4().hex[:20]


os.register_at_fork(after_in_child=_new_prefix)


def new_token() -> str:
    """A name for one execution: 32 hex characters, unique over processes and time."""
    return f"{_prefix}{next(_count) & 0xFFFFFFFFFFFF:012x}"


def headers_of(request: Any) -> Mapping[str, Any]:
    return request.headers or {}


def take_from_lease(request: Any) -> int | None:
    """The lease that the message continues, taken out so that a retry does not copy it."""
    lease = headers_of(request).get(FROM, getattr(request, FROM, None))
    if isinstance(request.headers, dict):
        request.headers.pop(FROM, None)
    request.__dict__.pop(FROM, None)
    return lease if isinstance(lease, int) else None


def describe(task: Any, request: Any, token: str, *, from_lease: int | None) -> NewAttempt:
    """All that a claim needs to know of the attempt that this request begins, but the envelope."""
    delivery = request.delivery_info or {}
    run = headers_of(request).get(RUN) or getattr(request, RUN, None)
    limit = task.max_retries
    return NewAttempt(
        token=token,
        task_id=request.id,
        kind=clean(task.name),
        queue=_text(delivery.get("routing_key")),
        worker=_text(request.hostname),
        run_token=clean(str(run)) if run else _made_up_run(request, token),
        run_named=bool(run),
        from_lease=from_lease,
        retries=request.retries or 0,
        redelivered=bool(delivery.get("redelivered")),
        max_attempts=limit + 1 if isinstance(limit, int) else None,
        args_repr=_repr(request, "argsrepr", request.args),
        kwargs_repr=_repr(request, "kwargsrepr", request.kwargs),
        root_id=_text(request.root_id),
        parent_id=_text(request.parent_id),
        group_id=_text(request.group),
        group_index=request.group_index,
        lost_policy=envelope.lost_policy(task),
        max_rescues=task.max_rescues,
        deadline=task.deadline,
        stall_after=task.stall_after,
        stall_policy=task.stall_policy,
    )


def _made_up_run(request: Any, token: str) -> str:
    """A name for a run whose producer gave none.

    Virtual transports keep a message's tag when they deliver it again; AMQP has none that lasts.
    """
    tag = (request.properties or {}).get("delivery_tag")
    return f"delivery:{clean(str(tag))}" if tag else f"unnamed:{token}"


def _repr(request: Any, name: str, value: Any) -> str:
    # Celery's own, made by the producer, so that its redaction is honoured.
    text = getattr(request, name, None) or saferepr(value, MAX_REPR)
    return clean(str(text))[:MAX_REPR]


def _text(value: Any) -> str | None:
    return None if value is None else clean(str(value))
