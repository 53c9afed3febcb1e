"""Copies of a message: which run they belong to, and which of them may run."""

from __future__ import annotations

import base64
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import psycopg
import pytest

from tests.acceptance.brokers import AMQP, REDIS, Broker
from tests.acceptance.diary import Diary, Gate
from tests.acceptance.jobs import Jobs, outcome
from tests.acceptance.messages import deliver_again, send_and_keep
from tests.acceptance.workers import ROOT, Worker
from tests.waiting import eventually

Start = Callable[..., Worker]
APP = "tests.acceptance.apps.copied"
#: What the tasks leave for a later attempt.
LEFT = {"last_id": 7}
LATE = {"task_acks_late": True}
#: Late as well, and only the broker may bring a task back: so a copy is as good as its attempt.
BROKERS_ONLY = {**LATE, "task_annotations": {"*": {"lost_policy": "fail"}}}


def wait_until_ignored(worker: Worker, task_id: str, count: int = 1) -> None:
    worker.wait_for_log(rf"(\[{task_id}\] ignored[\s\S]*){{{count}}}")


@pytest.mark.parametrize(
    ("pool", "config", "look"),
    [("prefork", LATE, False), ("threads", {}, True)],
    ids=["before they run", "when they look"],
)
def test_late_copies_are_dropped_and_change_nothing(
    start: Start,
    client: ModuleType,
    jobs: Jobs,
    diary: Diary,
    database_url: str,
    pool: str,
    config: dict[str, Any],
    look: bool,
) -> None:
    worker = start(pool=pool, config=config)
    sent = {
        state: send_and_keep(client.end, state, look)
        for state in ("completed", "failed", "cancelled")
    }
    # This one's second message is out, and to come long after its copy.
    sent["retryable"] = send_and_keep(client.retry, 300, look)
    for state, (one, _) in sent.items():
        jobs.wait_for(one.id, state)
    eventually(lambda: sent["retryable"][0].state == "RETRY" and unsent(database_url) == {})
    rows = {state: jobs.wait_for(one.id, state) for state, (one, _) in sent.items()}
    results = [kept_result(one) for one, _ in sent.values()]
    for state, (one, again) in sent.items():
        again()
        wait_until_ignored(worker, one.id, 2 if state == "cancelled" else 1)
    assert [row.metadata for row in rows.values()] == [{}, LEFT, LEFT, LEFT]
    assert [jobs.get(one.id) for one, _ in sent.values()] == list(rows.values())
    assert [kept_result(one) for one, _ in sent.values()] == results
    assert len(diary.entries("began")) == 4


def kept_result(result: Any) -> str:
    """All that the result backend holds of a task; the exceptions in it are never equal."""
    return repr(result.backend.get_task_meta(result.id, cache=False))


def test_a_late_copy_that_never_asks_changes_no_row(
    start: Start, client: ModuleType, jobs: Jobs
) -> None:
    worker = start(pool="threads")
    sent, again = send_and_keep(client.retry, 300, False)
    eventually(lambda: jobs.wait_for(sent.id, "retryable").send_after is None, what="its message")
    waiting = jobs.get(sent.id)
    again()
    wait_until_ignored(worker, sent.id)
    assert jobs.get(sent.id) == waiting
    assert worker.log().count(f"[{sent.id}] received") == 3  # two of ours, one retry


def test_a_redelivery_that_nothing_marks_resumes_and_after_the_end_is_dropped(
    start: Start, client: ModuleType, jobs: Jobs, diary: Diary, gate: Gate, broker: Broker
) -> None:
    first = start(config=LATE)
    sent = client.resume.delay(gate.path)
    diary.wait_for("left", sent.id)
    # Cold: what was not acknowledged goes back into the queue.
    first.stop(signal.SIGQUIT)
    second = start(config=LATE)
    assert outcome(sent) == LEFT
    done = jobs.wait_for(sent.id, "completed")
    assert done.attempt == 2
    deliver_again(broker, sent.id)
    wait_until_ignored(second, sent.id)
    assert jobs.get(sent.id) == done


