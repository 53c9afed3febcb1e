"""Runs where an attempt is claimed or ended: the message of a task, kept so it can be sent again.

JSON, with the body in the task's own serializer and base64. It holds arguments in the clear, so
no view shows it, and it goes when it is not needed.
"""

from __future__ import annotations

from typing import Any

import msgspec
from kombu.serialization import dumps

from .current import trouble

VERSION = 1
_CANVAS = ("callbacks", "errbacks", "chain", "chord")
_PROTOCOL = (
    "root_id", "parent_id", "group", "group_index", "retries", "eta", "expires", "timelimit",
    "origin", "shadow", "ignore_result", "replaced_task_nesting", "stamped_headers", "stamps",
)  # fmt: skip
_PROPERTIES = ("reply_to", "correlation_id", "priority", "delivery_mode", "expiration")


def lost_policy(task: Any) -> str:
    """What becomes of a task whose worker died: the option, else by ``acks_late``.

    Celery's own word for "safe to run twice" is ``acks_late``.
    """
    return task.lost_policy or ("requeue" if task.acks_late else "fail")


def while_running(task: Any, request: Any) -> bytes | None:
    """The envelope that a claim stores: whole under policy requeue, else without arguments."""
    return build(task, request, whole=lost_policy(task) == "requeue")


def build(
    task: Any,
    request: Any,
    *,
    whole: bool = True,
    args: Any = None,
    kwargs: Any = None,
    retries: int | None = None,
) -> bytes | None:
    """The envelope, or None where it cannot be made or is above ``awa_max_envelope_bytes``."""
    try:
        data = _encoded(task, request, whole, args, kwargs, retries)
    except Exception as exc:  # serializers and users' objects raise whatever they like
        trouble.warn("envelope", "celery-awa: a message cannot be kept", exc_info=exc)
        return None
    limit = task.app.conf.get("awa_max_envelope_bytes") or 262_144
    if len(data) > limit:
        trouble.warn(
            "envelope",
            "celery-awa: the message of task %s takes %d bytes, awa_max_envelope_bytes is %d: "
            "it cannot be sent again",
            request.id,
            len(data),
            limit,
        )
        return None
    return data


def _encoded(
    task: Any, request: Any, whole: bool, args: Any, kwargs: Any, retries: int | None
) -> bytes:
    canvas = {name: getattr(request, name) for name in _CANVAS}
    body = (
        (request.args if args is None else args) if whole else (),
        (request.kwargs if kwargs is None else kwargs) if whole else {},
        canvas,
    )
    serializer = task.serializer or task.app.conf.task_serializer
    content_type, content_encoding, data = dumps(body, serializer)
    properties = request.properties or {}
    protocol = {name: getattr(request, name, None) for name in _PROTOCOL}
    if retries is not None:
        protocol["retries"] = retries
    return msgspec.json.encode(
        {
            "version": VERSION,
            "task": task.name,
            "id": request.id,
            "lost_policy": lost_policy(task),
            "whole": whole,
            "content_type": content_type,
            "content_encoding": content_encoding,
            "body": data if isinstance(data, bytes) else data.encode(),
            "protocol": protocol,
            "headers": dict(request.headers or {}),
            "properties": {name: properties.get(name) for name in _PROPERTIES},
            "delivery_info": dict(request.delivery_info or {}),
        }
    )
