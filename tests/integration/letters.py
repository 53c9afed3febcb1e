"""Messages of tasks: sent by Celery, received without a worker, and what an attempt has of them."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from typing import Any

import kombu
from celery import Celery
from celery.app.task import Context
from celery.worker.request import Request

from celery_awa import AwaTask
from celery_awa.model import Envelope, JobState, Lease, UnsentJob
from celery_awa.plugin.verdict import LostRequest
from tests.acceptance.brokers import Broker
from tests.waiting import eventually

SERIALIZERS = ["json", "pickle", "msgpack", "yaml"]
#: What belongs to one delivery of a message, in its properties.
OF_DELIVERY = {"delivery_tag", "delivery_info", "body_encoding", "application_headers"}

Take = Callable[[], Any]


class Keeping(LostRequest, Request):  # type: ignore[misc]  # celery ships no types
    """What a worker makes of a message of a task of ours."""


def shop(broker: Broker | None = None, **config: Any) -> Celery:
    """An app without tasks of its own that accepts whatever comes."""
    app = Celery("shop", set_as_current=False)
    app.conf.update({"accept_content": SERIALIZERS, **(broker.config if broker else {}), **config})
    return app


def import_rows(app: Celery, **options: Any) -> Any:
    """A task of ours, with the options that a test is about."""

    def run(self: Any, *args: Any, **kwargs: Any) -> None: ...

    # Not shared: else every app of this process would register it.
    given = {"bind": True, "base": AwaTask, "name": "shop.import_rows", "shared": False, **options}
    return app.task(**given)(run)


@contextmanager
def taking(app: Celery, queue: str | kombu.Queue) -> Iterator[Take]:
    """Take the next message of a queue off it; fails where none comes within some seconds."""
    arrived: deque[Any] = deque()
    named = queue if isinstance(queue, kombu.Queue) else app.amqp.queues[queue]
    with (
        app.connection_for_read() as connection,
        kombu.Consumer(
            connection, [named], on_message=arrived.append, accept=SERIALIZERS, prefetch_count=1
        ),
    ):
        if named.exchange.type == "fanout":
            _drained(connection, arrived)  # Redis keeps no such message for who comes later

        def take() -> Any:
            eventually(lambda: _drained(connection, arrived), what=f"a message in {named.name}")
            message = arrived.popleft()
            message.ack()
            return message

        yield take


def _drained(connection: kombu.Connection, arrived: deque[Any]) -> bool:
    if not arrived:
        with suppress(TimeoutError):
            connection.drain_events(timeout=0.1)
    return bool(arrived)


def received(task: Any, message: Any, request: type[Request] = Keeping) -> Any:
    """What the worker makes of a message."""
    return request(message, app=task.app, task=task, hostname="worker@host", body=message.body)


def attempt_of(task: Any, message: Any, request: type[Request] = Keeping) -> Context:
    """The request of an attempt in a pool child, as Celery makes it there."""
    known = pickle.loads(pickle.dumps(received(task, message, request).request_dict))
    args, kwargs, canvas = message.payload
    return Context(known, **canvas, args=args, kwargs=kwargs, called_directly=False)


def unsent(envelope: Envelope | None, task_id: str = "task", **fields: Any) -> UnsentJob:
    """A job whose message is to be sent."""
    described: dict[str, Any] = {
        "lease": Lease(7, 3),
        "kind": "shop.import_rows",
        "state": JobState.RETRYABLE,
        "run_token": "run",
        "attempted_at": datetime(2020, 1, 1, tzinfo=timezone.utc),
        "run_at": None,
        "error": None,
    }
    return UnsentJob(task_id=task_id, envelope=envelope, **(described | fields))


def properties_of(message: Any) -> dict[str, Any]:
    """Its properties, without those of the delivery."""
    return {name: value for name, value in message.properties.items() if name not in OF_DELIVERY}


def carried(message: Any) -> dict[str, Any]:
    """All that a message carries, but for what names the run that it continues."""
    names = {"awa_run", "awa_from"}
    return {
        "body": message.body,
        "content_type": message.content_type,
        "content_encoding": message.content_encoding,
        "headers": {k: v for k, v in message.headers.items() if k not in names},
        "properties": properties_of(message),
        "exchange": message.delivery_info["exchange"],
        "routing_key": message.delivery_info["routing_key"],
    }


def without(mapping: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """The mapping without these keys."""
    return {name: value for name, value in mapping.items() if name not in names}