def test_a_producer_without_the_plugin_has_its_runs_told_right(
    start: Start, client: ModuleType, jobs: Jobs, diary: Diary, broker: Broker
) -> None:
    worker = start(config=LATE)
    send_plainly(broker, client.end.name, ["failed"], "told")
    failed = jobs.wait_for("told", "failed")
    deliver_again(broker, "told")
    wait_until_ignored(worker, "told")
    assert jobs.get("told") == failed
    send_plainly(broker, client.retry.name, [0.1], "told")
    assert jobs.wait_for("told", "completed").run_lease == failed.run_lease + 2
    found = [entry["checkpoint"] for entry in diary.entries("began", "told")]
    assert found == [{}, {}, LEFT]


def test_an_unfinished_run_is_resumed_by_a_message_without_the_plugin(
    start: Start, client: ModuleType, jobs: Jobs, diary: Diary, broker: Broker, gate: Gate
) -> None:
    # Nobody but the message is to bring it back.
    config = {**BROKERS_ONLY, "awa_rescue_in_workers": False}
    first = start(config=config)
    send_plainly(broker, client.resume.name, [gate.path], "told")
    diary.wait_for("left", "told")
    first.kill()
    start(config=config)
    send_plainly(broker, client.resume.name, [gate.path], "told")
    assert jobs.wait_for("told", "completed").attempt == 2
    assert diary.entries("began", "told")[1]["checkpoint"] == LEFT


def send_plainly(broker: Broker, name: str, args: list[Any], task_id: str) -> None:
    """Send a task from a process that has never heard of celery-awa."""
    program = (
        "import json, sys, celery\n"
        "config, name, args, task_id = json.load(sys.stdin)\n"
        "app = celery.Celery(config_source=config)\n"
        "app.send_task(name, args, task_id=task_id)\n"
        "assert not any(module.startswith('celery_awa') for module in sys.modules)\n"
    )
    told = json.dumps([dict(broker.config), name, args, task_id])
    subprocess.run([sys.executable, "-c", program], input=told, text=True, check=True, cwd=ROOT)


def test_two_attempts_in_one_process_have_two_leases(
    start: Start, client: ModuleType, jobs: Jobs, diary: Diary, gate: Gate
) -> None:
    worker = start(pool="threads", config=BROKERS_ONLY)
    sent, again = send_and_keep(client.report_twice, gate.path)
    diary.wait_for("flushed first", sent.id)
    again()
    diary.wait_for("flushed first", sent.id, count=2)
    end_older_then_newer(jobs, diary, gate, sent.id)
    wait_until_ignored(worker, sent.id)
    assert {entry["pid"] for entry in diary.entries("began", sent.id)} == {worker.pid}
    assert outcome(sent) == 2
    assert jobs.wait_for(sent.id, "completed").run_lease == 2


def end_older_then_newer(jobs: Jobs, diary: Diary, gate: Gate, task_id: str) -> None:
    """Let the older attempt flush and end before the newer; only the newer has the lease."""
    for attempt, owns, written in ((1, False, "attempt 2"), (2, True, "attempt 2 again")):
        Gate(Path(f"{gate.path}.{attempt}")).open()
        flushed = diary.wait_for("flushed again", task_id, count=attempt)
        assert (flushed["attempt"], flushed["flushed"]) == (attempt, owns)
        job = jobs.get(task_id)
        assert job is not None
        assert job.state == "completed" or job.message == written


#: Redis returns what was not acknowledged for so many seconds; a worker sees to it at its start.
VISIBLE = {**LATE, "broker_transport_options": {"visibility_timeout": 1}}


def wait_until_overdue(fetched: dict[str, Any]) -> None:
    """Wait until a worker that starts will return the message whose task noted this."""
    eventually(lambda: time.time() - fetched["at"] > 1.5)


@pytest.mark.parametrize("broker", [REDIS], indirect=True)
def test_a_copy_that_redis_returns_while_the_first_still_runs_takes_the_lease_over(
    start: Start, client: ModuleType, jobs: Jobs, diary: Diary, gate: Gate
) -> None:
    config = {**VISIBLE, **BROKERS_ONLY}
    start(config=config)
    sent = client.report_twice.delay(gate.path)
    wait_until_overdue(diary.wait_for("flushed first", sent.id))
    start(config=config)
    diary.wait_for("flushed first", sent.id, count=2, timeout=30)
    end_older_then_newer(jobs, diary, gate, sent.id)
    assert outcome(sent) == 2
    job = jobs.wait_for(sent.id, "completed")
    assert (job.attempt, job.run_lease) == (2, 2)


