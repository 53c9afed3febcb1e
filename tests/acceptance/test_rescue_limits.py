"""What a rescue is not fooled by, and what it leaves to an operator, with real workers."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import psycopg
import pytest

from celery_awa import Client
from tests.acceptance.diary import Diary, Gate
from tests.acceptance.jobs import Jobs, outcome
from tests.acceptance.workers import FAST, Worker

Start = Callable[..., Worker]
APP = "tests.acceptance.apps.rescued"
LEFT = {"last_id": 7}
REQUEUE = {"task_annotations": {"*": {"lost_policy": "requeue"}}}


@pytest.fixture
def settings(settings: dict[str, Any]) -> dict[str, Any]:
    return {**settings, **FAST}


@pytest.fixture
def opened(tmp_path: Path) -> Gate:
    """A gate that holds nobody up."""
    gate = Gate(tmp_path / "opened")
    gate.open()
    return gate


def test_a_lost_task_of_a_single_instance_base_is_sent_again(
    start: Start, client: ModuleType, jobs: Jobs, diary: Diary, gate: Gate
) -> None:
    first = start()
    sent = client.resume_single.delay(gate.path, "value")
    diary.wait_for("left", sent.id)
    assert client.resume_single.delay(gate.path, "value").id == sent.id
    first.kill()
    second = start()
    assert diary.wait_for("began", sent.id, count=2)["checkpoint"] == LEFT
    gate.open()
    assert outcome(sent) == "value"
    assert jobs.wait_for(sent.id, "completed").rescues == 1
    # What its base swallowed never came.
    assert "is dropped" not in second.log()
    another = client.resume_single.delay(gate.path, "value")
    assert another.id != sent.id
    assert outcome(another) == "value"


def test_a_result_of_an_earlier_run_is_not_taken_for_that_of_a_lost_one(
    start: Start, client: ModuleType, jobs: Jobs, diary: Diary, gate: Gate, opened: Gate
) -> None:
    first = start(config=REQUEUE)
    earlier = client.resume.apply_async((opened.path, "earlier"), task_id="again")
    assert outcome(earlier) == "earlier"
    jobs.wait_for("again", "completed")
    client.resume.apply_async((gate.path, "later"), task_id="again")
    diary.wait_for("left", "again", count=2)
    first.kill()
    start(config=REQUEUE)
    assert diary.wait_for("began", "again", count=3)["checkpoint"] == LEFT
    gate.open()
    job = jobs.wait_for("again", "completed")
    assert (job.attempt, job.run_lease, job.rescues) == (2, 3, 1)
    # Celery itself never replaces the result of a success.
    assert outcome(client.app.AsyncResult("again")) == "earlier"


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_a_child_that_dies_with_its_worker_leaves_its_last_report_and_no_verdict(
    start: Start, client: ModuleType, jobs: Jobs, diary: Diary, gate: Gate, start_method: str
) -> None:
    # Nothing is written by the way, and nothing is stale before the test is over.
    seldom = {"awa_write_interval": 60, "awa_heartbeat_interval": 60, "awa_stale_after": 240}
    first = start(config={**REQUEUE, **seldom}, concurrency=1, start_method=start_method)
    sent = client.resume.delay(gate.path, "value", flush=False)
    diary.wait_for("left", sent.id, timeout=20)
    (child,) = first.children()
    # Asleep it hears nothing of the death of its child.
    first.kill(signal.SIGSTOP)
    os.kill(child, signal.SIGKILL)
    first.kill()
    start(config={**REQUEUE, **seldom})
    assert diary.wait_for("began", sent.id, count=2)["checkpoint"] == LEFT
    gate.open()
    assert outcome(sent) == "value"
    assert jobs.wait_for(sent.id, "completed").rescues == 1


@pytest.mark.parametrize(
    ("broker", "option"),
    [
        pytest.param("filesystem", ["--max-tasks-per-child", "1"], id="max-tasks-per-child"),
        # Without a hub Celery's threads that scale and that look for dead children get in each
        # other's way, and the pool stays as it is.
        pytest.param("redis", ["--autoscale", "3,1"], id="autoscale", marks=pytest.mark.redis),
    ],
    indirect=["broker"],
)
def test_where_children_come_and_go_what_lives_is_left_alone_and_what_is_lost_comes_back_once(
    start: Start,
    client: ModuleType,
    jobs: Jobs,
    diary: Diary,
    gate: Gate,
    opened: Gate,
    settings: dict[str, Any],
    option: list[str],
) -> None:
    config = {**REQUEUE, "awa_stale_after": 1.0}
    first = start(config=config, concurrency=3, options=option)
    long = [client.resume.delay(gate.path, number) for number in range(2)]
    for one in long:
        diary.wait_for("left", one.id, timeout=20)
    # Children come and go meanwhile, and some of them stay for longer than a stale one.
    short = [client.resume.delay(opened.path, number) for number in range(6)]
    short.append(client.hold_interpreter.delay(1.5))
    for one in short:
        outcome(one, timeout=40)
    first.kill()
    start(config=config, concurrency=3, options=option)
    for one in long:
        again = diary.wait_for("began", one.id, count=2, timeout=20)
        assert again["checkpoint"] == LEFT
    gate.open()
    assert [outcome(one) for one in long] == [0, 1]
    rescues = [jobs.wait_for(one.id, "completed").rescues for one in (*short, *long)]
    assert rescues == [0] * 7 + [1] * 2
    assert len(diary.entries("began")) == 7 + 2 * 2
    slates = [one for one in Path(settings["awa_slate_dir"]).iterdir() if one.suffix != ".lock"]
    assert len(slates) == 1


def test_a_callback_that_does_not_come_in_time_is_handled_by_policy(
    start: Start, client: ModuleType, jobs: Jobs, diary: Diary, gate: Gate, database_url: str
) -> None:
    first = start()
    may, may_not = client.resume_always.delay(gate.path, "value"), client.resume.delay(gate.path)
    for one in (may, may_not):
        diary.wait_for("left", one.id)
    first.kill()
    with psycopg.connect(database_url) as connection:
        connection.execute(
            "UPDATE celery_awa.jobs_hot SET state = 'waiting_external', heartbeat_at = NULL, "
            "callback_id = task_id, callback_timeout_at = now()"
        )
    gate.open()
    start()
    assert outcome(may) == "value"
    assert diary.entries("began", may.id)[1]["checkpoint"] == LEFT
    assert "no callback came in time" in repr(outcome(may_not))
    assert jobs.wait_for(may_not.id, "failed").metadata == LEFT
    for one in (may, may_not):
        job = jobs.wait_for(one.id, "completed", "failed")
        assert job.errors[0].error == "TimeoutError: no callback came in time"


def test_an_operator_mends_or_discards_a_checkpoint_that_no_attempt_can_go_on_from(
    start: Start, client: ModuleType, jobs: Jobs, diary: Diary, database_url: str
) -> None:
    start()
    broken, discarded = client.parse_row.delay(), client.parse_row.delay()
    for one in (broken, discarded):
        jobs.wait_for(one.id, "failed")
    with Client(database_url) as operator:
        operator.retry(broken.id)
        operator.restart(discarded.id)
        diary.wait_for("began", broken.id, count=2)
        assert "seven" in jobs.wait_for(broken.id, "failed").errors[-1].error
        operator.edit_checkpoint(broken.id, {"row": 7})
        operator.retry(broken.id)
    jobs.wait_for(broken.id, "completed")
    assert outcome(client.app.AsyncResult(broken.id)) == 7
    found = [entry["checkpoint"] for entry in diary.entries("began", broken.id)]
    assert found == [{}, {"row": "seven"}, {"row": 7}]
    diary.wait_for("began", discarded.id, count=2)
    found = [entry["checkpoint"] for entry in diary.entries("began", discarded.id)]
    assert found == [{}, {}]


def test_a_task_that_always_kills_its_worker_is_given_up_after_its_rescues(
    start: Start, client: ModuleType, jobs: Jobs, diary: Diary
) -> None:
    # Under solo the process that the task kills is its worker.
    worker = start("solo", concurrency=1, config=REQUEUE)
    sent = client.die.delay()
    for execution in range(1, 5):
        diary.wait_for("began", sent.id, count=execution)
        worker.process.wait()
        worker.start()
        worker.ready()
    assert "WorkerLostError" in repr(outcome(sent))
    job = jobs.wait_for(sent.id, "failed")
    assert len(diary.entries("began", sent.id)) == 4
    assert (job.rescues, job.attempt, job.percent) == (3, 4, 44)
    assert "max_rescues is 3 and the checkpoint did not advance" in job.errors[-1].error
