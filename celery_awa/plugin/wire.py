"""Runs where a message is received, where an envelope is made of it, and where it goes out again.

A task's message as the broker carries it: the one that was received, byte for byte, or the one
that Celery would publish to continue the task. Canvas (callbacks, errbacks, chain, chord) is a
part of its body.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from celery import Task
from kombu.serialization import dumps, registry
from kombu.utils.functional import maybe_list

#: Where the properties of a request hold what was received. Celery takes no header from there,
#: so that retries, replacements and callbacks do not copy it.
RECEIVED = "awa_received"

#: Headers of one delivery, or of what was done to its body on the way.
_OF_DELIVERY = frozenset({"compression", "redelivered"})
_OF_DELIVERY_TOO = ("x-death", "x-first-death-", "x-last-death-", "x-delivery-", "x-acquired-")
#: Celery's own texts of the arguments.
_REPRS = frozenset({"argsrepr", "kwargsrepr"})
#: Properties that a transport gives to one delivery, or that another publisher may not name.
_NOT_KEPT = frozenset(
    {
        "application_headers",
        "body_encoding",
        "cluster_id",
        "content_encoding",
        "content_type",
        "delivery_info",
        "delivery_tag",
        "user_id",
    }
)
_CANVAS = ("callbacks", "errbacks", "chain", "chord")


class Received:
    """What a request's message was: body, its type and encoding, headers. Shows nothing of it.

    ``token`` is the name of the execution that this request leads to, so that worker and child
    call it the same.
    """

    __slots__ = ("body", "content_encoding", "content_type", "headers", "token")

    def __init__(
        self,
        body: str | bytes,
        content_type: str,
        content_encoding: str,
        headers: dict[str, Any],
        token: str,
    ) -> None:
        self.body = body
        self.content_type = content_type
        self.content_encoding = content_encoding
        self.headers = headers
        self.token = token

    def __repr__(self) -> str:
        return f"<{len(self.body)} bytes of {self.content_type}>"

    def __json__(self) -> None:
        """Who sends the properties of its request elsewhere sends nothing of this."""

    def __reduce__(self) -> Any:
        known = self.body, self.content_type, self.content_encoding, self.headers, self.token
        return Received, known


@dataclass(frozen=True, slots=True)
class Message:
    """A message to publish. ``exchange_type`` is None where it is not known or does not matter.

    ``broker`` is :func:`broker_of` the app that received it.
    """

    headers: dict[str, Any]
    properties: dict[str, Any]
    content_type: str
    content_encoding: str
    body: bytes = field(repr=False)
    exchange: str = ""
    routing_key: str = ""
    exchange_type: str | None = None
    broker: str = ""


def keep(request: Any, token: str) -> None:
    """Have the attempt find what Celery's worker request was made of, and what it is called.

    It costs no second copy of the body: a pickle for a pool child holds each object once, and
    Celery's own argument for the child is this very body.
    """
    # None where the body is of an older protocol, which the worker has translated already.
    if request.content_type is not None:
        received = Received(
            request.body,
            request.content_type,
            request.content_encoding,
            request.message.headers,
            token,
        )
        known = request.request_dict
        # Another dict: the transport's own returns to the broker if the message does.
        known["properties"] = {**known["properties"], RECEIVED: received}


def token_of(request: Any) -> str | None:
    """The name that the worker gave to the execution of this request; None where it gave none."""
    kept = (request.properties or {}).get(RECEIVED)
    return None if kept is None else kept.token


def received(task: Any, request: Any, *, whole: bool = True) -> Message | None:
    """The message that this request came with; None where nobody kept it.

    Not ``whole``: without arguments, but with all that is needed to fail the task.
    """
    properties = request.properties or {}
    kept = properties.get(RECEIVED)
    if kept is None:
        return None
    if whole:
        body = kept.body.encode() if isinstance(kept.body, str) else bytes(kept.body)
        encoded = kept.content_type, kept.content_encoding or "utf-8", body
    else:
        canvas = {name: getattr(request, name, None) for name in _CANVAS}
        encoded = _encoded(((), {}, canvas), registry.type_to_name[kept.content_type])
    return Message(
        _own_headers(kept.headers, whole),
        _own_properties(properties, kept.headers),
        *encoded,
        *_destination(task.app, request.delivery_info or {}),
        broker_of(task.app),
    )


def continued(task: Any, request: Any, signature: Any = None, *, whole: bool = True) -> Message:
    """The message that this signature, which Celery made from the request, would publish.

    Without one: the message of the request itself, as Celery would make it anew. Raises what
    the serializer raises.
    """
    # Not the task's own method, which is ours and has more to do.
    made_from = signature or Task.signature_from_request(task, request)
    options = dict(made_from.options)
    anew = task.app.amqp.as_task_v2(
        request.id, task.name, made_from.args, made_from.kwargs, **_protocol(request, made_from)
    )
    headers = {**anew.headers, **(options.get("headers") or {})}
    properties = {**anew.properties, **_options_of_transport(task, request, options)}
    if signature is None:
        properties.update(request.properties or {})
    body = anew.body if whole else ((), {}, anew.body[2])
    return Message(
        _own_headers(headers, whole),
        _own_properties(properties, headers),
        *_encoded(body, _serializer(task, options)),
        *_destination(task.app, options),
        broker_of(task.app),
    )


def begun(task: Any, request: Any) -> Message:
    """The whole message of a request whose run has begun: it was in time, so it expires no more.

    Raises what the serializer raises.
    """
    message = received(task, request) or continued(task, request)
    properties = {k: v for k, v in message.properties.items() if k != "expiration"}
    return replace(message, headers={**message.headers, "expires": None}, properties=properties)


def _encoded(body: Any, serializer: str) -> tuple[str, str, bytes]:
    content_type, content_encoding, data = dumps(body, serializer)
    return content_type, content_encoding, data if isinstance(data, bytes) else data.encode()


def _serializer(task: Any, options: Mapping[str, Any]) -> str:
    chosen = options.get("serializer") or task.serializer or task.app.conf.task_serializer
    return str(chosen)


def _protocol(request: Any, made_from: Any) -> dict[str, Any]:
    """What Celery's message takes from a signature's options; it leaves alone what it ignores."""
    options = {"ignore_result": request.ignore_result, **made_from.options}
    for name in ("task_id", "eta", "countdown"):
        options.pop(name, None)
    if _same(made_from.args, request.args) and _same(made_from.kwargs, request.kwargs):
        # Given by the producer, who may have hidden something.
        options.update({name: getattr(request, name, None) for name in _REPRS})
    return {
        **options,
        "callbacks": maybe_list(options.get("link")),
        "errbacks": maybe_list(options.get("link_error")),
    }


def _same(some: Any, others: Any) -> bool:
    """Whether these arguments are the very same objects, whatever their ``==`` may do."""
    some, others = some or (), others or ()
    if isinstance(some, Mapping) and isinstance(others, Mapping):
        return list(some) == list(others) and _same([*some.values()], [*others.values()])
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


def _options_of_transport(
    task: Any, request: Any, options: Mapping[str, Any]
) -> dict[str, str | int | None]:
    """What the task's class says where the options do not, and what the message had itself."""
    before = request.properties or {}
    return {
        "priority": options.get("priority", task.priority),
        "delivery_mode": options.get("delivery_mode") or before.get("delivery_mode"),
    }


