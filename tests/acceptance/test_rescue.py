"""Workers that are killed as a whole: what becomes of their tasks, with real workers.

The broker of most tests is the filesystem one, which forgets an unacknowledged message when its
worker is killed, so that our row is the only copy.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import celery
import psycopg
import pytest

from celery_awa.store.canonical import open_store
from tests.acceptance.brokers import Broker
from tests.acceptance.diary import Diary, Gate
from tests.acceptance.jobs import Jobs, outcome
from tests.acceptance.messages import send_and_keep
from tests.acceptance.workers import FAST, Worker
from tests.waiting import eventually

Start = Callable[..., Worker]
APP = "tests.acceptance.apps.rescued"
LEFT = {"last_id": 7}
LATE = {"task_acks_late": True}


@pytest.fixture
def settings(settings: dict[str, Any]) -> dict[str, Any]:
    return {**settings, **FAST}


def options(**values: Any) -> dict[str, Any]:
    """A configuration that sets options of every task."""
    return {"task_annotations": {"*": values}}


def elsewhere(tmp_path: Path) -> dict[str, Any]:
    """The configuration of a worker that finds no slate of others: as on another machine."""
    folder = tmp_path / "another machine"
    folder.mkdir(exist_ok=True)
    return {"awa_slate_dir": str(folder)}


def test_a_killed_workers_task_goes_on_in_another_with_everything_it_had(
    start: Start, client: ModuleType, jobs: Jobs, diary: Diary, gate: Gate, tmp_path: Path
) -> None:
    # It takes its row at its start, since nobody else has its message then.
    config = {**options(lost_policy="requeue"), "awa_claim_after": 60}
    first = start(config=config)
    sent = client.resume.apply_async(
        (gate.path, "the value"),
        headers={"customer": "c1"},
        priority=3,
        link=client.heard.s("linked"),
    )
    silent = client.wait_silently.delay(gate.path)
    diary.wait_for("left", sent.id)
    diary.wait_for("waits", silent.id)
    first.kill()
    start(config={**config, **elsewhere(tmp_path)})
    diary.wait_for("began", sent.id, count=2)
    diary.wait_for("waits", silent.id, count=2)
    gate.open()
    assert outcome(sent) == "the value"
    assert outcome(silent) == "waited"
    began, again = diary.entries("began", sent.id)
    same = ("queue", "priority", "customer", "retries")
    assert [again[name] for name in same] == [began[name] for name in same]
    assert (began["checkpoint"], again["checkpoint"]) == ({}, LEFT)
    assert diary.wait_for("heard")["args"] == ["the value", "linked"]
    job = jobs.wait_for(sent.id, "completed")
    assert (job.attempt, job.run_lease, job.rescues) == (2, 2, 1)


def test_a_killed_workers_tasks_fail_where_they_may_not_run_twice_and_their_callers_hear_of_it(
    start: Start,
    client: ModuleType,
    jobs: Jobs,
    diary: Diary,
    gate: Gate,
    broker: Broker,
    tmp_path: Path,
) -> None:
    config = {"awa_max_envelope_bytes": 20_000}
    first = start(concurrency=4, config=config)
    alone = client.resume.apply_async((gate.path,), link_error=client.hear_failure.s())
    # This one might run again, if its message had been kept.
    large = client.resume_always.delay(gate.path, "x" * 30_000)
    # Its queue is that of the task which waits for the members, too; this is not to die with them.
    body = client.heard.s().set(queue="chord").on_error(client.hear_failure.s())
    chord = celery.chord([client.resume.s(gate.path), client.plain.s()], app=client.app)(body)
    diary.wait_for("left", count=3)
    outcome(chord.parent.results[1])
    first.kill()
    queues = ["--queues", f"{broker.queue},chord"]
    start(config={**config, **elsewhere(tmp_path)}, options=queues)
    for task_id in {entry["task_id"] for entry in diary.entries("left")}:
        job = jobs.wait_for(task_id, "failed")
        assert (job.percent, job.metadata, job.attempt) == (40, LEFT, 1)
        assert "WorkerLostError: no heartbeat from worker" in job.errors[0].error
    assert "WorkerLostError" in repr(outcome(alone))
    assert "WorkerLostError" in repr(outcome(chord))
    diary.wait_for("failure", count=2)
    assert {entry["of"] for entry in diary.entries("failure")} == {alone.id, chord.id}
    assert "its message was not kept, so it cannot be sent again" in repr(outcome(large))
    assert (len(diary.entries("began")), diary.entries("heard")) == (3, [])


def test_a_task_that_always_kills_its_worker_ends_and_keeps_its_progress(
    start: Start, client: ModuleType, jobs: Jobs, diary: Diary
) -> None:
    # In a thread, so that it is the worker itself which dies.
    config = options(lost_policy="requeue", max_rescues=1)
    worker = start(pool="threads", config=config)
    sent = client.die.delay(40)
    # Nobody is fooled by the worker that comes back under its name.
    for _ in range(2):
        eventually(lambda: not worker.running, what="death of the worker")
        worker.start()
        worker.ready()
    job = jobs.wait_for(sent.id, "failed")
    assert "WorkerLostError" in repr(outcome(sent))
    assert len(diary.entries("began", sent.id)) == 2
    assert (job.percent, job.attempt, job.rescues) == (42, 2, 1)
    assert "max_rescues is 1 and the checkpoint did not advance" in job.errors[-1].error


def test_what_was_on_a_killed_workers_slate_is_where_its_task_goes_on(
    start: Start, client: ModuleType, jobs: Jobs, diary: Diary, gate: Gate, settings: dict[str, Any]
) -> None:
    # Nothing is written by the way, and nothing is stale before the test is over.
    seldom = {"awa_write_interval": 60, "awa_heartbeat_interval": 60, "awa_stale_after": 240}
    config = {**options(lost_policy="requeue"), **seldom}
    first = start(config=config)
    sent = client.resume.delay(gate.path, flush=False)
    diary.wait_for("left", sent.id)
    first.kill()
    start(config=config)
    diary.wait_for("began", sent.id, count=2)
    gate.open()
    jobs.wait_for(sent.id, "completed")
    assert [entry["checkpoint"] for entry in diary.entries("began", sent.id)] == [{}, LEFT]
    slates = [one for one in Path(settings["awa_slate_dir"]).iterdir() if one.suffix != ".lock"]
    assert len(slates) == 1


def test_an_attempt_that_slept_through_its_rescue_publishes_neither_result_nor_callbacks(
    start: Start, client: ModuleType, jobs: Jobs, diary: Diary, gate: Gate
) -> None:
    config = options(lost_policy="requeue")
    first = start(config=config, concurrency=1)
    header = client.resume.s(gate.path, "value").set(link=client.heard.s("linked"))
    chord = celery.chord([header], app=client.app)(client.heard.s("body"))
    task_id = diary.wait_for("left")["task_id"]
    with asleep(first.pid, *first.children()):
        start(config=config)
        second = diary.wait_for("left", task_id, count=2)
        Gate(Path(f"{gate.path}.1")).open()
    first.wait_for_log(rf"\[{task_id}\] ignored")
    late = diary.wait_for("went on", task_id)
    assert late["pid"] != second["pid"]
    assert jobs.wait_for(task_id, "running").run_lease == 2
    assert client.app.AsyncResult(task_id).state == "PENDING"
    gate.open()
    assert outcome(chord) == [["value"], "body"]
    heard = [entry["args"] for entry in diary.entries("heard")]
    assert sorted(map(str, heard)) == sorted(map(str, [["value", "linked"], [["value"], "body"]]))
    assert jobs.wait_for(task_id, "completed").attempt == 2


@contextmanager
def asleep(*pids: int) -> Iterator[None]:
    """Within it these processes do nothing at all."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def test_long_attempts_of_living_workers_are_left_alone(
    start: Start, client: ModuleType, jobs: Jobs, diary: Diary, gate: Gate
) -> None:
    config = {**options(lost_policy="requeue"), "awa_stale_after": 1.0}
    start(config=config)
    start(config=config, pool="threads", options=["--queues", "threads"])
    # One reports once and waits, the other holds its interpreter.
    silent = [client.resume.apply_async((gate.path,), queue=queue) for queue in (None, "threads")]
    holding = client.hold_interpreter.delay(5)
    for one in silent:
        diary.wait_for("left", one.id)
    assert outcome(holding) is None
    gate.open()
    for one in (*silent, holding):
        job = jobs.wait_for(one.id, "completed")
        assert (job.attempt, job.run_lease, job.rescues) == (1, 1, 0)


