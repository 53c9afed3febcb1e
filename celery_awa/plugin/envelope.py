"""Runs where an attempt is claimed or ended: the message of a task, kept so it can be sent again.

JSON, with the body as it was, in base64. It holds arguments in the clear, so no view shows it,
and it goes when it is not needed.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from kombu.utils.json import dumps, loads

from ..errors import ForeignEnvelope, Unsendable
from ..model import Envelope
from . import wire
from .current import trouble
from .wire import Message

#: Of the form of an envelope's data. An envelope of another version is not read.
VERSION = 2
_FIELDS = tuple(field.name for field in fields(Message))


def lost_policy(task: Any) -> str:
    """What becomes of a task whose worker died: the option, else by ``acks_late``.

    Celery's own word for "safe to run twice" is ``acks_late``.
    """
    return task.lost_policy or ("requeue" if task.acks_late else "fail")


def keep(request: Any, token: str) -> None:
    """Have the attempt find the message of Celery's worker request; called once it is made.

    ``token``: of the attempt that the request leads to.
    """
    try:
        wire.keep(request, token)
    except Exception as exc:
        trouble.warn("bug", "celery-awa: a received message is not kept", exc_info=exc)


def while_running(task: Any, request: Any) -> Envelope | None:
    """The envelope that a claim stores: whole under policy requeue, else without arguments."""
    if lost_policy(task) == "requeue":
        return build(task, request)
    return _sealed(task, request, None, whole=False)


def build(task: Any, request: Any, signature: Any = None) -> Envelope | None:
    """The whole envelope of a request, or of the signature that continues it.

    Where that cannot be made or is above ``awa_max_envelope_bytes``, the one without arguments,
    which is enough to fail the task; None where even that is too much.
    """
    return _sealed(task, request, signature, whole=True) or _sealed(
        task, request, signature, whole=False
    )


def of_message(task: Any, request: Any, message: Message | None) -> Envelope | None:
    """As :func:`build`, of the whole message that is at hand; None where it could not be made."""
    whole = _within_limit(task, request, lambda: message, whole=True) if message else None
    return whole or _sealed(task, request, None, whole=False)


def _sealed(task: Any, request: Any, signature: Any, *, whole: bool) -> Envelope | None:
    def message() -> Message:
        found = None if signature else wire.received(task, request, whole=whole)
        return found or wire.continued(task, request, signature, whole=whole)

    return _within_limit(task, request, message, whole=whole)


def _within_limit(
    task: Any, request: Any, message: Callable[[], Message], *, whole: bool
) -> Envelope | None:
    try:
        data = _written(message())
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
    return Envelope(data, whole)


def _written(message: Message) -> bytes:
    # kombu's JSON, as most transports write it: dates and decimals among the headers come back.
    known = {name: getattr(message, name) for name in _FIELDS}
    body = base64.b64encode(message.body).decode()
    return dumps({**known, "version": VERSION, "body": body}).encode()  # type: ignore[no-any-return]  # kombu ships no types


def opened(envelope: Envelope | None) -> Message:
    """The message that an envelope holds.

    Raises Unsendable where there is none that can be read, ForeignEnvelope where a newer worker
    can, while not all of them are.
    """
    if envelope is None:
        raise Unsendable("it was not kept")
    try:
        found = loads(envelope.data)
        version = found.pop("version", None)
        if version == VERSION:
            return Message(**{**found, "body": base64.b64decode(found["body"])})
    except Exception as exc:
        raise Unsendable(f"its envelope cannot be read: {exc}") from exc
    text = f"its envelope has version {version}, this celery-awa reads {VERSION}"
    raise ForeignEnvelope(text) if _is_newer(version) else Unsendable(text)


def _is_newer(version: object) -> bool:
    return isinstance(version, int) and version > VERSION
