"""Reading jobs: what get_job and list_jobs show, also while the rows change and move."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime

import pytest

from celery_awa.model import Beat, JobState, Snapshot, Transition
from celery_awa.store.canonical import CanonicalStore

from .jobs import (
    Database,
    OpenStore,
    StoreOn,
    attempt,
    claimed,
    retried_job,
    running,
    snapshot,
    stored,
)

pytest_plugins = ["tests.integration.stores"]

#: Reads in each race with a writer; some hundred writes fall between them.
READS = 500


def test_a_job_is_shown_whole(store: CanonicalStore) -> None:
    lease = running(store)
    store.end(
        lease,
        "first",
        Transition(JobState.RETRYABLE, snapshot(), error="ValueError: boom", run_in=60),
    )

    job = store.get_job("task")

    assert job is not None
    assert (job.task_id, job.state, job.attempt) == ("task", JobState.RETRYABLE, 1)
    assert (job.id, job.run_lease, job.retries, job.rescues) == (lease.job_id, 1, 0, 0)
    assert (job.kind, job.queue, job.worker) == ("shop.import_rows", "celery", "worker@host")
    assert job.progress == stored()
    assert (job.percent, job.metadata) == (40, {"last_id": 40})
    assert [(e.attempt, e.error) for e in job.errors] == [(1, "ValueError: boom")]
    for moment in (job.created_at, job.attempted_at, job.progress_at, job.run_at, job.errors[0].at):
        assert isinstance(moment, datetime)
        assert moment.tzinfo is not None
    assert job.finalized_at is None


def test_an_unknown_task_has_no_job(store: CanonicalStore) -> None:
    assert store.get_job("unknown") is None


@pytest.mark.parametrize("zone", ["UTC", "Asia/Kathmandu", "America/St_Johns"])
def test_times_are_read_right_in_any_zone_of_the_server(
    own_database: Database, zone: str, store_on: StoreOn
) -> None:
    own_database.set_default("timezone", zone)
    store = store_on(own_database.url)
    store.end_unclaimed(attempt(), Transition(JobState.FAILED, error="boom"))

    job = store.get_job("task")

    assert job is not None
    assert job.errors[0].at == job.finalized_at


def test_jobs_of_every_state_are_listed_newest_first(store: CanonicalStore) -> None:
    for state in JobState:
        retried_job(store, state.value, state)

    jobs = store.list_jobs()

    assert [job.task_id for job in jobs] == [state.value for state in reversed(JobState)]
    assert [job.state for job in jobs] == list(reversed(JobState))


def test_jobs_are_listed_by_state_and_kind(store: CanonicalStore) -> None:
    for number, state in enumerate((JobState.FAILED, JobState.RETRYABLE, JobState.FAILED)):
        store.end_unclaimed(
            attempt(f"{number}", f"{number}", kind=f"kind {number % 2}"), Transition(state)
        )

    assert [job.task_id for job in store.list_jobs(state=JobState.FAILED)] == ["2", "0"]
    assert [job.task_id for job in store.list_jobs(kind="kind 1")] == ["1"]
    assert store.list_jobs(state=JobState.FAILED, kind="kind 1") == []


def test_pages_show_every_job_once_though_rows_move_and_come_meanwhile(
    store: CanonicalStore,
) -> None:
    leases = [running(store, f"{number}") for number in range(25)]
    seen: list[str] = []
    before_id = None
    while page := store.list_jobs(limit=10, before_id=before_id):
        seen += [job.task_id for job in page]
        before_id = page[-1].id
        number = len(seen)
        store.end(leases[number % 25], "first", Transition(JobState.RETRYABLE))
        running(store, f"new {number}")

    assert seen == [f"{number}" for number in reversed(range(25))]


def test_state_progress_and_message_come_from_one_read(
    store: CanonicalStore, open_another: OpenStore
) -> None:
    lease = running(store)
    numbers = itertools.count(1)
    writer = open_another()

    def write() -> None:
        number = next(numbers)
        text = f'{{"percent": {number}, "message": "{number}", "metadata": {{"n": {number}}}}}'
        writer.heartbeat_with_progress([Beat(lease, Snapshot(number, text))])

    write()
    seen = set()
    with repeatedly(write):
        for _ in range(READS):
            job = store.get_job("task")
            assert job is not None
            assert (job.message, job.metadata) == (str(job.percent), {"n": job.percent})
            assert store.list_jobs()[0].message is not None
            seen.add(job.percent)

    assert len(seen) > 10


def test_a_job_that_moves_between_the_tables_is_always_seen_once_with_what_belongs_to_its_state(
    store: CanonicalStore, open_another: OpenStore
) -> None:
    writer = open_another()
    numbers = itertools.count(1)

    def move() -> None:
        token = f"{next(numbers)}"
        _, lease = claimed(writer, attempt(token, from_lease=2**40, run_token=token))
        transition = Transition(JobState.RETRYABLE, snapshot(), error=token, unsent=True)
        writer.end(lease, token, transition)

    move()
    seen = set()
    with repeatedly(move):
        for _ in range(READS):
            jobs = store.list_jobs()
            assert len(jobs) == 1
            job = store.get_job("task")
            assert job is not None
            for one in (job, jobs[0]):
                waits = one.state is JobState.RETRYABLE
                assert waits or one.state is JobState.RUNNING
                assert (one.progress, len(one.errors)) == ((stored(), 1) if waits else (None, 0))
            seen.add((job.state, job.run_lease))

    assert len(seen) > 10


@contextmanager
def repeatedly(write: Callable[[], None]) -> Iterator[None]:
    """Write again and again in a thread, until the block ends; its error is raised then."""
    over = threading.Event()
    failed: list[BaseException] = []

    def loop() -> None:
        try:
            while not over.is_set():
                write()
        except BaseException as exc:
            failed.append(exc)

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert failed == []
