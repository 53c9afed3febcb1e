"""Fixtures of the runtime's unit tests: threads and processes over a store in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from celery_awa.runtime import breaker, claims, completed, errand
from celery_awa.runtime.database_thread import DatabaseThread
from celery_awa.runtime.slate import Slate
from celery_awa.runtime.task_process import TaskProcess
from celery_awa.runtime.trouble import Trouble
from celery_awa.runtime.worker_pages import WorkerPages
from tests.fake_store import FakeDatabase
from tests.runtime_parts import (
    SOON,
    MakeThread,
    StartProcess,
    StartWorker,
    described,
    new_token,
    settings,
)

from .children import Run, Running


@pytest.fixture
def database() -> FakeDatabase:
    """An empty database in memory."""
    return FakeDatabase()


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tried again is tried soon."""
    for module, name, seconds in (
        (breaker, "FIRST_PAUSE", 0.01),
        (breaker, "LONGEST_PAUSE", 0.02),
        (errand, "LOCKED_PAUSE", 0.01),
        (claims, "LOCKED_PAUSE", 0.01),
        (completed, "LOCKED_PAUSE", 0.01),
        (completed, "GATHER", 0.01),
    ):
        monkeypatch.setattr(module, name, seconds)


@pytest.fixture
def make_thread(database: FakeDatabase, short_pauses: None) -> Iterator[MakeThread]:
    """Makes database threads, and stops them after the test."""
    made: list[DatabaseThread] = []

    def make(**options: Any) -> DatabaseThread:
        made.append(DatabaseThread(database.open, Trouble(), **options))
        return made[-1]

    yield make
    database.come_back()
    for one in made:
        one.stop(SOON)


@pytest.fixture
def thread(make_thread: MakeThread) -> DatabaseThread:
    return make_thread()


@pytest.fixture
def start_process(database: FakeDatabase, short_pauses: None) -> Iterator[StartProcess]:
    """Starts processes in which nothing happens by itself but what a setting says."""
    made: list[TaskProcess] = []

    def start(slate: Slate | None = None, **changed: Any) -> TaskProcess:
        made.append(TaskProcess(settings(**changed), database.open, Trouble(), slate=slate))
        return made[-1]

    yield start
    database.come_back()
    database.locked.clear()
    for one in made:
        one.database.stop(SOON)


@pytest.fixture
def process(start_process: StartProcess) -> TaskProcess:
    return start_process()


@pytest.fixture
def slate(tmp_path: Path) -> Iterator[Slate]:
    """A slate of eight pages."""
    slate = Slate.create(str(tmp_path), 8, 66_560)
    yield slate
    slate.close(unlink=True)


@pytest.fixture
def start_worker(database: FakeDatabase, short_pauses: None) -> Iterator[StartWorker]:
    """Makes workers that look at their pages all the time."""
    made: list[WorkerPages] = []

    def start(slate: Slate | None, **changed: Any) -> WorkerPages:
        often = {"write_interval": 0.01, "heartbeat_interval": 0.02}
        made.append(WorkerPages(slate, settings(**(often | changed)), database.open, Trouble()))
        made[-1].start()
        return made[-1]

    yield start
    database.come_back()
    database.locked.clear()
    for one in made:
        one.database.stop(SOON)


@pytest.fixture
def worker(start_worker: StartWorker, slate: Slate) -> WorkerPages:
    return start_worker(slate)


@pytest.fixture
def run(database: FakeDatabase, slate: Slate) -> Iterator[Run]:
    """Starts a child with an attempt; claimed unless told otherwise."""
    running: list[Running] = []

    def run_one(task_id: str = "task", *, claim: bool = True, **options: object) -> Running:
        token = new_token()
        lease = database.open().claim(described(token, task_id)).lease if claim else None
        running.append(Running(slate, task_id, token=token, lease=lease, **options))  # type: ignore[arg-type]
        return running[-1]

    yield run_one
    for one in running:
        one.kill()