@pytest.mark.parametrize("broker", [REDIS], indirect=True)
def test_a_copy_that_redis_returned_meanwhile_does_not_run_when_the_run_is_over(
    start: Start, client: ModuleType, jobs: Jobs, diary: Diary, gate: Gate
) -> None:
    first = start(concurrency=1, config=VISIBLE)
    sent = client.wait.delay(gate.path)
    wait_until_overdue(diary.wait_for("began", sent.id))
    # It returns what is overdue of all queues.
    start(concurrency=1, config=VISIBLE, options=["--queues", "other"])
    first.wait_for_log(rf"(\[{sent.id}\] received[\s\S]*){{2}}", timeout=15)
    gate.open()
    first.wait_for_log(rf"\[{sent.id}\] ignored")
    assert outcome(sent) == "waited"
    assert len(diary.entries("began", sent.id)) == 1
    assert jobs.wait_for(sent.id, "completed").attempt == 1


@pytest.mark.parametrize("broker", [REDIS, AMQP], indirect=True)
def test_a_killed_workers_task_goes_on_from_its_checkpoint_in_another(
    start: Start, client: ModuleType, jobs: Jobs, diary: Diary, gate: Gate, broker: Broker
) -> None:
    config = VISIBLE if broker.kind == "redis" else LATE
    first = start(config=config)
    sent = client.resume.delay(gate.path)
    left = diary.wait_for("left", sent.id)
    first.kill()
    if broker.kind == "redis":
        wait_until_overdue(left)
    start(config=config)
    assert outcome(sent, timeout=30) == LEFT
    job = jobs.wait_for(sent.id, "completed")
    assert (job.attempt, job.run_lease) == (2, 2)


@pytest.mark.parametrize("broker", [AMQP], indirect=True)
def test_a_message_that_rabbitmq_marks_although_it_never_ran_runs(
    start: Start, client: ModuleType, jobs: Jobs, diary: Diary, gate: Gate
) -> None:
    first = start(concurrency=1)
    client.resume.delay(gate.path)
    diary.wait_for("left")
    fetched = client.end.delay("completed")
    first.wait_for_log(rf"\[{fetched.id}\] received")
    first.kill()
    start(concurrency=1)
    assert outcome(fetched) == "completed"
    job = jobs.wait_for(fetched.id, "completed")
    assert (job.attempt, job.run_lease) == (1, 1)


def test_a_retry_that_cannot_be_published_waits_unsent_and_its_attempt_is_ignored(
    start: Start, client: ModuleType, jobs: Jobs, tmp_path: Any, database_url: str
) -> None:
    # What this worker publishes is to go into a folder that is not there.
    nowhere = {"data_folder_out": str(tmp_path / "none")}
    worker = start(config={"broker_transport_options": nowhere})
    sent = client.retry.delay(60)
    wait_until_ignored(worker, sent.id)
    job = jobs.wait_for(sent.id, "retryable")
    assert job.metadata == LEFT
    assert unsent(database_url) == {sent.id: ([60], 1)}
    assert client.app.backend.get_task_meta(sent.id)["status"] == "PENDING"


def unsent(url: str) -> dict[str, tuple[list[Any], int]]:
    """Arguments and retries of the messages that are to be sent, by task."""
    with psycopg.connect(url) as connection:
        rows = connection.execute(
            "SELECT task_id, envelope FROM celery_awa.scheduled_jobs WHERE send_after IS NOT NULL"
        ).fetchall()
    return {task_id: _message(envelope) for task_id, envelope in rows}


def _message(envelope: bytes) -> tuple[list[Any], int]:
    kept = json.loads(envelope)
    args, _, _ = json.loads(base64.b64decode(kept["body"]))
    return args, kept["headers"]["retries"]
