"""Messages that are sent or delivered more than once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from celery import signals

from tests.acceptance.brokers import Broker


def send_and_keep(task: Any, *args: Any, **options: Any) -> tuple[Any, Callable[[], None]]:
    """Send a task. The second value sends its message again: same id, same headers, same body.

    It is another delivery of another message, as far as the broker can tell.
    """
    kept: dict[str, Any] = {}
    with _heard(signals.before_task_publish, kept.update):
        sent = task.apply_async(args, **options)

    def again() -> None:
        with task.app.producer_or_acquire() as producer:
            producer.publish(
                kept["body"],
                exchange=kept["exchange"],
                routing_key=kept["routing_key"],
                headers=kept["headers"],
                declare=kept["declare"],
                serializer=task.app.conf.task_serializer,
                **kept["properties"],
            )

    return sent, again


def deliver_again(broker: Broker, task_id: str) -> None:
    """Put the oldest message of the task back into the folder that workers read.

    To its receiver it is the same message, and nothing marks it as delivered before.
    """
    folders = broker.config["broker_transport_options"]
    done = sorted(Path(folders["processed_folder"]).iterdir())
    message = next(path for path in done if task_id in path.read_text())
    # Renamed, not copied: a worker must not find half a file.
    os.rename(message, Path(folders["data_folder_in"]) / message.name)


@contextmanager
def _heard(signal: Any, receiver: Callable[..., Any]) -> Iterator[None]:
    def hear(**message: Any) -> None:
        receiver(message)

    signal.connect(hear, weak=False)
    try:
        yield
    finally:
        signal.disconnect(hear)
