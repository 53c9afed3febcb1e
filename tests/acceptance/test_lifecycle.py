"""What becomes of a job in each way an attempt can end, with real workers in every pool.

The tests of one pool share a worker. It writes by the way once a minute only, so what a test
finds in a row was put there by the end that it is about, or by a flush.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import celery
import pytest

from tests.acceptance.brokers import open_broker
from tests.acceptance.diary import Diary, Gate
from tests.acceptance.jobs import Jobs, opened_jobs, outcome
from tests.acceptance.workers import POOLS, Worker, WorkerOptions, load_app, merged
from tests.waiting import eventually

Start = Callable[..., Worker]
#: Celery before 5.7 fails to store the failure, and the caller hears nothing.
CELERY_CAN_STORE_AN_EXIT = tuple(map(int, celery.__version__.split(".")[:2])) >= (5, 7)
LAST = {"percent": 100, "message": "change 1000", "metadata": {"last_id": 1000}}
FORK = POOLS[0]


@dataclass(frozen=True)
class Served:
    """A worker that takes the tasks of several tests, and what they look at."""

    worker: Worker
    client: ModuleType
    jobs: Jobs
    diary: Diary


@pytest.fixture(scope="module", params=POOLS)
def served(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    module_database_url: str,
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    diary = Diary(folder / "diary.jsonl")
    with open_broker("filesystem", folder) as broker, opened_jobs(module_database_url) as jobs:
        config = merged(
            broker.config,
            {
                "test_diary": str(diary.path),
                "awa_database_url": module_database_url,
                "awa_slate_dir": str(folder),
                "awa_write_interval": 60,
                "awa_heartbeat_interval": 60,
                "awa_stale_after": 240,
                "worker_lost_wait": 1.0,
            },
        )
        client = load_app("tests.acceptance.apps.basic", config)
        options: dict[str, Any] = dict(request.param)
        worker = Worker("served", WorkerOptions(config=config, **options), folder)
        try:
            worker.ready()
            yield Served(worker, client, jobs, diary)
        finally:
            worker.end()
            client.app.close()


in_a_child = pytest.mark.parametrize("served", [FORK], indirect=True)


def test_success_clears_the_progress(served: Served, gate: Gate) -> None:
    sent = served.client.report.delay(40, "x", {"a": 1}, gate=gate.path, flush=True)
    served.diary.wait_for("reported", sent.id)
    running = served.jobs.get(sent.id)
    gate.open()
    assert outcome(sent) == 40
    done = served.jobs.wait_for(sent.id, "completed")
    assert running is not None
    assert (running.state, running.attempt) == ("running", 1)
    assert running.progress == {"percent": 40, "message": "x", "metadata": {"a": 1}}
    assert (done.progress, done.errors) == (None, ())
    assert done.finalized_at is not None


def test_what_was_reported_last_before_a_failure_is_kept(served: Served) -> None:
    sent = served.client.fail_after.delay(1000)
    assert "after 1000 changes" in str(outcome(sent))
    job = served.jobs.wait_for(sent.id, "failed")
    assert job.progress == LAST
    assert [error.error for error in job.errors] == ["Unlucky: after 1000 changes"]


@pytest.mark.parametrize("name", ["retry_after", "autoretry_after"])
def test_the_second_attempt_reads_the_last_change_of_the_first_in_its_first_line(
    served: Served, name: str
) -> None:
    sent = getattr(served.client, name).delay(1000)
    assert outcome(sent) == {"last_id": 1000}
    job = served.jobs.wait_for(sent.id, "completed")
    assert (job.attempt, job.run_lease, job.retries) == (2, 2, 1)
    assert len([one for one in served.jobs.all() if one.task_id == sent.id]) == 1


@in_a_child
def test_a_waiting_retry_lies_with_its_progress_and_time(served: Served) -> None:
    sent = served.client.retry_after.delay(10, countdown=300)
    job = served.jobs.wait_for(sent.id, "retryable")
    assert job.progress == {"percent": 100, "message": "change 10", "metadata": {"last_id": 10}}
    assert job.run_at is not None
    assert job.attempted_at is not None
    assert 290 < (job.run_at - job.attempted_at).total_seconds() < 310
    assert [error.error for error in job.errors] == ["Unlucky: again"]


@in_a_child
def test_exhausted_retries_fail_with_the_progress_kept(served: Served) -> None:
    sent = served.client.always_retry.delay(7)
    assert "again" in str(outcome(sent))
    job = served.jobs.wait_for(sent.id, "failed")
    assert (job.attempt, job.progress["percent"]) == (2, 7)
    assert [error.attempt for error in job.errors] == [1, 2]


@in_a_child
def test_attempt_three_reads_what_attempt_one_left(served: Served) -> None:
    sent = served.client.report_in_first_attempt.delay({"by": "first"})
    assert outcome(sent) == {"by": "first"}
    found = [entry["checkpoint"] for entry in served.diary.entries("began", sent.id)]
    assert found == [{}, {"by": "first"}, {"by": "first"}]


def test_a_task_that_neither_reports_nor_lasts_leaves_no_row(served: Served) -> None:
    sent = [served.client.brief.delay(number) for number in range(20)]
    assert [outcome(one) for one in sent] == list(range(20))
    marker = served.client.report.delay(1)
    served.jobs.wait_for(marker.id, "completed")
    assert {job.task_id for job in served.jobs.all()}.isdisjoint(one.id for one in sent)


@pytest.mark.parametrize("pool", POOLS)
def test_a_short_task_that_reports_leaves_a_completed_row_through_a_warm_stop(
    start_worker: Start, client: ModuleType, jobs: Jobs, pool: dict
) -> None:
    worker = start_worker(**pool)
    sent = [client.report.delay(number) for number in range(5)]
    assert [outcome(one) for one in sent] == list(range(5))
    worker.stop(timeout=20)
    states = {job.task_id: (job.state, job.progress) for job in jobs.all()}
    assert states == {one.id: ("completed", None) for one in sent}


@in_a_child
def test_a_hundred_percent_is_not_done(served: Served, gate: Gate) -> None:
    sent = served.client.fail_at_gate.delay(100, gate.path)
    served.diary.wait_for("reported", sent.id)
    job = served.jobs.get(sent.id)
    assert job is not None
    assert (job.state, job.percent) == ("running", 100)
    gate.open()
    outcome(sent)
    assert served.jobs.wait_for(sent.id, "failed").percent == 100


@in_a_child
@pytest.mark.parametrize(
    "limits", [{"soft_time_limit": 1}, {"time_limit": 1}], ids=["soft", "hard"]
)
def test_a_time_limit_fails_once_with_the_last_percent(
    served: Served, gate: Gate, limits: dict[str, int]
) -> None:
    sent = served.client.report.apply_async((60, "x"), {"gate": gate.path}, **limits)
    assert "TimeLimitExceeded" in repr(outcome(sent))
    job = served.jobs.wait_for(sent.id, "failed")
    if "time_limit" in limits:
        served.worker.wait_until_replaced(served.diary.wait_for("reported", sent.id)["pid"])
    assert job.progress == {"percent": 60, "message": "x"}
    assert len(job.errors) == 1
    assert "TimeLimitExceeded" in job.errors[0].error


def test_ignore_cancels_and_keeps(served: Served) -> None:
    sent = served.client.ignore_after.delay(3)
    assert served.jobs.wait_for(sent.id, "cancelled").metadata == {"last_id": 3}


def test_a_rejected_message_fails_its_job_and_keeps_the_progress(
    served: Served, tmp_path: Path
) -> None:
    sent = served.client.reject_after.delay(3, requeue=False, marker=str(tmp_path / "marker"))
    job = served.jobs.wait_for(sent.id, "failed")
    assert (job.metadata, len(job.errors)) == ({"last_id": 3}, 1)


def test_a_message_rejected_back_to_the_queue_goes_on_from_its_checkpoint(
    served: Served, tmp_path: Path
) -> None:
    sent = served.client.reject_after.delay(3, requeue=True, marker=str(tmp_path / "marker"))
    assert outcome(sent) == {"last_id": 3}
    assert served.jobs.wait_for(sent.id, "completed").attempt == 2


def test_a_result_that_cannot_be_serialised_fails_and_keeps(served: Served) -> None:
    sent = served.client.return_unserialisable.delay(3)
    job = served.jobs.wait_for(sent.id, "failed")
    assert (job.metadata, len(job.errors)) == ({"last_id": 3}, 1)


def test_system_exit_fails_and_keeps_where_celery_loses_the_task(
    start_worker: Start, client: ModuleType, jobs: Jobs
) -> None:
    start_worker(pool="threads")
    sent = client.exit_after.delay(3)
    job = jobs.wait_for(sent.id, "failed")
    assert (job.metadata, [e.error for e in job.errors]) == ({"last_id": 3}, ["SystemExit: 3"])


@in_a_child
def test_system_exit_in_a_child_fails_as_celery_says(served: Served) -> None:
    sent = served.client.exit_after.delay(3)
    assert served.jobs.wait_for(sent.id, "failed").metadata == {"last_id": 3}
    served.worker.wait_until_replaced(served.diary.wait_for("began", sent.id)["pid"])
    if CELERY_CAN_STORE_AN_EXIT:
        assert "WorkerLostError" in repr(outcome(sent))


@in_a_child
def test_a_replacement_begins_without_progress_under_its_own_name(
    served: Served, gate: Gate
) -> None:
    sent = served.client.replace_by.delay("report", 5, "new", None, gate.path, True)
    served.diary.wait_for("reported", sent.id)
    job = served.jobs.get(sent.id)
    gate.open()
    assert outcome(sent) == 5
    assert job is not None
    assert (job.kind, job.progress) == (served.client.report.name, {"percent": 5, "message": "new"})
    assert len([one for one in served.jobs.all() if one.task_id == sent.id]) == 1


@in_a_child
def test_a_replacement_of_another_class_leaves_no_row(served: Served) -> None:
    sent = served.client.replace_by.delay("echo", "plain")
    assert outcome(sent) == "plain"
    assert served.jobs.get(sent.id) is None


@in_a_child
def test_a_retry_without_leaving_runs_twice_and_the_row_follows_the_newest_lease(
    served: Served, gate: Gate
) -> None:
    sent = served.client.retry_and_go_on.delay(gate.path)
    served.diary.wait_for("began", sent.id, count=2)
    job = served.jobs.wait_for(sent.id, "completed")
    gate.open()
    eventually(lambda: len(served.diary.entries("began", sent.id)) == 2)
    assert (job.attempt, job.run_lease) == (2, 2)
    assert served.diary.entries("began", sent.id)[1]["checkpoint"] == {}


@in_a_child
def test_a_new_message_under_a_finished_id_is_a_fresh_run(served: Served) -> None:
    outcome(served.client.fail_after.apply_async((3,), task_id="again"))
    failed = served.jobs.wait_for("again", "failed")
    served.client.retry_after.apply_async((1, 300), task_id="again")
    waiting = served.jobs.wait_for("again", "retryable")
    assert [entry["checkpoint"] for entry in served.diary.entries("began", "again")] == [{}, {}]
    assert (waiting.run_lease, waiting.attempt) == (failed.run_lease + 1, 1)
    assert [error.error for error in waiting.errors] == ["Unlucky: again"]


@in_a_child
def test_headers_of_the_user_survive_a_retry_and_do_not_break_the_run(served: Served) -> None:
    sent = served.client.retry_with_headers.apply_async(headers={"customer": "first"})
    assert outcome(sent) == {"left": True}
    assert served.jobs.wait_for(sent.id, "completed").attempt == 2
    seen = [entry["customer"] for entry in served.diary.entries("headers", sent.id)]
    assert seen == ["first", "second"]


def test_results_are_the_same_with_and_without_the_plugin(
    start_worker: Start, client: ModuleType, load_client: Callable[..., ModuleType], broker: Any
) -> None:
    with_plugin = start_worker()
    ours = _results(client)
    with_plugin.stop(timeout=20)
    start_worker(config={"test_plain": True})
    plain = _results(load_client(config={"test_plain": True}))
    assert ours == plain


def _results(client: ModuleType) -> list[Any]:
    sent = [
        client.brief.delay({"a": [1, "x"]}),
        client.report.delay(5),
        client.fail_after.delay(2),
        client.return_unserialisable.delay(1),
        client.brief.apply_async((1,), ignore_result=True),
    ]
    for one in sent[:-1]:
        outcome(one)
    return [(one.state, type(one.result).__name__, str(one.result)) for one in sent[:-1]]
