"""Brokers with their result backends, each private to one test, as Celery configuration."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kombu
import pytest
import redis as redis_client

from tests.services.required import service_url

FILESYSTEM = pytest.param("filesystem", id="filesystem")
REDIS = pytest.param("redis", id="redis", marks=pytest.mark.redis)
AMQP = pytest.param("amqp", id="amqp", marks=pytest.mark.amqp)
BROKERS = [FILESYSTEM, REDIS, AMQP]

#: Runs a test once for each broker; what it uses must come from the fixture ``broker``.
on_every_broker = pytest.mark.parametrize("broker", BROKERS, indirect=True)


@dataclass(frozen=True)
class Broker:
    """A broker and result backend of one test.

    ``config`` is the Celery configuration that both the worker and its clients need.
    """

    kind: str
    queue: str
    config: Mapping[str, Any] = field(repr=False)

    @property
    def url(self) -> str:
        """The URL of the broker alone."""
        return str(self.config["broker_url"])


@contextmanager
def open_broker(kind: str, folder: Path) -> Iterator[Broker]:
    """The broker of that kind: a private folder, or the server that the environment names."""
    if kind == "filesystem":
        yield filesystem_broker(folder)
    elif kind == "redis":
        with redis_broker(service_url("AWA_TEST_REDIS_URL", "Redis")) as broker:
            yield broker
    elif kind == "amqp":
        with amqp_broker(service_url("AWA_TEST_AMQP_URL", "RabbitMQ"), folder) as broker:
            yield broker
    else:
        raise ValueError(f"no broker of the kind {kind!r}")


def filesystem_broker(folder: Path) -> Broker:
    """Messages and results as files in the folder; no server at all."""
    queue = _fresh_name()
    folders = {
        name: _made(folder / "messages" / name) for name in ("waiting", "processed", "control")
    }
    return Broker(
        kind="filesystem",
        queue=queue,
        config={
            "broker_url": "filesystem://",
            "broker_transport": "tests.acceptance.transport:Transport",
            "broker_transport_options": {
                "data_folder_in": folders["waiting"],
                "data_folder_out": folders["waiting"],
                "control_folder": folders["control"],
                # Kept, and beside the waiting ones: else every message passes through /tmp.
                "store_processed": True,
                "processed_folder": folders["processed"],
                "polling_interval": 0.1,
            },
            **_queue(queue),
            **_file_results(folder),
        },
    )


def memory_broker() -> Broker:
    """Messages and results inside the process of the test; for a worker in a thread of it."""
    queue = _fresh_name()
    return Broker(
        kind="memory",
        queue=queue,
        config={
            "broker_url": f"memory://{queue}/",
            "broker_transport_options": {"polling_interval": 0.02},
            "result_backend": "cache+memory://",
            "worker_hijack_root_logger": False,
            **_queue(queue),
        },
    )


@contextmanager
def redis_broker(url: str) -> Iterator[Broker]:
    """Messages and results in that Redis under a prefix that is removed afterwards."""
    queue = _fresh_name()
    options = {"global_keyprefix": f"{queue}:"}
    yield Broker(
        kind="redis",
        queue=queue,
        config={
            "broker_url": url,
            "broker_transport_options": options,
            "result_backend": url,
            "result_backend_transport_options": options,
            **_queue(queue),
        },
    )
    _remove_keys(url, queue)


@contextmanager
def amqp_broker(url: str, folder: Path) -> Iterator[Broker]:
    """Messages in queues of that server that are deleted afterwards, results as files."""
    queue = _fresh_name()
    yield Broker(
        kind="amqp",
        queue=queue,
        config={
            "broker_url": url,
            # Control commands and events of other tests' workers stay out of this one.
            "control_exchange": queue,
            "event_exchange": f"{queue}.events",
            **_queue(queue),
            **_file_results(folder),
        },
    )
    _delete_queue(url, queue)


def _queue(name: str) -> dict[str, Any]:
    return {"task_default_queue": name}


def _file_results(folder: Path) -> dict[str, Any]:
    return {"result_backend": f"file://{_made(folder / 'results')}"}


def _fresh_name() -> str:
    return f"awa-test-{uuid.uuid4().hex[:12]}"


def _made(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder)


def _remove_keys(url: str, prefix: str) -> None:
    # The channels of control commands put the prefix behind the number of the database.
    with redis_client.Redis.from_url(url, socket_timeout=5) as client:
        for key in client.scan_iter(match=f"*{prefix}*", count=1000):
            client.delete(key)


def _delete_queue(url: str, queue: str) -> None:
    exchanges = [queue, f"{queue}.pidbox", f"reply.{queue}.pidbox", f"{queue}.events"]
    with kombu.Connection(url, connect_timeout=5) as connection:
        channel = connection.channel()
        channel.queue_delete(queue)
        for exchange in exchanges:
            channel.exchange_delete(exchange)
