"""A database that goes away, refuses or cuts off: tasks and workers go on, rows follow."""

from __future__ import annotations

import signal
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from types import ModuleType
from typing import Any

import psycopg
import pytest

from celery_awa.model import Job
from celery_awa.store.migrations import migrate
from tests.acceptance.diary import Diary, Gate
from tests.acceptance.jobs import Jobs
from tests.acceptance.workers import Worker
from tests.faults import Proxy
from tests.services.pgbouncer import PgBouncer
from tests.services.postgres import PrivatePostgres
from tests.waiting import eventually

Start = Callable[..., Worker]
APP = "tests.acceptance.apps.enduring"
AWAY = "celery-awa cannot use its database, tasks go on without it: "
ENDS = {"SUCCESS": "completed", "FAILURE": "failed", "RETRY": "retryable"}


@pytest.fixture
def database_url(private_postgres: PrivatePostgres) -> str:
    """A migrated database on the server that the test may break."""
    url = private_postgres.url(private_postgres.create_database())
    migrate(url)
    return url


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
    # One a minute: it may be about the ended backends.
    worker.wait_for_log(AWAY)
    end_outage()
    before = jobs.wait_for(sent.id, "running")
    eventually(lambda: number_in(jobs.wait_for(sent.id, "running")) > number_in(before))
    gates[2].open()
    assert sent.get(timeout=20) > 100
    jobs.wait_for(sent.id, "completed")


def number_in(job: Job) -> int:
    """Which report the row shows."""
    return int((job.message or "").removeprefix("number "))


def test_tasks_that_live_through_a_long_outage_are_not_rescued(
    start: Start,
    client: ModuleType,
    jobs: Jobs,
    diary: Diary,
    tmp_path: Path,
    private_postgres: PrivatePostgres,
) -> None:
    """When it is back every attempt looks stale, but for that of whoever comes back first."""
    config = {
        "awa_heartbeat_interval": 3,
        "awa_stale_after": 6,
        "awa_rescue_interval": 0.2,
        # So that each worker takes one.
        "task_acks_late": True,
        "worker_prefetch_multiplier": 1,
    }
    workers = [start(concurrency=1, config=config) for _ in range(3)]
    gates = [Gate(tmp_path / f"gate {number}") for number in range(2)]
    sent = [client.flush_at_gates.delay([gate.path for gate in gates]) for _ in workers]
    for one in sent:
        assert diary.wait_for("tried", one.id)["flushed"] is True
    beaten = min(job.heartbeat_at for one in sent if (job := jobs.get(one.id)))
    private_postgres.stop()
    eventually(lambda: silent_since(beaten) > 10, timeout=20)
    private_postgres.start()
    eventually(lambda: all(silent_since(jobs.get(one.id).heartbeat_at) < 6 for one in sent))
    for number, gate in enumerate(gates, 2):
        gate.open()
        for one in sent:
            assert diary.wait_for("tried", one.id, count=number)["flushed"] is True
    for one in sent:
        assert one.get(timeout=20) is None
        job = jobs.wait_for(one.id, "completed")
        assert (job.attempt, job.rescues, job.errors) == (1, 0, ())
        assert len(diary.entries("tried", one.id)) == 3


def silent_since(moment: datetime) -> float:
    """Seconds since then."""
    return (datetime.now(timezone.utc) - moment).total_seconds()


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


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_network_that_swallows_everything_holds_up_neither_tasks_nor_the_stop(
    start: Start,
    client: ModuleType,
    diary: Diary,
    tmp_path: Path,
    proxy_to: Callable[[str], Proxy],
    database_url: str,
    pool: str,
) -> None:
    proxy = proxy_to(database_url)
    # The rescuer is in the midst of a pass, too.
    through = {"awa_database_url": proxy.through(database_url), "awa_rescue_interval": 0.1}
    worker = start(pool=pool, concurrency=3, config=through)
    gates = [Gate(tmp_path / f"gate {number}") for number in range(2)]
    going_on = client.go_on.delay([gate.path for gate in gates])
    ending = {how: client.end.delay(how, gates[0].path) for how in ("SUCCESS", "FAILURE")}
    assert diary.wait_for("tried", going_on.id)["flushed"] is True
    for one in ending.values():
        assert diary.wait_for("flushed", one.id)["flushed"] is True

    proxy.swallow()
    gates[0].open()
    # In its time (2 s), where the driver by itself would wait for ten and more.
    assert "did not confirm within 2 s" in diary.wait_for("tried", going_on.id, count=2)["reason"]
    wait_for_states(ending)
    worker.kill(signal.SIGTERM)
    gates[1].open()
    assert going_on.get(timeout=20) > 100
    # Nothing was delivered meanwhile: what ends here has given up.
    assert worker.stop(timeout=25) == 0
    worker.wait_for_log("celery-awa: the database did not confirm all that was left to write")
    proxy.deliver()


@pytest.mark.pgbouncer
def test_a_workers_whole_life_passes_through_a_pooler(
    start: Start,
    client: ModuleType,
    jobs: Jobs,
    diary: Diary,
    gate: Gate,
    private_postgres: PrivatePostgres,
    pgbouncer: PgBouncer,
    database_url: str,
) -> None:
    logged = len(private_postgres.log())
    through = {"awa_database_url": pgbouncer.through(database_url)}
    worker = start(concurrency=8, config=through)
    often = [client.flush_often.delay(50, gate.path) for _ in range(8)]
    for one in often:
        assert diary.wait_for("flushed", one.id, timeout=60)["confirmed"] == 50
    # A worker and eight children, and the transactions of all pass through these.
    ours = [name for name in private_postgres.connections() if name == "celery-awa"]
    assert 1 <= len(ours) <= pgbouncer.pool_size
    gate.open()
    assert [one.get(timeout=20) for one in often] == [50] * 8
    assert len({entry["pid"] for entry in diary.entries("began")}) == 8

    sent = {how: client.end.delay(how, gate.path) for how in ENDS}
    wait_for_states(sent)
    check_rows(jobs, sent)
    assert worker.stop(timeout=20) == 0
    assert all(jobs.wait_for(one.id, "completed").progress is None for one in often)
    assert "celery-awa" not in worker.log()
    assert "ERROR" not in private_postgres.log()[logged:]


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
