"""The message of a task under test: caught where Celery would publish it, and delivered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from celery import Task
from celery.utils.nodenames import gethostname
from kombu.serialization import dumps, loads

from ..plugin import message
from .replaced import replaced


@dataclass(frozen=True, slots=True)
class Delivery:
    """One message: its arguments as they are sent, so that each attempt has fresh ones."""

    task_id: str
    retries: int
    priority: int | None
    routing_key: str
    headers: Mapping[str, Any]
    body: tuple[str, str, Any] = field(repr=False)

    def arguments(self) -> tuple[Any, dict[str, Any]]:
        """Positional and keyword arguments, as a worker reads them."""
        content_type, content_encoding, data = self.body
        args, kwargs = loads(data, content_type, content_encoding, accept=[content_type])
        return args, kwargs

    def request(self, task: Any) -> dict[str, Any]:
        """What the worker makes the task's request of."""
        return {
            **self.headers,
            "lang": "py",
            "task": task.name,
            "id": self.task_id,
            "root_id": self.task_id,
            "retries": self.retries,
            "hostname": f"testing@{gethostname()}",
            "correlation_id": self.task_id,
            "properties": {},
            "delivery_info": {
                "exchange": "",
                "routing_key": self.routing_key,
                "priority": self.priority,
                "redelivered": False,
            },
        }


class Outbox:
    """What was caught: the message that continues the task, and what replaces it."""

    def __init__(self, task: Any, task_id: str) -> None:
        self.delivery: Delivery | None = None
        self.replacement: Any = None
        self._task = task
        self._task_id = task_id

    def takes(self, options: Mapping[str, Any]) -> bool:
        """Whether this is the task's own message."""
        return options.get("task_id") == self._task_id

    def put(self, args: Any, kwargs: Any, options: Mapping[str, Any]) -> Any:
        """Catch a message. Raises EncodeError, as publishing does."""
        conf = self._task.app.conf
        serializer = options.get("serializer") or self._task.serializer or conf.task_serializer
        self.delivery = Delivery(
            self._task_id,
            options.get("retries") or 0,
            options.get("priority"),
            str(options.get("queue") or conf.task_default_queue),
            dict(options.get("headers") or {}),
            dumps((tuple(args or ()), dict(kwargs or {})), serializer),
        )
        return self._task.AsyncResult(self._task_id)


@contextmanager
def caught(task: Any, task_id: str) -> Iterator[Outbox]:
    """Within it nothing that continues or replaces the task is published, not even eagerly."""
    outbox = Outbox(task, task_id)
    send_task, apply, on_replace = task.app.send_task, task.apply, task.on_replace

    def sent(name: str, args: Any = None, kwargs: Any = None, *more: Any, **options: Any) -> Any:
        if name == task.name and outbox.takes(options):
            return outbox.put(args, kwargs, options)
        return send_task(name, args, kwargs, *more, **options)

    def applied(args: Any = None, kwargs: Any = None, *more: Any, **options: Any) -> Any:
        if outbox.takes(options):  # task_always_eager
            return outbox.put(args, kwargs, options)
        return apply(args, kwargs, *more, **options)

    def replacing(signature: Any) -> Any:
        signature.apply_async = lambda *args, **options: None
        result = None
        try:
            result = on_replace(signature)
        finally:
            del signature.apply_async
            outbox.replacement = signature
        return result

    with (
        replaced(task.app, send_task=sent),
        replaced(task, apply=applied, on_replace=replacing),
    ):
        yield outbox


def sent_first(task: Any, args: Any, kwargs: Any, options: Mapping[str, Any]) -> Delivery:
    """The first message of a run, as ``apply_async`` sends it; raises what that raises.

    Past the task's own ``apply_async``, which may want services of its own.
    """
    options = {**options, "headers": {message.RUN: message.new_token(), **options["headers"]}}
    with caught(task, options["task_id"]) as outbox:
        Task.apply_async(task, args, kwargs, **options)
    assert outbox.delivery is not None
    return outbox.delivery