def test_a_copy_of_a_running_task_is_dropped_and_brings_it_back_should_its_worker_be_dead(
    start: Start, client: ModuleType, jobs: Jobs, diary: Diary, gate: Gate, tmp_path: Path
) -> None:
    # Without a copy it would be stale after a minute only.
    config = {**options(lost_policy="requeue"), "awa_stale_after": 60}
    first = start(config=config)
    sent, again = send_and_keep(client.resume, gate.path, "value")
    diary.wait_for("left", sent.id)
    again()
    first.wait_for_log(rf"a copy of task {sent.id} is dropped: a live attempt has it")
    beaten = jobs.get(sent.id)
    eventually(lambda: jobs.get(sent.id).heartbeat_at > beaten.heartbeat_at)
    first.kill()
    second = start(config={**config, **elsewhere(tmp_path)})
    again()
    second.wait_for_log(rf"a copy of task {sent.id} is dropped: a live attempt has it")
    diary.wait_for("began", sent.id, count=2, timeout=5)
    gate.open()
    assert outcome(sent) == "value"
    assert jobs.wait_for(sent.id, "completed").rescues == 1
    again()
    second.wait_for_log(rf"a copy of task {sent.id} is dropped: its run is over")
    assert len(diary.entries("began", sent.id)) == 2


