"""Lost workers and late copies on the brokers that people use."""

from __future__ import annotations

import itertools
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import celery
import psycopg
import pytest
import redis

from tests.acceptance.brokers import AMQP, REDIS, Broker
from tests.acceptance.diary import Diary, Gate
from tests.acceptance.jobs import Jobs, outcome
from tests.acceptance.workers import FAST, Worker
from tests.waiting import eventually

Start = Callable[..., Worker]
APP = "tests.acceptance.apps.rescued"
LEFT = {"last_id": 7}

on_redis = pytest.mark.parametrize("broker", [REDIS], indirect=True)
on_rabbitmq = pytest.mark.parametrize("broker", [AMQP], indirect=True)


@pytest.fixture
def start(start_worker: Start) -> Start:
    def start(*, config: dict[str, Any] = FAST, **options: Any) -> Worker:
        return start_worker(app=APP, config=config, **options)

    return start


def visible_for(seconds: float) -> dict[str, Any]:
    """The configuration of a worker whose Redis returns what is unacknowledged after that long."""
    return {**FAST, "broker_transport_options": {"visibility_timeout": seconds}}


@on_redis
def test_a_killed_workers_task_goes_on_before_redis_returns_it_and_late_copies_change_nothing(
    start: Start,
    client: ModuleType,
    jobs: Jobs,
    diary: Diary,
    gate: Gate,
    broker: Broker,
    tmp_path: Path,
) -> None:
    hour = visible_for(3_600)
    first = start(config=hour)
    sent = client.resume_late.delay(gate.path, "value")
    diary.wait_for("left", sent.id)
    first.kill()
    # The same name on the same machine, and another on another one.
    first.start()
    diary.wait_for("left", sent.id, count=2)
    first.kill()
    killed_at = time.monotonic()
    second = start(config={**hour, "awa_slate_dir": str(tmp_path)})
    diary.wait_for("left", sent.id, count=3)
    assert time.monotonic() - killed_at < FAST["awa_stale_after"] + 5
    gate.open()
    assert outcome(sent) == "value"
    done = jobs.wait_for(sent.id, "completed")
    result = sent.backend.get_task_meta(sent.id, cache=False)

    age_unacknowledged(broker)
    # A worker that starts returns what is overdue, of all queues.
    start(config=hour, options=["--queues", "other"])
    second.wait_for_log(rf"(a copy of task {sent.id} is dropped: its run is over[\s\S]*){{2}}")
    assert jobs.get(sent.id) == done
    assert sent.backend.get_task_meta(sent.id, cache=False) == result
    found = [entry["checkpoint"] for entry in diary.entries("began", sent.id)]
    assert (found, done.rescues) == ([{}, LEFT, LEFT], 2)


def age_unacknowledged(broker: Broker) -> None:
    """Let Redis hold everything that is unacknowledged for a thing of long ago."""
    with redis.Redis.from_url(broker.url) as server:
        index = f"{broker.queue}:unacked_index"
        tags = server.zrange(index, 0, -1)
        assert len(tags) == 2
        server.zadd(index, dict.fromkeys(tags, 1))


@on_rabbitmq
def test_with_default_settings_a_killed_workers_task_goes_on_within_40_seconds(
    start: Start,
    client: ModuleType,
    jobs: Jobs,
    diary: Diary,
    gate: Gate,
    settings: dict[str, Any],
    tmp_path: Path,
) -> None:
    for name in ("awa_write_interval", "awa_heartbeat_interval"):
        del settings[name]
    first = start(config={})
    sent = client.resume_late.delay(gate.path, "value")
    diary.wait_for("left", sent.id)
    second = start(config={"awa_slate_dir": str(tmp_path)})
    first.kill()
    killed_at = time.monotonic()
    # RabbitMQ returns it at once, when nobody can know that the first worker is dead.
    second.wait_for_log(rf"a copy of task {sent.id} is dropped: a live attempt has it")
    assert diary.wait_for("began", sent.id, count=2, timeout=45)["checkpoint"] == LEFT
    assert time.monotonic() - killed_at < 40
    gate.open()
    assert outcome(sent) == "value"
    assert jobs.wait_for(sent.id, "completed").rescues == 1


@on_redis
def test_a_task_of_five_times_the_visibility_timeout_runs_once(
    start: Start, client: ModuleType, jobs: Jobs, diary: Diary, gate: Gate
) -> None:
    first = start(config=visible_for(3))
    sent = client.resume_late.delay(gate.path, "value")
    began = diary.wait_for("left", sent.id)
    eventually(lambda: time.time() - began["at"] > 4)
    second = start(config=visible_for(3))
    eventually(lambda: time.time() - began["at"] > 15, timeout=20)
    gate.open()
    assert outcome(sent) == "value"
    assert len(diary.entries("began", sent.id)) == 1
    job = jobs.wait_for(sent.id, "completed")
    assert (job.attempt, job.run_lease, job.rescues) == (1, 1, 0)
    copies = (first.log() + second.log()).count(f"a copy of task {sent.id} is dropped")
    assert copies >= 1


