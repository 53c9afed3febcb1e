"""A database that goes away, refuses or cuts off: tasks and workers go on, rows follow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psycopg
import pytest

from celery_awa.model import Job
from celery_awa.store.migrations import migrate
from tests.acceptance.diary import Diary, Gate
from tests.acceptance.jobs import Jobs, opened_jobs
from tests.acceptance.workers import Worker
from tests.services.postgres import PrivatePostgres
from tests.waiting import eventually

Start = Callable[..., Worker]
ENDURING = "tests.acceptance.apps.enduring"
AWAY = "celery-awa cannot use its database, tasks go on without it: "
ENDS = {"SUCCESS": "completed", "FAILURE": "failed", "RETRY": "retryable"}


@pytest.fixture
def database_url(private_postgres: PrivatePostgres) -> str:
    """A migrated database on the server that the test may break."""
    url = private_postgres.url(private_postgres.create_database())
    migrate(url)
    return url


@pytest.fixture
def jobs(database_url: str) -> Iterator[Jobs]:
    with opened_jobs(database_url) as opened:
        yield opened


@pytest.fixture
def client(load_client: Callable[..., ModuleType]) -> ModuleType:
    return load_client(ENDURING)


@pytest.fixture
def start(start_worker: Start) -> Start:
    def start(**options: Any) -> Worker:
        return start_worker(**{"app": ENDURING, **options})

    return start


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_what_ends_while_the_database_is_away_ends_as_without_it_and_is_written_later(
    start: Start,
    client: ModuleType,
    jobs: Jobs,
    diary: Diary,
    gate: Gate,
    private_postgres: PrivatePostgres,
    pool: str,
) -> None:
    private_postgres.stop()
    worker = start(pool=pool, concurrency=3)
    sent = {how: client.end.delay(how) for how in ENDS}
    wait_for_states(sent)
    worker.wait_for_log(f"{AWAY}.*Connection refused")
    private_postgres.start()
    check_rows(jobs, sent)

    sent = {how: client.end.delay(how, gate.path) for how in ENDS}
    for one in sent.values():
        assert diary.wait_for("flushed", one.id)["flushed"] is True
    private_postgres.stop(immediate=True)
    gate.open()
    wait_for_states(sent)
    private_postgres.start()
    check_rows(jobs, sent)
    # Once a minute and process, however often it tried.
    assert worker.log().count(AWAY) <= 1 + len(worker.children())
    assert "unexpected error" not in worker.log()


def wait_for_states(sent: dict[str, Any]) -> None:
    """Wait until the result backend says of each task how it ended."""
    eventually(lambda: [one.state for one in sent.values()] == list(sent), timeout=20)


def check_rows(jobs: Jobs, sent: dict[str, Any]) -> None:
    """Wait for the rows; all but that of the success keep what was reported last."""
    last = {"percent": 20, "message": "last", "metadata": {"last_id": 7}}
    for how, one in sent.items():
        job = jobs.wait_for(one.id, ENDS[how])
        assert job.attempt == 1
        assert job.progress == (None if how == "SUCCESS" else last)
    retried = jobs.get(sent["RETRY"].id)
    assert retried is not None
    assert retried.run_at is not None
    assert 250 < (retried.run_at - retried.created_at).total_seconds() < 310


@pytest.fixture(params=["stopped", "read only"])
def outage(
    request: pytest.FixtureRequest, private_postgres: PrivatePostgres
) -> tuple[Callable[[], None], Callable[[], None], str]:
    """What begins it, what ends it, and the reason that it gives."""
    if request.param == "stopped":
        return private_postgres.stop, private_postgres.start, "onnection refused"
    return (
        lambda: private_postgres.set_read_only(True),
        lambda: private_postgres.set_read_only(False),
        "read-only transaction",
    )


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_what_is_pending_when_the_database_comes_back_is_written(
    start: Start,
    client: ModuleType,
    jobs: Jobs,
    diary: Diary,
    tmp_path: Path,
    private_postgres: PrivatePostgres,
    outage: tuple[Callable[[], None], Callable[[], None], str],
    pool: str,
) -> None:
    begin_outage, end_outage, reason = outage
    worker = start(pool=pool, concurrency=1)
    gates = [Gate(tmp_path / f"gate {number}") for number in range(3)]
    sent = client.go_on.delay([gate.path for gate in gates])
    assert diary.wait_for("tried", sent.id)["flushed"] is True

    assert private_postgres.terminate_backends() >= 1
    gates[0].open()
    assert diary.wait_for("tried", sent.id, count=2)["flushed"] is True

    begin_outage()
    gates[1].open()
    tried = diary.wait_for("tried", sent.id, count=3)
    assert tried["flushed"] is None
    assert reason in tried["reason"]
    worker.wait_for_log(f"{AWAY}.*{reason}")
    end_outage()
    before = jobs.wait_for(sent.id, "running")
    eventually(lambda: number_in(jobs.wait_for(sent.id, "running")) > number_in(before))
    gates[2].open()
    assert sent.get(timeout=20) > 100
    jobs.wait_for(sent.id, "completed")


def number_in(job: Job) -> int:
    """Which report the row shows."""
    return int((job.message or "").removeprefix("number "))


def test_a_server_that_cuts_idle_sessions_off_is_not_noticed(
    start: Start,
    client: ModuleType,
    jobs: Jobs,
    diary: Diary,
    tmp_path: Path,
    private_postgres: PrivatePostgres,
    database_url: str,
) -> None:
    for setting in ("idle_session_timeout", "idle_in_transaction_session_timeout"):
        with psycopg.connect(database_url, autocommit=True) as connection:
            connection.execute(f"ALTER DATABASE {connection.info.dbname} SET {setting} = '1s'")

    def cut_off() -> int:
        return private_postgres.log().count("terminating connection due to idle-session timeout")

    seldom = {"awa_write_interval": 3, "awa_heartbeat_interval": 3}
    worker = start(concurrency=1, config=seldom)
    gates = [Gate(tmp_path / f"gate {number}") for number in range(2)]
    before = cut_off()
    sent = client.flush_at_gates.delay([gate.path for gate in gates])
    for count, gate in enumerate(gates, 1):
        assert diary.wait_for("tried", sent.id, count=count)["flushed"] is True
        # Child and worker, at each gate.
        eventually(lambda enough=before + 2 * count: cut_off() >= enough)
        gate.open()
    assert sent.get(timeout=20) is None
    assert diary.entries("tried", sent.id)[-1]["flushed"] is True
    jobs.wait_for(sent.id, "completed")
    assert "celery-awa" not in worker.log()


def test_children_flush_over_encrypted_connections_of_their_own(
    start: Start,
    client: ModuleType,
    diary: Diary,
    gate: Gate,
    private_postgres: PrivatePostgres,
    database_url: str,
) -> None:
    with psycopg.connect(database_url) as connection:
        url = private_postgres.url(connection.info.dbname, tls=True)
    worker = start(concurrency=4, config={"awa_database_url": url})
    sent = [client.flush_often.delay(100, gate.path) for _ in range(4)]
    for one in sent:
        assert diary.wait_for("flushed", one.id, timeout=30)["confirmed"] == 100
    with private_postgres.observe() as connection:
        encrypted = connection.execute(
            "SELECT ssl FROM pg_stat_activity JOIN pg_stat_ssl USING (pid)"
            " WHERE application_name = 'celery-awa'"
        ).fetchall()
    gate.open()
    assert [one.get(timeout=20) for one in sent] == [100] * 4
    assert encrypted == [(True,)] * 5
    assert len({entry["pid"] for entry in diary.entries("began")}) == 4
    assert "celery-awa" not in worker.log()
