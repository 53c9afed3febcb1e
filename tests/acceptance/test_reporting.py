"""Where a task may report from, and what its row shows of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from celery_awa import InvalidProgress
from tests.acceptance.diary import Diary, Gate
from tests.acceptance.jobs import Jobs
from tests.acceptance.workers import POOLS, Worker
from tests.faults import Proxy
from tests.waiting import eventually

Start = Callable[..., Worker]
Load = Callable[..., ModuleType]
STEPS = "tests.acceptance.apps.steps"


def wait_for_progress(jobs: Jobs, task_id: str, progress: dict[str, Any] | None) -> None:
    def shown() -> bool:
        job = jobs.get(task_id)
        assert job is not None
        assert (job.state, job.progress) == ("running", progress)
        return True

    eventually(shown, what=f"{progress} in the row")


@pytest.mark.parametrize("pool", POOLS)
def test_what_was_flushed_is_what_another_connection_reads(
    start_worker: Start, load_client: Load, jobs: Jobs, diary: Diary, tmp_path: Any, pool: dict
) -> None:
    client = load_client(STEPS)
    start_worker(app=STEPS, **pool, config={"awa_claim_after": 0, "awa_write_interval": 60})
    merged = {"a": 1, "b": 2, "c": {"new": True}}
    for number, (calls, progress) in enumerate(
        [
            ([], None),
            ([["set_progress", 50, "x"], ["set_progress", 60]], {"percent": 60}),
            ([["update_metadata", {"a": 1}]], {"metadata": {"a": 1}}),
            (
                [
                    ["set_progress", None, "x"],
                    ["update_metadata", {"a": 1, "b": 1, "c": {"old": True}}],
                    ["update_metadata", {"b": 2, "c": {"new": True}}],
                ],
                {"percent": None, "message": "x", "metadata": merged},
            ),
        ]
    ):
        gate = Gate(tmp_path / f"gate {number}")
        sent = client.follow.delay(calls, gate.path)
        assert diary.wait_for("flushed", sent.id)["flushed"] is True
        job = jobs.get(sent.id)
        gate.open()
        assert job is not None
        assert (job.state, job.progress) == ("running", progress)
        jobs.wait_for(sent.id, "completed")


def test_helpers_coroutines_threads_and_nested_calls_report_to_their_own_attempt(
    start_worker: Start, client: ModuleType, jobs: Jobs, gate: Gate, diary: Diary
) -> None:
    start_worker(concurrency=5)
    threads = {f"thread {number}": 200 for number in range(4)}
    expected = {
        client.report_in_threads.delay(4, 200, gate.path): {"metadata": threads},
        client.report_in_coroutine.delay(gate.path): {
            "percent": 25,
            "message": "in a coroutine",
            "metadata": {"by": "to_thread"},
        },
        client.call_other_task.delay(gate.path): {"percent": 20, "message": "outer"},
        client.report_unbound.delay(35, "deep", gate.path): {"percent": 35, "message": "deep"},
        client.shared_report.delay(45, "x", gate.path): {"percent": 45, "message": "x"},
    }
    for sent, progress in expected.items():
        wait_for_progress(jobs, sent.id, progress)
    gate.open()
    for sent in expected:
        sent.get(timeout=20)
    assert len(jobs.all()) == len(expected)
    assert [entry["within"] for entry in diary.entries("inner")] == [False, True]


def test_plain_threads_need_the_handle_and_eager_tasks_keep_to_themselves(
    start_worker: Start, load_client: Load, jobs: Jobs, gate: Gate, diary: Diary
) -> None:
    client = load_client(STEPS)
    start_worker(app=STEPS, concurrency=3)
    by_handle = client.report_from_plain_threads.delay(gate.path)
    within = client.apply_within.delay(gate.path)
    of_class = client.class_based.delay(15, gate.path)
    wait_for_progress(jobs, by_handle.id, {"percent": 30, "message": "by the handle"})
    wait_for_progress(jobs, within.id, {"percent": 20, "message": "outer"})
    wait_for_progress(jobs, of_class.id, {"percent": 15, "message": "of a class"})
    assert diary.wait_for("without the handle")["attempt"] is None
    assert diary.wait_for("with the handle")["flushed"] is True
    inner = diary.wait_for("applied")["inner"]
    gate.open()
    assert within.get(timeout=20) == "SUCCESS"
    jobs.wait_for(within.id, "completed")
    assert jobs.get(inner) is None


@pytest.fixture
def unused(proxy_to: Callable[[str], Proxy], database_url: str) -> Iterator[str]:
    """The URL of a database that nobody connects to."""
    proxy = proxy_to(database_url)
    yield proxy.through(database_url)
    assert proxy.accepted == 0


def test_outside_an_attempt_reporting_checks_its_input_and_connects_to_nothing(
    load_client: Load, diary: Diary, unused: str
) -> None:
    client = load_client(config={"awa_database_url": unused})
    assert client.report(40, "x", {"a": 1}, flush=True) == 40
    assert client.report.run(40, "x", {"a": 1}, flush=True) == 40
    assert [entry["flushed"] for entry in diary.entries("reported")] == [True, True]
    assert (client.report.progress, dict(client.report.checkpoint)) == (None, {})
    assert (client.report.attempt, client.current_attempt()) == (None, None)
    with pytest.raises(InvalidProgress, match="percent"):
        client.report.set_progress("50")
    with pytest.raises(InvalidProgress, match="metadata"):
        client.report.update_metadata({"a": object()})


@pytest.mark.parametrize("always", [False, True], ids=["applied", "always eager"])
def test_eager_tasks_keep_their_checkpoint_in_memory(
    load_client: Load, diary: Diary, unused: str, always: bool
) -> None:
    client = load_client(config={"awa_database_url": unused, "task_always_eager": always})

    def run(task: Any, *args: Any, **options: Any) -> Any:
        return (task.apply_async if always else task.apply)(args, **options)

    assert run(client.report, 40, "x", {"a": 1}, None, True, True).get() == 40
    assert diary.wait_for("reported")["flushed"] is True
    assert run(client.retry_after, 3, 0.0, 3).get() == {"last_id": 3}
    assert run(client.autoretry_after, 3).get() == {"last_id": 3}
    assert run(client.always_retry, 3, task_id="again").state == "FAILURE"
    assert run(client.report, 40, None, None, None, False, True, task_id="again").get() == 40
    found = [entry["checkpoint"] for entry in diary.entries("began", "again")]
    assert found == [{}, {"last_id": 3}, {}]


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_rows_are_the_same_without_a_result_backend_and_with_ignored_results(
    start_worker: Start, load_client: Load, jobs: Jobs, pool: str
) -> None:
    config = {"result_backend": "disabled://"}
    client = load_client(config=config)
    start_worker(pool=pool, config=config)
    completed = [
        client.report.delay(5),
        client.report.apply_async((5,), ignore_result=True),
        client.retry_after.delay(3),
        client.retry_after.apply_async((3,), ignore_result=True),
    ]
    failed = [client.fail_after.delay(3), client.fail_after.apply_async((3,), ignore_result=True)]
    done = [jobs.wait_for(sent.id, "completed") for sent in completed]
    kept = [jobs.wait_for(sent.id, "failed") for sent in failed]
    assert [(job.attempt, job.progress) for job in done] == [(1, None)] * 2 + [(2, None)] * 2
    assert [(job.metadata, len(job.errors)) for job in kept] == [({"last_id": 3}, 1)] * 2


def test_a_soft_time_limit_that_strikes_inside_a_report_leaves_everything_usable(
    start_worker: Start, load_client: Load, jobs: Jobs, gate: Gate, diary: Diary
) -> None:
    client = load_client(STEPS)
    worker = start_worker(app=STEPS, concurrency=1)
    children = worker.children()
    for verb in ("set_progress", "update_metadata", "flush_progress"):
        sent = client.report_under_strikes.delay(verb, 40)
        last = strike(diary, sent.id, 40)
        job = jobs.wait_for(sent.id, "failed")
        shown = job.metadata.get("number") if verb == "update_metadata" else int(job.message or 0)
        # Whether the change that was struck counts depends on where it was struck.
        assert shown in (last - 1, last)
        assert "SoftTimeLimitExceeded" in job.errors[0].error
    sent = client.class_based.delay(15, gate.path)
    wait_for_progress(jobs, sent.id, {"percent": 15, "message": "of a class"})
    gate.open()
    sent.get(timeout=20)
    assert worker.children() == children


def strike(diary: Diary, task_id: str, times: int) -> int:
    """Do what Celery does at a soft time limit, often; returns the last number reported."""
    child = diary.wait_for("began", task_id)["pid"]
    struck: dict[str, Any] = {}
    for count in range(1, times + 1):
        os.kill(child, signal.SIGUSR1)
        struck = diary.wait_for("struck", task_id, count=count)
        assert struck["flushed"] is True
    return int(struck["number"])
