"""The ways in which Celery itself ends an attempt, or loses it, and what the row says then.

Endings by the task's own doing are in test_lifecycle.py, lost pool children in
test_lost_children.py, lost workers in test_rescue.py.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import celery
import psycopg
import pytest

from tests.acceptance.brokers import AMQP, Broker
from tests.acceptance.diary import Diary, Gate
from tests.acceptance.jobs import Jobs, outcome
from tests.acceptance.workers import Worker
from tests.faults import Proxy
from tests.waiting import eventually

Start = Callable[..., Worker]
APP = "tests.acceptance.apps.rescued"
LEFT = {"last_id": 7}
#: Nothing is written by the way, and nothing grows stale: what a test finds in a row was put there
#: by the end that it is about. What that leaves to the rescue is rescued at once.
SELDOM = {
    "awa_write_interval": 60,
    "awa_heartbeat_interval": 60,
    "awa_stale_after": 240,
    "awa_rescue_interval": 0.3,
    "awa_claim_after": 0,
}
CAN_RETRY_LOST = hasattr(celery.Task, "retry_on_worker_lost")  # Celery 5.7
GREEN = ["gevent", "eventlet"]


@pytest.fixture
def settings(settings: dict[str, Any]) -> dict[str, Any]:
    return {**settings, **SELDOM}


def make_due(url: str) -> None:
    """Whatever is unsent is to be sent now, and not ten seconds after it was written."""
    with psycopg.connect(url, autocommit=True) as connection:
        for table in ("jobs_hot", "scheduled_jobs"):
            connection.execute(
                f"UPDATE celery_awa.{table} SET send_after = now() WHERE send_after IS NOT NULL"
            )


def test_a_cold_stop_keeps_what_was_reported_last_and_brings_back_what_may_run_again(
    start: Start,
    client: ModuleType,
    jobs: Jobs,
    diary: Diary,
    gate: Gate,
    database_url: str,
) -> None:
    worker = start(concurrency=3)
    send = {
        task: task.apply_async((gate.path, "value"), {"flush": False})
        for task in (client.resume, client.resume_always, client.resume_late)
    }
    for one in send.values():
        diary.wait_for("left", one.id)
    worker.stop(signal.SIGQUIT, timeout=20)
    for one in send.values():
        assert jobs.wait_for(one.id, "failed", "available").metadata == LEFT
    make_due(database_url)
    start(concurrency=3)
    # Celery has acknowledged this one, says that it is to be retried, and forgets it.
    assert "the worker was stopped" in repr(outcome(send.pop(client.resume)))
    for one in send.values():
        diary.wait_for("began", one.id, count=2)
    gate.open()
    for one in send.values():
        assert outcome(one) == "value"
        job = jobs.wait_for(one.id, "completed")
        assert (job.attempt, job.rescues) == (2, 0)
        assert [entry["checkpoint"] for entry in diary.entries("began", one.id)] == [{}, LEFT]
    assert len(diary.entries("began")) == 5


def test_a_cold_stop_of_spawned_children_keeps_what_was_reported_last(
    start: Start, client: ModuleType, jobs: Jobs, diary: Diary, gate: Gate
) -> None:
    worker = start(start_method="spawn")
    late = client.resume_late.delay(gate.path, flush=False)
    early = client.resume.delay(gate.path, flush=False)
    for one in (late, early):
        diary.wait_for("left", one.id, timeout=20)
    worker.stop(signal.SIGQUIT)
    assert jobs.wait_for(late.id, "available").metadata == LEFT
    assert jobs.wait_for(early.id, "failed").metadata == LEFT


def test_a_task_that_succeeds_while_its_worker_waits_in_a_soft_shutdown_is_completed(
    start: Start, client: ModuleType, jobs: Jobs, diary: Diary, gate: Gate
) -> None:
    worker = start(concurrency=3, config={"worker_soft_shutdown_timeout": 1})
    obedient = [
        client.stop_when_asked.delay(gate.path),
        client.stop_late_when_asked.delay(gate.path),
    ]
    obstinate = client.resume_always.delay(gate.path, flush=False)
    diary.wait_for("waits", count=2)
    diary.wait_for("left", obstinate.id)
    worker.stop(signal.SIGQUIT, timeout=20)
    # Celery announces a retry of each of them all the same.
    for one in obedient:
        assert jobs.wait_for(one.id, "completed").attempt == 1
        assert outcome(one) == "worker_stopping"
    assert jobs.wait_for(obstinate.id, "available").metadata == LEFT


@pytest.mark.parametrize("times", [1, 2])
def test_a_cold_stop_waits_for_threads_unless_it_is_asked_for_twice(
    start: Start, client: ModuleType, jobs: Jobs, diary: Diary, gate: Gate, times: int
) -> None:
    worker = start("threads")
    sent = client.resume.delay(gate.path, "value", flush=False)
    diary.wait_for("left", sent.id)
    worker.kill(signal.SIGQUIT)
    worker.wait_for_log("Unrecoverable error: NotImplementedError")
    assert jobs.wait_for(sent.id, "running").heartbeat_at is not None
    if times == 1:
        gate.open()
        assert outcome(sent) == "value"
        assert jobs.wait_for(sent.id, "completed").attempt == 1
        return
    worker.kill(signal.SIGQUIT)
    eventually(lambda: not worker.running, timeout=20, what="end of the worker")
    job = jobs.wait_for(sent.id, "running")
    # To be rescued at once.
    assert (job.metadata, job.heartbeat_at) == (LEFT, None)


def test_a_cold_stop_of_a_solo_worker_fails_its_task_as_celery_says(
    start: Start, client: ModuleType, jobs: Jobs, diary: Diary, gate: Gate
) -> None:
    worker = start("solo")
    sent = client.resume.delay(gate.path, flush=False)
    diary.wait_for("left", sent.id)
    # Celery before 5.7 does not even stop.
    worker.kill(signal.SIGQUIT)
    assert "NotImplementedError" in repr(outcome(sent))
    assert jobs.wait_for(sent.id, "failed").metadata == LEFT


@pytest.mark.parametrize("pool", GREEN)
def test_a_cold_stop_of_greenlets_brings_back_what_may_run_again(
    start: Start,
    client: ModuleType,
    jobs: Jobs,
    diary: Diary,
    gate: Gate,
    database_url: str,
    pool: str,
) -> None:
    # Celery takes what it killed for a success, and acknowledges it.
    worker = start(pool)
    late = client.resume_late.delay(gate.path, "value", flush=False)
    diary.wait_for("left", late.id)
    worker.stop(signal.SIGQUIT, timeout=20)
    job = jobs.wait_for(late.id, "available")
    assert (job.metadata, job.attempt) == (LEFT, 1)
    make_due(database_url)
    start(pool)
    diary.wait_for("began", late.id, count=2)
    gate.open()
    assert outcome(late) == "value"
    assert jobs.wait_for(late.id, "completed").rescues == 0


@pytest.mark.parametrize("pool", ["threads", "solo", *GREEN])
def test_an_exit_that_celery_keeps_no_trace_of_is_treated_by_the_tasks_policy(
    start: Start, client: ModuleType, jobs: Jobs, diary: Diary, pool: str
) -> None:
    worker = start(pool)
    again = client.exit_and_come_again.delay()
    if pool == "solo":
        eventually(lambda: not worker.running, what="end of the worker")
        worker.start()
    assert outcome(again) == LEFT
    # Counted, so that it does not go on for ever.
    assert jobs.wait_for(again.id, "completed").rescues == 1
    for_good = client.leave_by_exit.delay()
    if pool == "solo":
        eventually(lambda: not worker.running, what="end of the worker")
        worker.start()
    assert "SystemExit: 3" in repr(outcome(for_good))
    assert jobs.wait_for(for_good.id, "failed").metadata == LEFT
    assert len(diary.entries("began")) == 3


def test_a_task_revoked_by_a_header_is_cancelled_with_its_last_report(
    start: Start, client: ModuleType, jobs: Jobs, diary: Diary, gate: Gate
) -> None:
    worker = start()
    signature = client.resume.s(gate.path, flush=False)
    signature.stamp(customer="c1")
    sent, waiting = signature.apply_async(), signature.apply_async(countdown=2)
    diary.wait_for("left", sent.id)
    worker.wait_for_log(rf"\[{waiting.id}\] received")
    client.app.control.revoke_by_stamped_headers({"customer": ["c1"]}, terminate=True)
    for one, found in ((sent, LEFT), (waiting, {})):
        assert jobs.wait_for(one.id, "cancelled").metadata == found
        assert "TaskRevokedError" in repr(outcome(one))
    assert len(diary.entries("began")) == 1


def test_a_message_that_celery_returns_at_the_hard_limit_goes_on_from_the_last_report(
    start: Start, client: ModuleType, jobs: Jobs, diary: Diary, gate: Gate, database_url: str
) -> None:
    name = "task_acks_on_timeout" if CAN_RETRY_LOST else "task_acks_on_failure_or_timeout"
    start(config={name: False})
    sent = client.resume_late.apply_async((gate.path, "value"), {"flush": False}, time_limit=1)
    diary.wait_for("began", sent.id, count=2)
    gate.open()
    job = jobs.wait_for(sent.id, "completed", "failed")
    assert [entry["checkpoint"] for entry in diary.entries("began", sent.id)] == [{}, LEFT]
    assert (job.state, job.attempt) == ("completed", 2)


@pytest.mark.skipif(not CAN_RETRY_LOST, reason="this Celery does not retry lost tasks")
def test_a_lost_child_whose_task_celery_retries_goes_on_from_the_last_report(
    start: Start, client: ModuleType, jobs: Jobs, diary: Diary
) -> None:
    once = {"retry_on_worker_lost": True, "max_retries": 1, "default_retry_delay": 0}
    start(config={"task_annotations": {"*": once}})
    sent = client.die.delay(40, advance=True)
    assert "WorkerLostError" in repr(outcome(sent, timeout=30))
    job = jobs.wait_for(sent.id, "failed")
    assert (job.attempt, job.retries, job.rescues) == (2, 1, 0)
    assert [e["checkpoint"] for e in diary.entries("began", sent.id)] == [{}, {"attempt": 1}]


@pytest.mark.parametrize("broker", [AMQP], indirect=True)
def test_an_attempt_outlives_its_connection_to_the_broker_and_the_copy_is_dropped(
    start: Start,
    client: ModuleType,
    jobs: Jobs,
    diary: Diary,
    gate: Gate,
    broker: Broker,
    proxy_to: Callable[[str], Proxy],
) -> None:
    proxy = proxy_to(broker.url)
    worker = start(config={"broker_url": proxy.through(broker.url)})
    sent = client.resume_late.delay(gate.path, "value")
    diary.wait_for("left", sent.id)
    proxy.reset()
    worker.wait_for_log(rf"(\[{sent.id}\] received[\s\S]*){{2}}")
    gate.open()
    assert outcome(sent) == "value"
    # Celery may have put it behind the first, in the same child.
    worker.wait_for_log(rf"a copy of task {sent.id} is dropped")
    job = jobs.wait_for(sent.id, "completed")
    assert (job.attempt, job.run_lease, len(diary.entries("began"))) == (1, 1, 1)


@pytest.mark.parametrize("broker", [AMQP], indirect=True)
def test_an_attempt_that_is_cancelled_with_its_connection_goes_on_from_the_last_report(
    start: Start,
    client: ModuleType,
    jobs: Jobs,
    diary: Diary,
    gate: Gate,
    broker: Broker,
    proxy_to: Callable[[str], Proxy],
) -> None:
    proxy = proxy_to(broker.url)
    cancel = {"worker_cancel_long_running_tasks_on_connection_loss": True}
    start(config={"broker_url": proxy.through(broker.url), **cancel})
    sent = client.resume_late.delay(gate.path, "value", flush=False)
    diary.wait_for("left", sent.id)
    proxy.reset()
    again = diary.wait_for("began", sent.id, count=2)
    gate.open()
    assert again["checkpoint"] == LEFT
    assert outcome(sent) == "value"
    job = jobs.wait_for(sent.id, "completed")
    assert (job.attempt, job.rescues, len(diary.entries("began"))) == (2, 0, 2)


def test_what_celery_cannot_store_fails_and_is_told_once_the_backend_is_back(
    start: Start,
    client: ModuleType,
    jobs: Jobs,
    diary: Diary,
    gate: Gate,
    tmp_path: Path,
) -> None:
    results = Path(client.app.conf.result_backend.removeprefix("file://"))
    # A solo worker ends by what it cannot store.
    start()
    returns = client.resume_always.delay(gate.path)
    diary.wait_for("left", returns.id)
    # A file in the folder's place: Celery sends no signal of an end that it cannot store.
    results.rename(tmp_path / "away")
    results.touch()
    gate.open()
    raises = client.parse_row.delay()
    failed = {
        returns: jobs.wait_for(returns.id, "failed"),
        raises: jobs.wait_for(raises.id, "failed"),
    }
    assert "NotADirectoryError" in failed[returns].errors[-1].error
    assert failed[raises].errors[-1].error == "Unlucky: after the checkpoint"
    assert {job.attempt for job in failed.values()} == {1}
    results.unlink()
    (tmp_path / "away").rename(results)
    for one in failed:
        # Ours, or Celery's own if the folder was quicker than its second try.
        assert isinstance(outcome(one), Exception)
    assert len(diary.entries("began", returns.id)) == 1
