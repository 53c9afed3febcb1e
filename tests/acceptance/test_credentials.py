"""Workers whose connections a function of the user's opens, with a password that changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from psycopg.conninfo import make_conninfo

from celery_awa import Client
from celery_awa.store.migrations import migrate
from tests.acceptance.diary import Diary, Gate
from tests.acceptance.workers import CAN_SPAWN, POOLS, Worker
from tests.services.postgres import PASSWORD_ROLE, PrivatePostgres
from tests.waiting import eventually

Start = Callable[..., Worker]
APP = "tests.acceptance.apps.rotating"
AWAY = "celery-awa cannot use its database, tasks go on without it: "


@pytest.fixture
def database_url(private_postgres: PrivatePostgres) -> str:
    """A migrated database, for a role that has a password."""
    url = private_postgres.url(private_postgres.create_database())
    migrate(url)
    private_postgres.set_password("first")
    return make_conninfo(url, user=PASSWORD_ROLE)


@pytest.fixture
def password(tmp_path: Path) -> Path:
    """The file from which the user's function reads the password."""
    file = tmp_path / "password"
    file.write_text("first")
    return file


@pytest.fixture
def settings(settings: dict[str, Any], password: Path, database_url: str) -> dict[str, Any]:
    # Where a URL counted beside the function, it would lead nowhere.
    return settings | {
        "awa_database_url": "postgresql://127.0.0.1:1/nowhere",
        "test_connect_url": database_url,
        "test_password_file": str(password),
    }


@pytest.mark.parametrize("options", POOLS)
def test_a_password_that_changes_while_a_task_runs_is_used_as_soon_as_it_is_known(
    start_worker: Start,
    client: ModuleType,
    diary: Diary,
    tmp_path: Path,
    private_postgres: PrivatePostgres,
    password: Path,
    options: dict[str, Any],
) -> None:
    worker = start_worker(app=APP, **{"concurrency": 1, **options})
    gates = [Gate(tmp_path / f"gate {number}") for number in range(2)]
    sent = client.flush_at_gates.delay([gate.path for gate in gates])
    assert diary.wait_for("tried", sent.id)["flushed"] is True

    private_postgres.set_password("second")
    private_postgres.terminate_backends()
    gates[0].open()
    refused = diary.wait_for("tried", sent.id, count=2)
    assert "connect= failed: OperationalError" in refused["reason"]

    password.write_text("second")
    gates[1].open()
    assert diary.wait_for("tried", sent.id, count=3)["flushed"] is True
    assert sent.get(timeout=20) == {"percent": 2}
    with Client(client.app) as reader:
        eventually(lambda: [job.state for job in reader.list_jobs()] == ["completed"])
    told = [line for line in worker.log().splitlines() if AWAY in line]
    assert len(told) <= 1 + len(worker.children())
    assert all("password authentication failed" in line for line in told)
    assert worker.stop() == 0


def test_what_a_killed_worker_left_is_adopted_and_its_task_rescued(
    start_worker: Start, client: ModuleType, diary: Diary, gate: Gate, settings: dict[str, Any]
) -> None:
    worker = start_worker(app=APP, concurrency=1)
    sent = client.flush_at_gates.delay([gate.path])
    assert diary.wait_for("tried", sent.id)["flushed"] is True
    worker.kill()
    eventually(lambda: not worker.process.family())
    slates = Path(settings["awa_slate_dir"])
    left = {path.name for path in slates.iterdir()}
    assert left
    start_worker(app=APP, concurrency=1)
    eventually(lambda: not left & {path.name for path in slates.iterdir()})
    # Long before it would be stale (30 s): its worker is known to be dead.
    with Client(client.app) as reader:
        eventually(lambda: [job.state for job in reader.list_jobs()] == ["failed"])


@pytest.mark.skipif(not CAN_SPAWN, reason="this Celery cannot spawn")
def test_a_function_that_cannot_be_passed_to_spawned_children_is_told_and_tasks_run(
    start_worker: Start, client: ModuleType, diary: Diary
) -> None:
    worker = start_worker(
        app=APP, concurrency=1, start_method="spawn", config={"test_nameless": True}
    )
    sent = client.flush_at_gates.delay([])
    told = "it cannot be passed to a spawned pool child, let it be a function of a module"
    assert told in diary.wait_for("tried", sent.id)["reason"]
    worker.wait_for_log(f"{AWAY}.*{told}")
    assert sent.get(timeout=20) is None
    assert "unexpected error" not in worker.log()
    assert worker.stop() == 0
