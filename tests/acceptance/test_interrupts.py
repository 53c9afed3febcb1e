"""Tasks that stop by themselves and go on: at a deploy, over time, by hand, and after a while."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from celery import chord

from celery_awa import Client
from tests.acceptance.brokers import on_every_broker
from tests.acceptance.diary import Diary, Gate
from tests.acceptance.jobs import Jobs, outcome
from tests.acceptance.workers import CAN_SPAWN, FAST, Worker
from tests.waiting import eventually

Start = Callable[..., Worker]
APP = "tests.acceptance.apps.resuming"
POOLS = ["prefork", "threads", "solo", "gevent", "eventlet"]


@pytest.fixture
def settings(settings: dict[str, Any]) -> dict[str, Any]:
    # Nobody rescues within the time of a test: what is sent again was sent by its own attempt.
    return {**settings, **FAST, "awa_stale_after": 60, "awa_rescue_interval": 60}


def items(diary: Diary, task_id: str) -> list[int]:
    return [entry["item"] for entry in diary.entries("item", task_id)]


@pytest.mark.parametrize("pool", POOLS)
def test_a_loop_stops_for_a_deploy_and_goes_on_in_another_worker(
    start: Start, client: ModuleType, jobs: Jobs, diary: Diary, pool: str
) -> None:
    first = start(pool)
    sent = client.loop.apply_async((10, 3), headers={"customer": "c7"})
    diary.wait_for("item", sent.id, count=4)
    first.stop(timeout=20)
    job = jobs.wait_for(sent.id, "available")
    assert (job.attempt, job.retries, job.send_after) == (0, 0, None)
    assert (job.progress or {})["current"] == 4
    start(pool)
    # The worker that waits at item 3 is gone: nobody waits there again.
    assert outcome(sent) == 10
    assert items(diary, sent.id) == list(range(10))
    # It may come to the stopping worker again, which stops it before its first item.
    began = diary.entries("began", sent.id)
    assert len(began) >= 2
    assert {(one["attempt"], one["customer"]) for one in began} == {(1, "c7")}
    job = jobs.wait_for(sent.id, "completed")
    assert (job.attempt, job.retries, job.rescues, job.errors) == (1, 0, 0, ())


@on_every_broker
def test_an_interruption_is_no_retry_and_keeps_all_that_the_message_had(
    start: Start, client: ModuleType, jobs: Jobs, diary: Diary
) -> None:
    start()
    sent = client.interrupt_once.apply_async(priority=3, headers={"customer": "c7"}, expires=60)
    assert outcome(sent) == "done"
    first, second = diary.entries("began", sent.id)
    assert (first["checkpoint"], second["checkpoint"]) == ({}, {"left": 1})
    for name in ("priority", "customer", "retries", "attempt"):
        assert first[name] == second[name]
    assert jobs.wait_for(sent.id, "completed").attempt == 1


@pytest.mark.skipif(not CAN_SPAWN, reason="Celery 5.7 and later start children afresh")
def test_children_that_were_spawned_stop_too(
    start: Start, client: ModuleType, diary: Diary
) -> None:
    first = start(start_method="spawn")
    sent = client.loop.delay(6, 2)
    diary.wait_for("item", sent.id, count=3, timeout=30)
    first.stop(timeout=30)
    start()
    assert outcome(sent) == 6
    assert items(diary, sent.id) == list(range(6))


def test_a_body_that_catches_everything_does_not_swallow_an_interruption(
    start: Start, client: ModuleType, diary: Diary
) -> None:
    first = start()
    sent = client.loop_that_catches.delay(6, 2)
    diary.wait_for("item", sent.id, count=3)
    first.stop()
    start()
    assert outcome(sent) == 6
    assert items(diary, sent.id) == list(range(6))
    assert diary.entries("caught", sent.id) == []


def test_a_cancelled_loop_stops_at_its_next_checkpoint_and_is_not_sent_again(
    start: Start, client: ModuleType, jobs: Jobs, diary: Diary, database_url: str
) -> None:
    start(config={"awa_rescue_interval": 0.3})
    sent = client.loop.delay(10, 3)
    diary.wait_for("item", sent.id, count=4)
    with Client(database_url) as operator:
        assert operator.request_cancel(sent.id) == "requested"
    job = jobs.wait_for(sent.id, "cancelled")
    assert (job.progress or {})["current"] == 4
    assert "TaskRevokedError" in repr(outcome(sent))
    assert items(diary, sent.id) == [0, 1, 2, 3]


def test_an_attempt_makes_way_after_its_max_runtime_and_advances_each_time(
    start: Start, client: ModuleType, jobs: Jobs, diary: Diary
) -> None:
    # Shorter than an item: each attempt does one all the same.
    start(config={"task_annotations": {"*": {"max_runtime": 0.001}}})
    sent = client.loop.delay(5, None)
    assert outcome(sent) == 5
    assert items(diary, sent.id) == list(range(5))
    assert len(diary.entries("began", sent.id)) > 1
    assert jobs.wait_for(sent.id, "completed").attempt == 1


@pytest.mark.parametrize("policy", ["requeue", "fail"])
def test_a_loop_past_its_deadline_stops_and_is_treated_by_its_policy(
    start: Start, client: ModuleType, jobs: Jobs, diary: Diary, policy: str
) -> None:
    config = {"task_annotations": {"*": {"lost_policy": policy, "deadline": 1}}}
    start(config={**config, "awa_rescue_interval": 0.3})
    sent = client.loop.delay(6, 2)
    if policy == "fail":
        assert "TimeLimitExceeded" in repr(outcome(sent))
    else:
        assert outcome(sent) == 6
        assert items(diary, sent.id) == list(range(6))
    job = jobs.wait_for(sent.id, "failed" if policy == "fail" else "completed")
    assert "TimeLimitExceeded: the deadline of 1.0 s is over" in job.errors[0].error


def test_a_snoozed_task_comes_back_under_its_id_with_its_progress(
    start: Start, client: ModuleType, jobs: Jobs, diary: Diary
) -> None:
    start()
    # What was in time when it began does not expire while it sleeps.
    sent = client.snooze_once.apply_async((1.5,), expires=1.2)
    job = jobs.wait_for(sent.id, "scheduled")
    assert (job.attempt, job.percent, job.message, job.metadata) == (0, 10, "asleep", {"left": 1})
    assert job.run_at is not None
    assert outcome(sent) == "done"
    first, second = diary.entries("began", sent.id)
    assert second["at"] - first["at"] >= 1.4
    assert second["attempt"] == 1
    assert second["retries"] == 0


def test_a_members_interruption_does_not_end_its_chord(
    start: Start, client: ModuleType, diary: Diary
) -> None:
    start()
    body = client.app.signature(f"{APP}.loop", args=(1, None), immutable=True)
    sent = chord([client.interrupt_once.s() for _ in range(3)], body).delay()
    assert outcome(sent) == 1


def test_a_message_that_cannot_go_out_at_once_is_sent_by_a_rescuer(
    start: Start, client: ModuleType, jobs: Jobs
) -> None:
    start(config={"test_publish_fails": True})
    sent = client.interrupt_once.delay()
    job = jobs.wait_for(sent.id, "available")
    assert job.send_after is not None
    assert job.resendable
    start(config={"awa_rescue_interval": 0.3})
    assert outcome(sent, timeout=40) == "done"


def test_finished_steps_are_not_run_again(start: Start, client: ModuleType, diary: Diary) -> None:
    start()
    sent = client.in_steps.delay("second")
    assert outcome(sent) == ["first", "second", "third"]
    steps = [entry["name"] for entry in diary.entries("step", sent.id)]
    assert steps == ["first", "second", "second", "third"]


def test_a_task_that_stalls_is_shown_as_such_and_lives(
    start: Start, client: ModuleType, jobs: Jobs, diary: Diary, gate: Gate
) -> None:
    config = {"task_annotations": {"*": {"stall_after": 1, "lost_policy": "fail"}}}
    start(config={**config, "awa_rescue_interval": 0.3})
    sent = client.stall.delay(gate.path)
    diary.wait_for("reported", sent.id)

    def stalled() -> bool:
        return jobs.wait_for(sent.id, "running").stalled

    eventually(stalled, timeout=10, what="a stalled task")
    gate.open()
    assert outcome(sent) == "None"
    assert not jobs.wait_for(sent.id, "completed").stalled


def test_a_task_that_stalls_loses_its_job_where_its_policy_says_so(
    start: Start, client: ModuleType, jobs: Jobs, diary: Diary, gate: Gate
) -> None:
    stops = {"stall_after": 1, "stall_policy": "stop", "lost_policy": "fail"}
    worker = start(config={"task_annotations": {"*": stops}, "awa_rescue_interval": 0.3})
    sent = client.stall.delay(gate.path)
    assert "TimeLimitExceeded" in repr(outcome(sent))
    job = jobs.wait_for(sent.id, "failed")
    assert "nothing was reported for" in job.errors[0].error
    assert job.percent == 10
    # It learns of it by its next heartbeat, and what it returns counts no more.
    worker.wait_for_log(rf"\[{sent.id}\] ignored")
