"""Fixtures of the runtime's tests: processes over the real store; modules name it as a plugin."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from celery_awa.runtime.slate import Slate
from celery_awa.runtime.task_process import TaskProcess
from celery_awa.runtime.trouble import Trouble
from celery_awa.runtime.worker_pages import WorkerPages
from celery_awa.store.canonical import CanonicalStore, open_store
from celery_awa.store.migrations import migrate
from tests.conftest import SCHEMA, with_database
from tests.faults import Proxy
from tests.runtime_parts import SOON, StartProcess, StartWorker, settings
from tests.services.fixtures import (  # noqa: F401  # fixtures are found by being here
    pgbouncer,
    private_postgres,
    private_postgres_of_session,
    proxy_to,
)
from tests.services.postgres import PrivatePostgres


@pytest.fixture
def private_url(private_postgres: PrivatePostgres) -> str:  # noqa: F811  # the fixture above
    """A migrated database on a server that the test may break."""
    url = with_database(private_postgres.url(), private_postgres.create_database())
    migrate(url)
    return url


@pytest.fixture
def proxied(proxy_to: Callable[[str], Proxy], private_url: str) -> tuple[Proxy, str]:  # noqa: F811
    """A proxy, and the URL of such a database through it."""
    proxy = proxy_to(private_url)
    return proxy, proxy.through(private_url)


@pytest.fixture
def sent_statements(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the statements that all stores send from now on."""
    sent: list[str] = []
    run = CanonicalStore._run

    def noting(store: CanonicalStore, name: str, *arguments: Any, **parameters: Any) -> Any:
        sent.append(name)
        return run(store, name, *arguments, **parameters)

    monkeypatch.setattr(CanonicalStore, "_run", noting)
    return sent


@pytest.fixture
def start_process() -> Iterator[StartProcess]:
    """Starts a process that executes tasks, over the database at a URL."""
    with ExitStack() as stack:

        def start(
            url: str,
            *,
            slate: Slate | None = None,
            idle_after: float | None = None,
            **changed: Any,
        ) -> TaskProcess:
            process = TaskProcess(
                settings(**changed),
                lambda: open_store(url, SCHEMA),
                Trouble(),
                slate=slate,
                idle_after=idle_after,
            )
            stack.callback(process.database.stop, SOON)
            return process

        yield start


@pytest.fixture
def start_pages(worker_slate: Slate) -> Iterator[StartWorker]:
    """Starts the worker's side of the slate, over the database at a URL."""
    with ExitStack() as stack:

        def start(url: str, **changed: Any) -> WorkerPages:
            pages = WorkerPages(
                worker_slate, settings(**changed), lambda: open_store(url, SCHEMA), Trouble()
            )
            stack.callback(pages.database.stop, SOON)
            return pages

        yield start


@pytest.fixture
def worker_slate(tmp_path: Path) -> Iterator[Slate]:
    """A slate of eight pages."""
    slate = Slate.create(str(tmp_path), 8, 66_560)
    yield slate
    slate.close(unlink=True)


@pytest.fixture
def our_warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What our own log said, warnings and worse."""
    caplog.set_level(logging.INFO, "celery_awa")
    return lambda: [
        record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING
    ]
