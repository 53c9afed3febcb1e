"""Fixtures of the acceptance tests: brokers, workers and what tasks and tests tell each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import celery
import pytest

from tests.acceptance.brokers import BROKERS, Broker, memory_broker, open_broker
from tests.acceptance.diary import Diary, Gate
from tests.acceptance.jobs import Jobs, opened_jobs
from tests.acceptance.nodes import LocalBackend, LocalBroker, LocalSetup, LocalWorker
from tests.acceptance.workers import (
    CAN_SPAWN,
    DEFAULT_APP,
    POOLS,
    Worker,
    WorkerOptions,
    load_app,
    merged,
    worker_thread,
)
from tests.services.fixtures import (  # noqa: F401  # fixtures are found by being here
    pgbouncer,
    private_postgres,
    private_postgres_of_session,
    private_rabbitmq,
    private_rabbitmq_of_session,
    private_redis,
    proxy_to,
)


@pytest.fixture
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Broker]:
    """The broker and result backend of the test: filesystem unless parametrised otherwise."""
    with open_broker(getattr(request, "param", "filesystem"), tmp_path) as opened:
        yield opened


@pytest.fixture
def diary(tmp_path: Path) -> Diary:
    """What the tasks of this test note."""
    return Diary(tmp_path / "diary.jsonl")


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    """A closed gate; pass ``gate.path`` to a task and open it when the task may go on."""
    return Gate(tmp_path / "gate")


@pytest.fixture
def settings(diary: Diary, tmp_path: Path, database_url: str) -> dict[str, Any]:
    """The configuration of workers and clients but for the broker; tests may override it."""
    slates = tmp_path / "slates"
    slates.mkdir()
    return {
        "test_diary": str(diary.path),
        "awa_database_url": database_url,
        "awa_slate_dir": str(slates),
        "awa_write_interval": 0.2,
        "awa_heartbeat_interval": 0.5,
        # Without a hub Celery reports a lost child after this long; 10 s by default.
        "worker_lost_wait": 1.0,
    }


@pytest.fixture
def start_worker(
    broker: Broker, settings: dict[str, Any], tmp_path: Path
) -> Iterator[Callable[..., Worker]]:
    """Start workers as processes; see :class:`WorkerOptions` for what can be said.

    ``broker`` and ``config`` replace and extend those of the test. Returns when the worker takes
    tasks, with ``wait=False`` at once. At the end of the test all are killed, and whatever
    outlives its worker fails the test.
    """
    with ExitStack() as started:
        count = 0

        def start(
            *,
            broker: Broker = broker,
            config: Mapping[str, Any] | None = None,
            wait: bool = True,
            start_method: str = "fork",
            **options: Any,
        ) -> Worker:
            nonlocal count
            count += 1
            if start_method == "spawn" and not CAN_SPAWN:
                pytest.skip("this Celery cannot spawn")
            wanted = WorkerOptions(
                config=merged(broker.config, settings, config or {}),
                start_method=start_method,
                **options,
            )
            worker = Worker(f"worker{count}", wanted, tmp_path)
            # Shown where the test fails.
            started.callback(lambda: print(f"{worker.name} wrote:\n{worker.log()[-8000:]}"))
            started.callback(worker.end)
            return worker.ready() if wait else worker

        yield start


@pytest.fixture
def app_name(request: pytest.FixtureRequest) -> str:
    """The app of the test's module: what that calls ``APP``, else the basic one."""
    return str(getattr(request.module, "APP", DEFAULT_APP))


@pytest.fixture
def start(start_worker: Callable[..., Worker], app_name: str) -> Callable[..., Worker]:
    """Start workers of the module's app."""

    def start(pool: str = "prefork", **options: Any) -> Worker:
        alone = {"concurrency": 1} if pool == "solo" else {}
        return start_worker(**{"app": app_name, "pool": pool, **alone, **options})

    return start


@pytest.fixture
def client(load_client: Callable[..., ModuleType], app_name: str) -> ModuleType:
    """The module's app on the sending side: ``client.report.delay(…)``, ``client.app``."""
    return load_client(app_name)


@pytest.fixture
def jobs(database_url: str) -> Iterator[Jobs]:
    """The rows of the test's tasks."""
    with opened_jobs(database_url) as opened:
        yield opened


@pytest.fixture
def load_client(broker: Broker, settings: dict[str, Any]) -> Iterator[Callable[..., ModuleType]]:
    """Load an app module for sending: ``load_client(app=…, broker=…, config=…)``."""
    with ExitStack() as opened:

        def load(
            app: str = DEFAULT_APP,
            *,
            broker: Broker = broker,
            config: Mapping[str, Any] | None = None,
        ) -> ModuleType:
            module = load_app(app, merged(broker.config, settings, config or {}))
            opened.callback(module.app.close)
            return module

        yield load


@pytest.fixture
def start_in_thread(settings: dict[str, Any]) -> Iterator[Callable[..., ModuleType]]:
    """A solo worker in a thread of this process on the memory broker; returns its app module."""
    with ExitStack() as started:

        def start(app: str = DEFAULT_APP, *, config: Mapping[str, Any] | None = None) -> ModuleType:
            module = load_app(app, merged(memory_broker().config, settings, config or {}))
            started.callback(module.app.close)
            started.enter_context(worker_thread(module.app))
            return module

        yield start


@pytest.fixture(params=BROKERS)
def celery_broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LocalBroker]:
    """pytest-celery's broker: each kind in turn."""
    with open_broker(request.param, tmp_path) as opened:
        yield LocalBroker(opened)


@pytest.fixture
def celery_backend(celery_broker: LocalBroker) -> LocalBackend:
    """pytest-celery's result backend: the one that comes with the broker."""
    return LocalBackend(celery_broker.container)


@pytest.fixture(params=POOLS)
def celery_worker(
    request: pytest.FixtureRequest,
    celery_broker: LocalBroker,
    start_worker: Callable[..., Worker],
    celery_setup_app: celery.Celery,
) -> LocalWorker:
    """pytest-celery's worker: each pool in turn."""
    worker = start_worker(broker=celery_broker.container, wait=False, **request.param)
    return LocalWorker(worker, celery_setup_app)


@pytest.fixture
def celery_worker_cluster_config(
    celery_broker: LocalBroker, settings: dict[str, Any]
) -> dict[str, Any]:
    """The whole configuration of the workers."""
    return merged(celery_broker.container.config, settings)


@pytest.fixture
def celery_setup_cls() -> type[LocalSetup]:
    """The setup that needs no containers."""
    return LocalSetup
