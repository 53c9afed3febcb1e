"""gevent and eventlet: a real thread beats the heart, and no greenlet waits for the database."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import psycopg
import pytest

from tests.acceptance.diary import Diary, Gate
from tests.acceptance.jobs import Jobs
from tests.acceptance.workers import GREEN_POOLS, Worker
from tests.faults import Proxy
from tests.waiting import eventually

Start = Callable[..., Worker]
APP = "tests.acceptance.apps.green"

pytestmark = pytest.mark.parametrize("pool", GREEN_POOLS)


@pytest.fixture
def start(start_worker: Start, pool: dict[str, Any]) -> Start:
    def start(**options: Any) -> Worker:
        return start_worker(**{"app": APP, **pool, **options})

    return start


def test_the_heart_beats_while_a_greenlet_computes(
    start: Start, client: ModuleType, jobs: Jobs, diary: Diary, gate: Gate
) -> None:
    start()
    sent = client.compute.delay(gate.path)
    assert diary.wait_for("computing", sent.id)["flushed"] is True
    wait_for_heartbeats(jobs, sent.id)
    gate.open()
    assert sent.get(timeout=20) > 0
    jobs.wait_for(sent.id, "completed")


def wait_for_heartbeats(jobs: Jobs, task_id: str) -> None:
    """Wait until three heartbeats of a running attempt have come in."""
    seen = set()

    def beaten() -> bool:
        seen.add(jobs.wait_for(task_id, "running").heartbeat_at)
        return len(seen) > 3

    eventually(beaten)


def test_greenlets_go_on_while_others_wait_for_a_database_that_says_nothing(
    start: Start,
    client: ModuleType,
    jobs: Jobs,
    diary: Diary,
    tmp_path: Path,
    database_url: str,
) -> None:
    silent, end = Gate(tmp_path / "silent"), Gate(tmp_path / "end")
    with Proxy.before(database_url) as proxy:
        start(config={"awa_database_url": proxy.through(database_url)})
        ticking = client.tick.delay(end.path)
        waiting = [client.flush.delay(silent.path, 2.0) for _ in range(5)]
        for one in waiting:
            assert diary.wait_for("flushed", one.id)["flushed"] is True
        diary.wait_for("ticking", ticking.id)
        proxy.swallow()
        silent.open()
        # Each has waited for its flush, and by courtesy for its end.
        reasons = [one.get(timeout=20) for one in waiting]
        end.open()
        longest = ticking.get(timeout=20)
        proxy.deliver()
        for one in waiting:
            jobs.wait_for(one.id, "completed")
    assert all("did not confirm within 2 s" in reason for reason in reasons)
    assert all(2 <= diary.wait_for("tried", one.id)["seconds"] < 4 for one in waiting)
    assert longest < 1


def test_fifty_greenlets_flush_over_one_connection(
    start: Start, client: ModuleType, diary: Diary, gate: Gate, database_url: str
) -> None:
    worker = start()
    sent = [client.flush_often.delay(10, gate.path) for _ in range(50)]
    for one in sent:
        assert diary.wait_for("flushed", one.id, timeout=30)["confirmed"] == 10
    with psycopg.connect(database_url) as connection:
        (count,) = connection.execute(
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE application_name = 'celery-awa' AND datname = current_database()"
        ).fetchone() or (None,)
    gate.open()
    assert [one.get(timeout=20) for one in sent] == [10] * 50
    assert count == 1
    assert "celery-awa" not in worker.log()


def test_each_greenlet_finds_its_own_attempt_and_what_it_spawns_takes_the_handle(
    start: Start, client: ModuleType, diary: Diary, gate: Gate
) -> None:
    start()
    sent = [client.look_around.delay(gate.path) for _ in range(3)]
    for one in sent:
        diary.wait_for("began", one.id)
    gate.open()
    looked = [diary.wait_for("looked", one.id) for one in sent]
    assert [entry["found"] for entry in looked] == [[True, False, False]] * 3
    assert [entry["metadata"] for entry in looked] == [{"by": "the handle"}] * 3
    assert len({entry["token"] for entry in looked}) == 3


def test_a_terminated_greenlet_leaves_its_job_cancelled_with_its_progress(
    start: Start, client: ModuleType, jobs: Jobs, diary: Diary, gate: Gate
) -> None:
    worker = start()
    sent = client.report.delay(60, gate.path)
    other = client.report.delay(70, gate.path)
    for one in (sent, other):
        diary.wait_for("reported", one.id)
    client.app.control.revoke(sent.id, terminate=True, destination=[worker.name])
    job = jobs.wait_for(sent.id, "cancelled")
    gate.open()
    assert other.get(timeout=20) == {}
    assert job.progress == {"percent": 60, "metadata": {"last": 60}}
    jobs.wait_for(other.id, "completed")


def test_a_hard_time_limit_counts_where_the_pool_has_one_and_a_soft_one_nowhere(
    start: Start,
    client: ModuleType,
    jobs: Jobs,
    diary: Diary,
    gate: Gate,
    pool: dict[str, Any],
) -> None:
    start()
    soft = client.report.apply_async((30, gate.path), soft_time_limit=1)
    hard = client.report.apply_async((60, gate.path), time_limit=1)
    began = diary.wait_for("reported", hard.id)["at"]
    if pool["pool"] == "gevent":
        assert "TimeLimitExceeded" in repr(hard.get(timeout=20, propagate=False))
        job = jobs.wait_for(hard.id, "failed")
        assert job.percent == 60
        assert len(job.errors) == 1
    eventually(lambda: time.time() > began + 2, what="the end of both limits")
    gate.open()
    assert soft.get(timeout=20) == {}
    if pool["pool"] == "eventlet":
        assert hard.get(timeout=20) == {}
        jobs.wait_for(hard.id, "completed")


def test_a_warm_stop_waits_for_a_greenlet_whose_heart_beats_on(
    start: Start, client: ModuleType, jobs: Jobs, diary: Diary, gate: Gate
) -> None:
    worker = start()
    sent = client.report.delay(60, gate.path)
    diary.wait_for("reported", sent.id)
    worker.kill(signal.SIGTERM)
    worker.wait_for_log("Warm shutdown")
    wait_for_heartbeats(jobs, sent.id)
    gate.open()
    assert worker.stop(timeout=20) == 0
    assert jobs.wait_for(sent.id, "completed").attempt == 1


def test_a_greenlet_that_ends_within_a_soft_stop_completes(
    start: Start, client: ModuleType, jobs: Jobs, diary: Diary, gate: Gate
) -> None:
    worker = start(config={"worker_soft_shutdown_timeout": 20})
    sent = client.report.delay(60, gate.path)
    diary.wait_for("reported", sent.id)
    worker.kill(signal.SIGQUIT)
    worker.wait_for_log("Initiating Soft Shutdown")
    gate.open()
    assert sent.get(timeout=20) == {}
    worker.process.wait(20)
    assert jobs.wait_for(sent.id, "completed").attempt == 1


def test_a_database_that_says_nothing_holds_no_stop_up(
    start: Start, client: ModuleType, diary: Diary, gate: Gate, database_url: str
) -> None:
    with Proxy.before(database_url) as proxy:
        worker = start(config={"awa_database_url": proxy.through(database_url)})
        sent = client.report.delay(60, gate.path)
        diary.wait_for("reported", sent.id)
        proxy.swallow()
        gate.open()
        assert sent.get(timeout=20) == {}
        assert worker.stop(timeout=20) == 0
        assert "the database did not confirm all that was left to write" in worker.log()


def test_the_tasks_of_a_killed_worker_are_sent_again_by_another(
    start: Start, client: ModuleType, jobs: Jobs, diary: Diary, gate: Gate
) -> None:
    soon = {"awa_rescue_interval": 0.5, "awa_stale_after": 1.5, "task_acks_late": True}
    first = start(config=soon)
    sent = client.report.delay(60, gate.path)
    diary.wait_for("reported", sent.id)
    first.kill()
    start(config=soon)
    again = diary.wait_for("reported", sent.id, count=2, timeout=20)
    gate.open()
    assert sent.get(timeout=20) == {"last": 60}
    assert again["found"] == {"last": 60}
    assert jobs.wait_for(sent.id, "completed").attempt == 2


def test_what_is_wrong_with_the_database_is_told_and_so_is_its_return(
    start: Start, client: ModuleType, diary: Diary, gate: Gate, database_url: str
) -> None:
    with Proxy.before(database_url) as proxy:
        proxy.refuse()
        worker = start(config={"awa_database_url": proxy.through(database_url)})
        worker.wait_for_log("celery-awa cannot use its database, tasks go on without it: ")
        proxy.accept()
        worker.wait_for_log("celery-awa can use its database again")