def test_a_retry_that_was_written_and_not_published_is_sent_once_by_another_worker(
    start: Start,
    client: ModuleType,
    jobs: Jobs,
    diary: Diary,
    tmp_path: Path,
    database_url: str,
) -> None:
    # What the first worker publishes goes into a folder that is not there.
    nowhere = {"data_folder_out": str(tmp_path / "none")}
    first = start(config={"broker_transport_options": nowhere, "awa_rescue_in_workers": False})
    sent = client.retry_once.delay()
    jobs.wait_for(sent.id, "retryable")
    first.wait_for_log(rf"\[{sent.id}\] ignored")
    first.kill()
    make_due(database_url)
    start()
    assert outcome(sent) == LEFT
    job = jobs.wait_for(sent.id, "completed")
    assert (job.attempt, job.retries, job.rescues) == (2, 1, 0)
    assert len(diary.entries("began", sent.id)) == 2


def make_due(url: str) -> None:
    """Whatever is unsent is to be sent now, and not ten seconds after it was written."""
    with psycopg.connect(url, autocommit=True) as connection:
        for table in ("jobs_hot", "scheduled_jobs"):
            connection.execute(
                f"UPDATE celery_awa.{table} SET send_after = now() WHERE send_after IS NOT NULL"
            )


def test_the_message_of_a_cancelled_job_is_dropped_when_it_comes_and_its_caller_hears_of_it(
    start: Start, client: ModuleType, jobs: Jobs, diary: Diary, database_url: str
) -> None:
    worker = start()
    sent = client.retry_once.delay(2)
    jobs.wait_for(sent.id, "retryable")
    store = open_store(database_url, "celery_awa")
    assert store.request_cancel(sent.id) == "cancelled"
    store.close()
    assert "TaskRevokedError" in repr(outcome(sent))
    worker.wait_for_log(rf"a copy of task {sent.id} is dropped: its run is over")
    job = jobs.wait_for(sent.id, "cancelled")
    assert (job.attempt, job.metadata) == (1, LEFT)
    assert len(diary.entries("began", sent.id)) == 1
