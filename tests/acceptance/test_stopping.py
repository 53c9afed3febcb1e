"""How a task learns that it had better stop, and why, in every pool."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from celery_awa.store.canonical import open_store
from tests.acceptance.diary import Diary, Gate
from tests.acceptance.jobs import Jobs, outcome
from tests.acceptance.messages import send_and_keep
from tests.acceptance.workers import FAST, Worker

Start = Callable[..., Worker]
APP = "tests.acceptance.apps.rescued"
POOLS = ["prefork", "threads", "solo", "gevent", "eventlet"]


@pytest.fixture
def settings(settings: dict[str, Any]) -> dict[str, Any]:
    return {**settings, **FAST, "awa_stale_after": 5}


@pytest.mark.parametrize("pool", POOLS)
def test_a_task_learns_of_a_cancellation_and_of_its_workers_stop(
    start: Start,
    client: ModuleType,
    jobs: Jobs,
    diary: Diary,
    gate: Gate,
    database_url: str,
    pool: str,
) -> None:
    worker = start(pool)
    cancelled = client.stop_when_asked.delay(gate.path)
    waits = diary.wait_for("waits", cancelled.id)
    assert (waits["should_stop"], waits["stop_reason"]) == (False, None)
    store = open_store(database_url, "celery_awa")
    assert store.request_cancel(cancelled.id) == "requested"
    store.close()
    assert outcome(cancelled) == "cancel"

    stopped = client.stop_when_asked.delay(gate.path)
    diary.wait_for("waits", stopped.id)
    worker.stop(timeout=20)
    assert outcome(stopped) == "worker_stopping"
    assert diary.wait_for("asked", stopped.id)["should_stop"] is True
    # Whoever stops when asked may return a result, and what counts is how it ended.
    for one in (cancelled, stopped):
        assert jobs.wait_for(one.id, "completed").attempt == 1


@pytest.mark.parametrize("how", ["soft", "remote control"])
def test_every_way_to_stop_a_worker_asks_its_tasks_to_stop(
    start: Start, client: ModuleType, diary: Diary, gate: Gate, how: str
) -> None:
    worker = start(config={"worker_soft_shutdown_timeout": 1})
    sent = client.stop_when_asked.delay(gate.path)
    diary.wait_for("waits", sent.id)
    if how == "soft":
        worker.kill(signal.SIGQUIT)
    else:
        client.app.control.shutdown(destination=[worker.name])
    asked = diary.wait_for("asked", sent.id)
    assert asked["stop_reason"] == "worker_stopping"
    assert outcome(sent) == "worker_stopping"


@pytest.mark.parametrize("policy", ["requeue", "fail"])
def test_an_attempt_past_its_deadline_is_asked_to_stop_and_loses_its_job(
    start: Start, client: ModuleType, jobs: Jobs, diary: Diary, gate: Gate, policy: str
) -> None:
    config = {"task_annotations": {"*": {"lost_policy": policy, "deadline": 1}}}
    worker = start(config={**config, "awa_rescue_in_workers": False})
    sent = client.outstay.delay(gate.path)
    diary.wait_for("overdue", sent.id)
    start(config=config)
    diary.wait_for("lease lost", sent.id)
    if policy == "fail":
        assert "TimeLimitExceeded" in repr(outcome(sent))
        jobs.wait_for(sent.id, "failed")
    else:
        again = diary.wait_for("began", sent.id, count=2)
        assert again["checkpoint"] == {"last_id": 7}
    Gate(Path(f"{gate.path}.1")).open()
    worker.wait_for_log(rf"\[{sent.id}\] ignored")
    job = jobs.get(sent.id)
    assert job is not None
    assert "TimeLimitExceeded: the deadline of 1.0 s is over" in job.errors[0].error
    assert job.metadata == {"last_id": 7}
    assert job.rescues == (policy == "requeue")


def test_an_attempt_whose_message_came_again_learns_that_it_has_lost_its_job(
    start: Start, client: ModuleType, jobs: Jobs, diary: Diary, gate: Gate
) -> None:
    # The row may not bring this task back, so the newcomer has it.
    start(config={"task_annotations": {"*": {"lost_policy": "fail"}}})
    sent, again = send_and_keep(client.flush_at_gate, gate.path)
    diary.wait_for("flushed first", sent.id)
    again()
    diary.wait_for("flushed first", sent.id, count=2)
    for attempt, (owns, reason) in enumerate([(False, "lease_lost"), (True, None)], 1):
        Gate(Path(f"{gate.path}.{attempt}")).open()
        flushed = diary.wait_for("flushed again", sent.id, count=attempt)
        told = (flushed["attempt"], flushed["flushed"], flushed["stop_reason"])
        assert told == (attempt, owns, reason)
    assert outcome(sent) is True
    assert jobs.wait_for(sent.id, "completed").run_lease == 2


def test_outside_an_attempt_and_in_eager_mode_nobody_is_asked_to_stop(client: ModuleType) -> None:
    task = client.stop_when_asked
    assert (task.should_stop, task.stop_reason) == (False, None)
    client.app.conf.task_always_eager = True
    assert client.look_when_overdue.delay().get() == [False, None]