def _own_headers(headers: Mapping[str, Any], whole: bool) -> dict[str, Any]:
    left_out = _OF_DELIVERY if whole else _OF_DELIVERY | _REPRS
    return {
        name: value
        for name, value in headers.items()
        if name not in left_out and not name.startswith(_OF_DELIVERY_TOO)
    }


def _own_properties(
    properties: Mapping[str, Any], headers: Mapping[str, Any]
) -> dict[str, str | int | float]:
    # With an ``expires`` in its headers a worker tells that the message has expired. By the
    # property alone the broker would drop it, and the job would wait for ever.
    left_out = _NOT_KEPT | {"expiration"} if headers.get("expires") else _NOT_KEPT
    return {
        name: value
        for name, value in properties.items()
        if name not in left_out and isinstance(value, (str, int, float))
    }


def _destination(app: Any, options: Mapping[str, Any]) -> tuple[str, str, str | None]:
    """Exchange, routing key and the exchange's type, as Celery would publish with these options."""
    exchange, routing_key = options.get("exchange"), options.get("routing_key") or ""
    queue = options.get("queue")
    if queue is not None:
        queue = app.amqp.queues[queue] if isinstance(queue, str) else queue
        if queue.exchange.type == "direct" and not (exchange and routing_key):
            exchange, routing_key = "", queue.name
        elif exchange is None:
            exchange, routing_key = queue.exchange.name, routing_key or queue.routing_key
    name = str(getattr(exchange, "name", exchange) or "")
    return name, routing_key, exchange_type(app, name)


@functools.lru_cache(maxsize=8)
def broker_of(app: Any) -> str:
    """Transport and virtual host of an app's broker.

    One broker has many names, and these two whatever it is called by: what differs in them is
    another broker for sure.
    """
    connection = app.connection_for_read()
    return f"{connection.transport.driver_type}:{connection.virtual_host}"


def exchange_type(app: Any, exchange: str) -> str | None:
    """The type of an exchange, if one of the app's queues is bound to it."""
    return next((str(queue.exchange.type) for queue in queues_of(app, exchange)), None)


def queues_of(app: Any, exchange: str) -> list[Any]:
    """The queues in the app's configuration that are bound to an exchange with a name."""
    queues = app.amqp.queues.values() if exchange else ()
    return [queue for queue in queues if queue.exchange and queue.exchange.name == exchange]
