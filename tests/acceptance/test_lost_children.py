"""Pool children that are killed, terminated or recycled: what they reported last is kept."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from celery_awa.store.migrations import migrate
from tests.acceptance.brokers import REDIS
from tests.acceptance.diary import Diary, Gate
from tests.acceptance.jobs import Jobs, opened_jobs
from tests.acceptance.workers import CAN_SPAWN, Worker
from tests.services.postgres import PrivatePostgres
from tests.waiting import eventually

Start = Callable[..., Worker]
#: Nothing is written by the way: what is found afterwards was on the page.
SELDOM = {"awa_write_interval": 60, "awa_heartbeat_interval": 60, "awa_stale_after": 240}
#: With one child, and a task that runs in the one that follows it: a child that is still being
#: spawned when its worker is killed does not notice.
METHODS = ["fork", *(["spawn"] * CAN_SPAWN)]


@pytest.mark.parametrize("start_method", METHODS)
def test_the_last_report_of_a_killed_child_is_kept_without_a_flush(
    start_worker: Start, client: ModuleType, jobs: Jobs, start_method: str
) -> None:
    start_worker(config=SELDOM, start_method=start_method, concurrency=1)
    sent = client.kill_process.delay(40, "x", {"last_id": 7})
    job = jobs.wait_for(sent.id, "failed", timeout=25)
    assert job.progress == {"percent": 40, "message": "x", "metadata": {"last_id": 7}}
    assert (job.attempt, len(job.errors)) == (1, 1)
    assert "SIGKILL" in job.errors[0].error
    assert "WorkerLostError" in repr(sent.get(timeout=10, propagate=False))
    assert client.echo.delay("the next child is up").get(timeout=20)


def test_the_last_report_of_a_child_killed_after_its_claim_is_kept(
    start_worker: Start, client: ModuleType, jobs: Jobs, tmp_path: Any, diary: Diary
) -> None:
    start_worker(config={**SELDOM, "awa_claim_after": 0})
    before = tmp_path / "before"
    sent = client.kill_process.delay(40, "x", {"last_id": 7}, before=str(before))
    diary.wait_for("reported", sent.id)
    running = jobs.wait_for(sent.id, "running")
    before.touch()
    job = jobs.wait_for(sent.id, "failed", timeout=25)
    assert running.progress is None
    assert job.progress == {"percent": 40, "message": "x", "metadata": {"last_id": 7}}
    assert (job.attempt, job.run_lease) == (1, 1)


def test_a_lost_child_of_a_late_acknowledged_task_fails_as_celery_says(
    start_worker: Start, client: ModuleType, jobs: Jobs
) -> None:
    start_worker(config={**SELDOM, "task_acks_late": True})
    sent = client.kill_process.delay(40)
    job = jobs.wait_for(sent.id, "failed", timeout=25)
    assert job.percent == 40
    assert sent.get(timeout=10, propagate=False).__class__.__name__ == "WorkerLostError"


@pytest.mark.parametrize("start_method", METHODS)
@pytest.mark.parametrize("claim_after", [0, 30], ids=["claimed", "unclaimed"])
def test_a_returned_message_goes_on_from_the_killed_childs_last_report(
    start_worker: Start,
    client: ModuleType,
    jobs: Jobs,
    diary: Diary,
    tmp_path: Any,
    start_method: str,
    claim_after: float,
) -> None:
    late = {"task_acks_late": True, "task_reject_on_worker_lost": True}
    start_worker(
        config={**SELDOM, **late, "awa_claim_after": claim_after},
        start_method=start_method,
        concurrency=1,
    )
    sent = client.kill_process.delay(40, "x", {"last_id": 7}, marker=str(tmp_path / "killed"))
    assert sent.get(timeout=25) == {"last_id": 7}
    job = jobs.wait_for(sent.id, "completed")
    assert (job.attempt, job.errors) == (2, ())
    assert len(diary.entries("began", sent.id)) == 2


@pytest.mark.redis
@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_a_message_returned_through_redis_goes_on_from_the_last_report(
    start_worker: Start, client: ModuleType, jobs: Jobs, tmp_path: Any
) -> None:
    start_worker(config={**SELDOM, "task_acks_late": True, "task_reject_on_worker_lost": True})
    sent = client.kill_process.delay(40, "x", {"last_id": 7}, marker=str(tmp_path / "killed"))
    assert sent.get(timeout=25) == {"last_id": 7}
    assert jobs.wait_for(sent.id, "completed").attempt == 2


@pytest.mark.amqp
@pytest.mark.parametrize("broker", ["amqp"], indirect=True)
def test_a_message_returned_through_rabbitmq_goes_on_from_the_last_report(
    start_worker: Start, client: ModuleType, jobs: Jobs, tmp_path: Any
) -> None:
    start_worker(config={**SELDOM, "task_acks_late": True, "task_reject_on_worker_lost": True})
    sent = client.kill_process.delay(40, "x", {"last_id": 7}, marker=str(tmp_path / "killed"))
    assert sent.get(timeout=25) == {"last_id": 7}
    assert jobs.wait_for(sent.id, "completed").attempt == 2


def test_a_terminated_task_is_cancelled_with_its_last_report(
    start_worker: Start, client: ModuleType, jobs: Jobs, gate: Gate, diary: Diary
) -> None:
    start_worker(config=SELDOM)
    sent = client.report.delay(60, "x", gate=gate.path)
    diary.wait_for("reported", sent.id)
    sent.revoke(terminate=True)
    job = jobs.wait_for(sent.id, "cancelled")
    assert job.progress == {"percent": 60, "message": "x"}
    assert sent.get(timeout=10, propagate=False).__class__.__name__ == "TaskRevokedError"


def test_a_task_revoked_while_it_runs_ends_as_if_it_were_not(
    start_worker: Start, client: ModuleType, jobs: Jobs, gate: Gate, diary: Diary
) -> None:
    worker = start_worker()
    sent = client.report.delay(60, gate=gate.path, flush=True)
    diary.wait_for("reported", sent.id)
    sent.revoke()
    worker.wait_for_log(rf"Tasks flagged as revoked: {sent.id}")
    job = jobs.get(sent.id)
    gate.open()
    assert sent.get(timeout=10) == 60
    assert job is not None
    assert job.state == "running"
    jobs.wait_for(sent.id, "completed")


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_task_revoked_before_its_start_is_cancelled(
    start_worker: Start, client: ModuleType, jobs: Jobs, pool: str, diary: Diary
) -> None:
    worker = start_worker(pool=pool)
    sent = client.work.apply_async(countdown=3)
    worker.wait_for_log(rf"Task {client.work.name}\[{sent.id}\] received")
    sent.revoke()
    job = jobs.wait_for(sent.id, "cancelled")
    assert (job.progress, job.attempt) == (None, 0)
    assert diary.entries("began", sent.id) == []


def test_a_retry_that_is_revoked_while_it_waits_is_cancelled_and_keeps_its_progress(
    start_worker: Start, client: ModuleType, jobs: Jobs
) -> None:
    worker = start_worker()
    sent = client.retry_after.delay(10, countdown=3)
    jobs.wait_for(sent.id, "retryable")
    worker.wait_for_log(rf"\[{sent.id}\] received[\s\S]*\[{sent.id}\] received")
    sent.revoke()
    job = jobs.wait_for(sent.id, "cancelled")
    assert (job.metadata, job.attempt) == ({"last_id": 10}, 1)


def test_an_expired_task_is_cancelled(start_worker: Start, client: ModuleType, jobs: Jobs) -> None:
    sent = client.work.apply_async(expires=0.01)
    start_worker()
    assert jobs.wait_for(sent.id, "cancelled").attempt == 0


def test_children_that_serve_one_task_each_write_every_transition_and_leave_no_connection(
    start_worker: Start, client: ModuleType, private_postgres: PrivatePostgres
) -> None:
    url = private_postgres.url(private_postgres.create_database())
    migrate(url)
    logged = len(private_postgres.log())
    once = ["--max-tasks-per-child", "1"]
    worker = start_worker(options=once, concurrency=2, config={"awa_database_url": url})
    sent = [client.fail_after.delay(3) for _ in range(10)]
    sent += [client.autoretry_after.delay(3) for _ in range(5)]
    for one in sent:
        one.get(timeout=60, propagate=False)
    with opened_jobs(url) as jobs:
        states = [jobs.wait_for(one.id, "failed", "completed").state.value for one in sent]
    assert states == ["failed"] * 10 + ["completed"] * 5
    worker.stop(timeout=20)
    eventually(lambda: private_postgres.connections() == [], what="connections closed")
    for trouble in ("unexpected EOF", "could not receive", "reset by peer"):
        assert trouble not in private_postgres.log()[logged:]


# Not on files: without a hub Celery's own Supervisor thread ends now and then as it grows the pool.
@pytest.mark.parametrize("broker", [REDIS], indirect=True)
def test_autoscaled_children_have_pages_of_their_own(
    start_worker: Start, client: ModuleType, jobs: Jobs, gate: Gate, diary: Diary
) -> None:
    start_worker(config=SELDOM, options=["--autoscale", "4,1"])
    sent = [client.report.delay(10 * n, f"task {n}", gate=gate.path) for n in range(1, 5)]
    for one in sent:
        diary.wait_for("reported", one.id, timeout=30)
    pids = {entry["pid"] for entry in diary.entries("reported")}
    assert len(pids) == 4
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    percents = [jobs.wait_for(one.id, "failed", timeout=30).percent for one in sent]
    assert percents == [10, 20, 30, 40]


@pytest.mark.parametrize("folder", ["missing", "a file"])
def test_without_a_slate_children_heartbeat_for_themselves_and_it_is_said_once(
    start_worker: Start,
    client: ModuleType,
    jobs: Jobs,
    gate: Gate,
    diary: Diary,
    tmp_path: Any,
    folder: str,
) -> None:
    place = tmp_path / "no slate"
    if folder == "a file":
        place.touch()
    worker = start_worker(config={"awa_slate_dir": str(place), "awa_claim_after": 0})
    sent = client.report.delay(60, "x", gate=gate.path)
    diary.wait_for("reported", sent.id)
    first = eventually(lambda: (j := jobs.get(sent.id)) and j.percent == 60 and j)
    eventually(lambda: jobs.get(sent.id).heartbeat_at > first.heartbeat_at)
    gate.open()
    assert sent.get(timeout=10) == 60
    jobs.wait_for(sent.id, "completed")
    assert worker.log().count("no slate, so each child heartbeats for itself") == 1


def test_a_lost_child_without_a_slate_fails_its_job(
    start_worker: Start, client: ModuleType, jobs: Jobs, tmp_path: Any, diary: Diary
) -> None:
    start_worker(config={"awa_slate_dir": str(tmp_path / "none"), "awa_claim_after": 0})
    before = tmp_path / "before"
    sent = client.kill_process.delay(40, before=str(before))
    eventually(lambda: (j := jobs.get(sent.id)) and j.percent == 40)
    before.touch()
    job = jobs.wait_for(sent.id, "failed", timeout=25)
    assert (job.percent, job.attempt, len(job.errors)) == (40, 1, 1)


@pytest.mark.parametrize("claim_after", [0, 30], ids=["claimed", "unclaimed"])
def test_celerys_verdict_on_a_lost_child_without_a_slate_stands(
    start_worker: Start,
    client: ModuleType,
    jobs: Jobs,
    tmp_path: Any,
    diary: Diary,
    claim_after: float,
) -> None:
    """Celery acknowledged the message: what its row could bring back is over as well."""
    soon = {"awa_stale_after": 2, "awa_rescue_interval": 0.5, "awa_claim_after": claim_after}
    nowhere = {"awa_slate_dir": str(tmp_path / "none"), "task_acks_late": True}
    start_worker(config={**nowhere, **soon})
    sent = client.kill_process.delay(40)
    job = jobs.wait_for(sent.id, "failed", timeout=25)
    assert (job.attempt, len(job.errors), job.send_after) == (1, 1, None)
    assert "SIGKILL" in job.errors[0].error
    assert "WorkerLostError" in repr(sent.get(timeout=10, propagate=False))
    assert len(diary.entries("began", sent.id)) == 1


def test_a_child_that_holds_the_interpreter_goes_on_being_heartbeaten(
    start_worker: Start, client: ModuleType, jobs: Jobs, diary: Diary
) -> None:
    start_worker(config={"awa_claim_after": 0, "awa_stale_after": 1})
    sent = client.hold_interpreter.delay(5)
    diary.wait_for("reported", sent.id)
    beats = set()

    def six_beats() -> bool:
        job = jobs.get(sent.id)
        assert job is not None
        assert job.state == "running"
        beats.add(job.heartbeat_at)
        return len(beats) >= 6

    eventually(six_beats, timeout=10)
    assert diary.entries("released", sent.id) == []
    assert sent.get(timeout=20) is None
    jobs.wait_for(sent.id, "completed")


def test_heartbeats_and_progress_go_on_through_a_warm_stop(
    start_worker: Start, client: ModuleType, jobs: Jobs, gate: Gate, diary: Diary
) -> None:
    worker = start_worker(config={"awa_claim_after": 0})
    sent = client.report_until.delay(gate.path)
    diary.wait_for("reported", sent.id)
    worker.kill(signal.SIGTERM)
    worker.wait_for_log("Warm shutdown")
    before = eventually(lambda: (j := jobs.get(sent.id)) and j.progress and j)
    after = eventually(
        lambda: (
            (j := jobs.get(sent.id))
            and j.heartbeat_at > before.heartbeat_at
            and j.progress != before.progress
            and j
        )
    )
    assert after.state == "running"
    gate.open()
    worker.stop(timeout=20)
    assert jobs.wait_for(sent.id, "completed").progress is None


def test_no_slate_is_left_by_a_worker_that_stops(
    start_worker: Start, client: ModuleType, settings: dict[str, Any]
) -> None:
    worker = start_worker()
    folder = settings["awa_slate_dir"]
    during = [name for name in os.listdir(folder) if not name.endswith(".lock")]
    worker.stop(timeout=20)
    assert len(during) == 1
    assert os.listdir(folder) == []


def test_what_ends_a_child_strikes_no_thread_of_ours(
    start_worker: Start, client: ModuleType, diary: Diary, gate: Gate
) -> None:
    """Else it could strike while the child holds a lock that it shares with its siblings."""
    start_worker()
    client.report.delay(40, "x", gate=gate.path, flush=True)
    pid = diary.wait_for("reported")["pid"]
    others = [Path(f"/proc/{pid}/task/{name}") for name in os.listdir(f"/proc/{pid}/task")]
    blocked = [
        int(re.search(r"SigBlk:\s*(\w+)", (other / "status").read_text())[1], 16)
        for other in others
        if other.name != str(pid)
    ]
    assert blocked
    assert all(mask & 1 << signal.SIGTERM - 1 for mask in blocked)