@on_redis
@pytest.mark.parametrize("policy", ["requeue", "fail"])
def test_a_chord_ends_though_the_worker_of_a_member_died(
    start: Start,
    client: ModuleType,
    diary: Diary,
    gate: Gate,
    broker: Broker,
    tmp_path: Path,
    policy: str,
) -> None:
    config = {**FAST, "task_annotations": {"*": {"lost_policy": policy}}}
    doomed = start(config=config, pool="solo", options=["--queues", "doomed"])
    other = Gate(tmp_path / "another gate")
    other.open()
    header = [client.resume.s(other.path, number) for number in range(9)]
    header.append(client.resume.s(gate.path, 9).set(queue="doomed"))
    body = client.heard.s().on_error(client.hear_failure.s())
    chord = celery.chord(header, app=client.app)(body)
    diary.wait_for("left")
    doomed.kill()
    gate.open()
    elsewhere = {"awa_slate_dir": str(tmp_path)}
    start(config={**config, **elsewhere}, options=["--queues", f"{broker.queue},doomed"])
    if policy == "requeue":
        assert sorted(outcome(chord)[0]) == list(range(10))
        assert len(diary.entries("heard")) == 1
    else:
        assert "WorkerLostError" in repr(outcome(chord))
        assert diary.wait_for("failure")["of"] == chord.id
        assert diary.entries("heard") == []


@on_redis
def test_eight_rescuers_send_each_lost_task_once(
    start: Start, client: ModuleType, jobs: Jobs, diary: Diary, gate: Gate, tmp_path: Path
) -> None:
    config = visible_for(3_600)
    doomed = start(config=config, pool="threads", concurrency=16)
    sent = [client.resume_late.delay(gate.path, number) for number in range(16)]
    diary.wait_for("left", count=16)
    others = {**config, "awa_slate_dir": str(tmp_path)}
    eight = [start(config=others, pool="threads", concurrency=4, wait=False) for _ in range(8)]
    for worker in eight:
        worker.ready()
    Gate(Path(f"{gate.path}.2")).open()
    doomed.kill()
    assert [outcome(one) for one in sent] == list(range(16))
    rows = [jobs.wait_for(one.id, "completed") for one in sent]
    assert {(job.attempt, job.run_lease, job.rescues) for job in rows} == {(2, 2, 1)}
    assert Counter(entry["task_id"] for entry in diary.entries("began")) == {
        one.id: 2 for one in sent
    }
    dropped = sum(worker.log().count("is dropped") for worker in eight)
    assert dropped == 0


@on_redis
def test_eight_workers_restarted_one_by_one_lose_nothing_and_run_nothing_twice_at_once(
    start: Start, client: ModuleType, jobs: Jobs, diary: Diary, database_url: str
) -> None:
    config = {**FAST, "task_annotations": {"*": {"lost_policy": "requeue"}}}
    workers = [start(config=config, wait=False) for _ in range(8)]
    for worker in workers:
        worker.ready()
    sent = []
    ways = itertools.cycle([signal.SIGKILL, signal.SIGQUIT, signal.SIGTERM])
    for worker, way in zip(workers, ways, strict=False):
        sent += send_until_it_works(worker, client, diary)
        worker.stop(way, timeout=30)
        worker.start()
        worker.ready()
    for one in sent:
        eventually(lambda one=one: send_soon(database_url) or one.ready(), timeout=60)
    assert [outcome(one) for one in sent] == [40] * len(sent)
    for one in sent:
        assert jobs.wait_for(one.id, "completed").metadata == {}
        assert_one_after_the_other(diary.entries(None, one.id))
    again = {entry["task_id"] for entry in diary.entries("began") if entry["attempt"] > 1}
    assert len(again) >= 5  # of as many workers that did not stop warm


def send_until_it_works(worker: Worker, client: ModuleType, diary: Diary) -> list[Any]:
    """Send tasks until a child of this worker is in the midst of one: others may be quicker."""
    began = len(diary.entries("step"))
    sent = []

    def works() -> bool:
        children = worker.children()
        return any(entry["pid"] in children for entry in diary.entries("step")[began:])

    for _ in range(6):
        sent += [client.count_up.delay(40) for _ in range(6)]
        try:
            eventually(works, timeout=5, what=f"a step in {worker.name}")
            break
        except AssertionError:
            continue
    assert works(), f"{worker.name} gets no task"
    return sent


def send_soon(url: str) -> None:
    """Whatever is unsent is to be sent now, and not ten seconds after it was written."""
    with psycopg.connect(url, autocommit=True) as connection:
        for table in ("jobs_hot", "scheduled_jobs"):
            connection.execute(
                f"UPDATE celery_awa.{table} SET send_after = now() WHERE send_after > now()"
            )


def assert_one_after_the_other(entries: list[dict[str, Any]]) -> None:
    """Each attempt went on where the one before it had got, and none while another ran."""
    steps = [(entry["attempt"], entry["step"]) for entry in entries if entry["what"] == "step"]
    assert steps == sorted(steps)
    reached = dict(steps)
    for attempt, step in steps:
        earlier = [reached[before] for before in reached if before < attempt]
        # A step that was noted and not yet confirmed when its worker was killed is done again.
        assert step >= max(earlier, default=0)
