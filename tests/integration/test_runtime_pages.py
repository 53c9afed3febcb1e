"""A worker and its children over a real database and a real slate."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from celery_awa.model import Answer, Envelope, JobState, NewAttempt, Transition
from celery_awa.runtime.slate import Slate
from celery_awa.runtime.task_process import TaskProcess
from celery_awa.runtime.trouble import Trouble
from celery_awa.store.canonical import open_store
from tests.conftest import SCHEMA
from tests.runtime_parts import SOON, StartWorker, attempt, begin, described, new_token, settings
from tests.services.postgres import OBSERVER, PrivatePostgres
from tests.waiting import eventually

from . import slate_children
from .jobs import Database

pytest_plugins = ["tests.integration.stores", "tests.integration.runtime"]

FAILED = Transition(
    JobState.FAILED, error="WorkerLostError: signal 9", envelope=Envelope(b"whole", whole=True)
)
OFTEN = {"write_interval": 0.05, "heartbeat_interval": 0.1, "stale_after": 5.0}

Fork = Callable[..., int]


def describe_for(task_id: str) -> Callable[[str | None], NewAttempt]:
    return lambda token: described(token or new_token(), task_id)


@pytest.fixture
def fork(worker_slate: Slate) -> Iterator[Fork]:
    """Forks a child that begins an attempt, does what it is told and then hangs."""
    children: list[int] = []

    def fork_one(
        url: str, task_id: str, then: Callable[[TaskProcess, str], None], **changed: float
    ) -> int:
        ready = slate_children.Signal()

        def work() -> None:
            signal.alarm(60)
            own = Slate.open(worker_slate.path)
            process = TaskProcess(
                settings(**changed),
                lambda: open_store(url, SCHEMA),
                Trouble(),
                slate=own,
                idle_after=0.2,
            )
            then(process, task_id)
            ready.set()
            signal.pause()

        children.append(slate_children.fork(work))
        ready.wait()
        return children[-1]

    yield fork_one
    for child in children:
        try:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        except (ProcessLookupError, ChildProcessError):
            continue


def report(process: TaskProcess, task_id: str) -> None:
    """Claim, report without a flush, as a long task does."""
    begin(process, task_id, claim=True).set_progress(40, "x")


def report_unclaimed(process: TaskProcess, task_id: str) -> None:
    begin(process, task_id).set_progress(40, "x")


def test_a_worker_beats_for_its_children_over_one_connection(
    start_pages: StartWorker, fork: Fork, own_database: Database
) -> None:
    worker = start_pages(own_database.url, **OFTEN)
    worker.start()
    for n in range(4):
        fork(own_database.url, f"task {n}", report)
    eventually(
        lambda: (
            own_database.execute(
                "SELECT count(*) FROM {schema}.jobs_hot WHERE progress ->> 'percent' = '40' "
                "AND heartbeat_at > progress_at"
            )[0]["count"]
            == 4
        )
    )
    connections = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
        "AND application_name = 'celery-awa'"
    )
    # The children's went when they were idle.
    eventually(lambda: own_database.execute(connections)[0]["count"] == 1)
    assert worker.attempts() == 4


@pytest.mark.parametrize("then", [report, report_unclaimed], ids=["claimed", "unclaimed"])
def test_the_last_report_of_a_killed_child_is_kept_with_the_verdict(
    start_pages: StartWorker, fork: Fork, own_database: Database, worker_slate: Slate, then: object
) -> None:
    worker = start_pages(own_database.url, **(OFTEN | {"write_interval": 0.1}))
    child = fork(own_database.url, "task", then)
    slate_children.kill(child)
    worker.start()
    for _ in range(2):
        worker.end_lost("task", child, FAILED, describe_for("task"))
    eventually(lambda: list(worker_slate.pages()) == [])
    row = own_database.row()
    assert (row["state"], row["progress"], row["attempt"], row["run_lease"]) == (
        "failed",
        {"percent": 40, "message": "x"},
        1,
        1,
    )
    assert len(row["errors"]) == 1


def test_an_end_that_a_killed_child_could_not_confirm_is_written_for_it(
    start_pages: StartWorker, fork: Fork, private_url: str, private_postgres: PrivatePostgres
) -> None:
    worker = start_pages(private_url, **OFTEN)

    # The server is stopped by the test's own process, which alone may wait for its end.
    ready, go_on = slate_children.Signal(), slate_children.Signal()

    def end_later(process: TaskProcess, task_id: str) -> None:
        one = attempt(task_id, process)
        process.begin(one, claim=True)
        one.set_progress(60)
        ready.set()
        go_on.wait()
        assert process.end(one, FAILED) is None

    def stop_the_server() -> None:
        ready.wait()
        private_postgres.stop(immediate=True)
        go_on.set()

    stopper = threading.Thread(target=stop_the_server)
    stopper.start()
    child = fork(private_url, "task", end_later)
    stopper.join(SOON)
    slate_children.kill(child)
    private_postgres.start()
    worker.start()
    eventually(lambda: worker.attempts() == 0)
    database = Database(f"{private_url}&application_name={OBSERVER}")
    row = database.row()
    database.close()
    assert (row["state"], row["progress"]) == ("failed", {"percent": 60})


def test_a_flush_of_a_child_beside_its_workers_heartbeat_never_goes_back(
    start_pages: StartWorker, fork: Fork, own_database: Database
) -> None:
    worker = start_pages(
        own_database.url, write_interval=0.001, heartbeat_interval=0.002, stale_after=5.0
    )
    worker.start()

    def flush_often(process: TaskProcess, task_id: str) -> None:
        one = begin(process, task_id, claim=True)
        look = Database(own_database.url)
        for number in range(300):
            one.update_metadata({"n": number})
            assert one.flush_progress() is True
            assert look.row(task_id)["progress"]["metadata"]["n"] == number
        assert not one.lost
        look.close()

    child = fork(own_database.url, "task", flush_often)
    assert own_database.row()["progress"] == {"metadata": {"n": 299}}
    slate_children.kill(child)


def test_heartbeats_that_race_the_ends_of_children_bring_no_running_row_back(
    start_pages: StartWorker,
    fork: Fork,
    own_database: Database,
    our_warnings: Callable[[], list[str]],
) -> None:
    worker = start_pages(
        own_database.url, write_interval=0.001, heartbeat_interval=0.002, stale_after=5.0
    )
    worker.start()

    def begin_and_end(process: TaskProcess, task_id: str) -> None:
        for number in range(100):
            one = begin(process, f"{task_id} {number}", claim=True)
            one.set_progress(number)
            to = JobState.COMPLETED if number % 2 else JobState.FAILED
            ended = process.end(one, Transition(to))
            assert ended is not None
            assert ended.answer is Answer.DONE

    for name in ("a", "b"):
        fork(own_database.url, name, begin_and_end)
    states = own_database.execute(
        "SELECT state, count(*), count(progress) AS kept FROM {schema}.jobs_hot "
        "GROUP BY state ORDER BY state"
    )
    assert states == [
        {"state": "completed", "count": 100, "kept": 0},
        {"state": "failed", "count": 100, "kept": 100},
    ]
    assert worker.attempts() == 0
    assert our_warnings() == []
