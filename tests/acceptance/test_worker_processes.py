"""The harness itself, on plain Celery: workers start, work, die and stop as tests ask."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from celery.exceptions import WorkerLostError

from tests.acceptance.brokers import AMQP, REDIS
from tests.acceptance.diary import Diary
from tests.acceptance.workers import POOLS
from tests.waiting import eventually


@pytest.fixture
def settings(diary: Diary) -> dict[str, Any]:
    """No plugin, no database."""
    return {"test_diary": str(diary.path), "test_plain": True, "worker_lost_wait": 1.0}


def outcome(result: Any) -> Any:
    """The return value, polled often: results in files announce nothing."""
    return result.get(timeout=20, interval=0.05)


@pytest.mark.parametrize("pool", POOLS)
def test_every_pool_runs_tasks_and_stops_warm(pool, start_worker, client, diary, gate):
    worker = start_worker(**pool)
    held = client.report.delay(40, "x", gate=gate.path)
    began = diary.wait_for("reported", held.id)
    children = worker.children()
    assert len(children) == (2 if pool["pool"] == "prefork" else 0)
    assert began["pid"] in (children or [worker.pid])
    gate.open()
    assert outcome(held) == 40
    assert worker.stop() == 0
    # The tracker that comes with spawn ends a moment after its worker.
    eventually(lambda: worker.process.family() == [], what="end of all that it started")


def test_a_killed_child_is_replaced_and_its_task_fails(start_worker, client, diary):
    worker = start_worker()
    children = worker.children()
    assert len(children) == 2
    lost = client.kill_process.delay(40, "x")
    child = diary.wait_for("reported", lost.id)["pid"]
    assert child in children
    with pytest.raises(WorkerLostError, match="signal 9"):
        outcome(lost)
    worker.wait_until_replaced(child)
    assert outcome(client.echo.delay("still there")) == "still there"


@pytest.mark.parametrize("broker", [REDIS, AMQP], indirect=True)
def test_a_returned_message_runs_again(start_worker, client, diary, broker, tmp_path: Path):
    late = {"task_acks_late": True, "task_reject_on_worker_lost": True}
    start_worker(config=late)
    result = client.kill_process.delay(40, marker=str(tmp_path / "killed"))
    assert outcome(result) == {}
    assert len(diary.entries("began", result.id)) == 2


def test_a_killed_worker_takes_its_children_along(start_worker, client, diary, gate):
    worker = start_worker()
    client.work.delay(gate.path)
    diary.wait_for("began")
    assert len(worker.process.family()) >= 3
    worker.kill()
    eventually(lambda: worker.process.family() == [], what="the whole family is gone")
    assert worker.returncode == -signal.SIGKILL


def test_a_stopped_worker_can_start_again(start_worker, client):
    worker = start_worker(pool="solo", concurrency=1)
    worker.stop()
    worker.start()
    worker.ready()
    assert outcome(client.echo.delay("again")) == "again"


def test_several_workers_differ_in_options(start_worker, client, diary):
    start_worker(pool="solo", options=["--queues", "other"])
    start_worker(pool="threads")
    first = client.report.apply_async((1,), queue="other")
    second = client.report.delay(2)
    assert [outcome(first), outcome(second)] == [1, 2]
    pids = {diary.wait_for("reported", result.id)["pid"] for result in (first, second)}
    assert len(pids) == 2


def test_a_worker_in_a_thread_serves_the_memory_broker(start_in_thread, diary):
    client = start_in_thread()
    result = client.retry_after.delay(3)
    assert outcome(result) == {}
    assert {entry["pid"] for entry in diary.entries("began", result.id)} == {os.getpid()}


def test_a_worker_that_cannot_start_shows_why(start_worker):
    with pytest.raises(RuntimeError, match="no_such_module"):
        start_worker(app="tests.acceptance.apps.no_such_module")


def test_setups_of_pytest_celery_run_on_local_processes(celery_setup, diary):
    task = celery_setup.app.tasks["tests.acceptance.apps.basic.report"]
    result = task.delay(7)
    assert outcome(result) == 7
    assert diary.wait_for("reported", result.id)
    celery_setup.worker.assert_log_exists("succeeded in")


def test_the_tasks_end_as_their_names_say(start_in_thread, diary, tmp_path: Path):
    client = start_in_thread()
    ends = [
        (client.fail_after.s(3), "FAILURE"),
        (client.return_unserialisable.s(3), "FAILURE"),
        (client.retry_after.s(3), "SUCCESS"),
        (client.autoretry_after.s(3), "SUCCESS"),
        (client.retry_and_go_on.s(), "SUCCESS"),
        (client.replace_by.s("echo", 5), "SUCCESS"),
        (client.reject_after.s(3, True, str(tmp_path / "back")), "SUCCESS"),
        (client.report_in_threads.s(2, 5), "SUCCESS"),
        (client.report_in_coroutine.s(), "SUCCESS"),
        (client.call_other_task.s(), "SUCCESS"),
        (client.report_unbound.s(1, "x"), "SUCCESS"),
        (client.shared_report.s(1, "x"), "SUCCESS"),
        (client.hold_interpreter.s(0.01), "SUCCESS"),
        (client.brief.s(), "SUCCESS"),
    ]
    results = [signature.delay() for signature, _ in ends]

    def all_ended() -> bool:
        assert [result.state for result in results] == [state for _, state in ends]
        return True

    eventually(all_ended)


def test_what_is_ignored_or_rejected_runs_and_is_never_heard_of(start_in_thread, diary, tmp_path):
    client = start_in_thread()
    ignored = client.ignore_after.delay(3)
    rejected = client.reject_after.delay(3, False, str(tmp_path / "gone"))
    assert outcome(client.echo.delay("after them")) == "after them"
    assert diary.entries("began", ignored.id)
    assert diary.entries("began", rejected.id)
    assert ignored.state == "PENDING"
    # Celery 5.5 says nothing of a rejected task, later ones call it failed.
    assert rejected.state in ("PENDING", "FAILURE")
