"""Where chaos happens: private servers behind proxies, and the workers that use them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from celery_awa import migrate
from tests.acceptance.diary import Diary
from tests.acceptance.workers import Worker, WorkerOptions, load_app
from tests.chaos.script import BROKERS
from tests.faults import Proxy
from tests.services.postgres import PrivatePostgres
from tests.services.rabbitmq import PrivateRabbitMQ
from tests.services.redis import PrivateRedis

APP = "tests.chaos.app"
WORKERS = 2

#: Short, so that a round takes seconds. Staleness must outlast a silent network, as in real life.
STALE_AFTER = 1.5
WRITE_INTERVAL = 0.2
_SETTINGS = {
    "awa_write_interval": WRITE_INTERVAL,
    "awa_heartbeat_interval": 0.4,
    "awa_stale_after": STALE_AFTER,
    "awa_rescue_interval": 0.5,
    "awa_claim_after": 0.1,
    # A message that is lost with a connection is to come again within the round.
    "awa_resend_after": 5,
    "worker_lost_wait": 1.0,
    "broker_connection_max_retries": None,
    # Without it a worker waits 2, 4, 6, … seconds until it tries its broker again.
    "broker_connection_retry_on_startup": True,
}


@dataclass
class Broker:
    """A broker behind its proxy, the workers on it, and the schema of their jobs."""

    name: str
    schema: str
    proxy: Proxy
    client: ModuleType
    diary: Diary
    workers: list[Worker] = field(default_factory=list)


@dataclass
class Site:
    """Everything that a round uses."""

    folder: Path
    slates: Path
    postgres: PrivatePostgres
    database: str
    database_proxy: Proxy
    brokers: dict[str, Broker]

    def slates_left(self) -> list[str]:
        """The names of the files in the folder of the slates."""
        return sorted(path.name for path in self.slates.iterdir())

    def workers(self) -> list[Worker]:
        """Every worker, running or not."""
        return [worker for broker in self.brokers.values() for worker in broker.workers]


@contextmanager
def open_site(folder: Path, brokers: tuple[str, ...] = BROKERS) -> Iterator[Site]:
    """Start the servers and two workers on each broker; end all of them at the end."""
    with ExitStack() as stack:
        postgres = PrivatePostgres(folder / "postgres.log")
        stack.callback(postgres.end)
        _have_statements_logged(postgres)
        database = postgres.create_database()
        proxy = stack.enter_context(Proxy.before(postgres.url(database)))
        slates = folder / "slates"
        slates.mkdir()
        site = Site(folder, slates, postgres, database, proxy, {})
        redis = PrivateRedis(folder)
        stack.callback(redis.end)
        for name in brokers:
            site.brokers[name] = _open_broker(stack, site, name, redis)
        yield site


def _have_statements_logged(postgres: PrivatePostgres) -> None:
    with postgres.observe() as connection:
        connection.execute("ALTER SYSTEM SET log_statement = 'all'")
        connection.execute("ALTER SYSTEM SET log_line_prefix = '%m [%p] '")
        connection.execute("SELECT pg_reload_conf()")


def _open_broker(stack: ExitStack, site: Site, name: str, redis: PrivateRedis) -> Broker:
    url = redis.url
    if name == "amqp":
        rabbitmq = PrivateRabbitMQ(site.folder / "rabbitmq")
        stack.callback(rabbitmq.end)
        url = rabbitmq.url
    # What is unsent is published to the broker of whoever looks at it: a schema for each.
    schema = f"awa_{name}"
    migrate(site.postgres.url(site.database), schema=schema)
    proxy = stack.enter_context(Proxy.before(url))
    folder = site.folder / name
    folder.mkdir()
    config = _config(site, folder, name, broker=proxy.through(url), results=redis.url)
    config["awa_schema"] = schema
    # The client sends past the proxy: what is tested is what becomes of a sent task.
    client = load_app(APP, config | {"broker_url": url})
    broker = Broker(name, schema, proxy, client, Diary(Path(config["test_diary"])))
    for number in range(WORKERS):
        worker = Worker(f"{name}-{number}", _options(config), folder)
        stack.callback(worker.end)
        broker.workers.append(worker)
    for worker in broker.workers:
        worker.ready()
    return broker


def _config(site: Site, folder: Path, name: str, *, broker: str, results: str) -> dict[str, Any]:
    return {
        **_SETTINGS,
        "broker_url": broker,
        # Long enough for any task here: what a dead worker held comes back by ours, or later.
        "broker_transport_options": {"visibility_timeout": 10} if name == "redis" else {},
        "result_backend": results,
        "task_default_queue": f"chaos-{name}",
        "test_diary": str(folder / "diary.jsonl"),
        "awa_database_url": site.database_proxy.through(site.postgres.url(site.database)),
        "awa_slate_dir": str(site.slates),
    }


def _options(config: dict[str, Any]) -> WorkerOptions:
    json.dumps(config)  # it reaches the worker as JSON
    return WorkerOptions(app=APP, concurrency=2, config=config)
