"""Workers that are killed with all their children, and what others on their machine make of it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from celery_awa.model import (
    Beat,
    Envelope,
    JobState,
    Lease,
    Rescue,
    Snapshot,
    Thresholds,
    Transition,
)
from celery_awa.runtime.adoption import Adoption
from celery_awa.runtime.attempt import Attempt
from celery_awa.runtime.database_digest import database_digest
from celery_awa.runtime.processes import started
from celery_awa.runtime.slate import Slate
from celery_awa.runtime.slate_files import orphaned
from celery_awa.runtime.task_process import TaskProcess
from celery_awa.runtime.trouble import Trouble
from celery_awa.runtime.worker_pages import WorkerPages
from celery_awa.store.canonical import CanonicalStore, open_store
from tests.conftest import SCHEMA
from tests.runtime_parts import SOON, begin, described, new_token, settings
from tests.services.postgres import OBSERVER, PrivatePostgres
from tests.waiting import eventually

from .jobs import Database
from .slate_children import Counts, Signal, fork, wait

pytest_plugins = ["tests.integration.stores", "tests.integration.runtime"]

CHILDREN = 3
OFTEN = {"write_interval": 0.05, "heartbeat_interval": 0.1, "stale_after": 5.0}
#: Under which nothing is stale but what was forsaken.
PATIENT = Thresholds(stale_after=1_000.0, duplicate_after=1_000.0)
WHOLE = Envelope(b"whole", whole=True)

#: What a child does: its process, its number, and what it calls once it is where the test wants it.
Work = Callable[[TaskProcess, int, Callable[[], None]], None]


class Tree:
    """A worker over a real database, and its pool children, each of which executes one task."""

    def __init__(self, url: str, folder: Path, work: Work) -> None:
        self._url = url
        self._folder = folder
        self._pids = Counts(CHILDREN)
        ready = Signal()
        self._worker = fork(lambda: self._run(work, ready.set))
        for _ in range(1 + CHILDREN):
            ready.wait()

    def kill_worker(self) -> None:
        """The worker alone. Its children hang on, as they do on some systems."""
        os.kill(self._worker, signal.SIGKILL)
        os.waitpid(self._worker, 0)

    def kill(self) -> None:
        """All at once, and wait until none of them lives."""
        with suppress(ProcessLookupError):
            os.killpg(self._worker, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self._worker, 0)
        eventually(lambda: not any(started(self._pids[index]) for index in range(CHILDREN)))

    def _run(self, work: Work, ready: Callable[[], None]) -> None:
        os.setsid()
        signal.alarm(60)
        slate = Slate.create(str(self._folder), 8, 66_560, database_digest(self._url, SCHEMA))
        for index in range(CHILDREN):
            self._pids[index] = fork(lambda index=index: self._execute(slate, work, index, ready))
        WorkerPages(slate, settings(**OFTEN), self._open, Trouble()).start()
        ready()
        signal.pause()

    def _execute(self, slate: Slate, work: Work, index: int, ready: Callable[[], None]) -> None:
        signal.alarm(60)
        own = Slate.open(slate.path)
        process = TaskProcess(settings(), self._open, Trouble(), slate=own, idle_after=0.2)
        work(process, index, ready)
        signal.pause()

    def _open(self) -> CanonicalStore:
        return open_store(self._url, SCHEMA)


Grow = Callable[[str, Work], Tree]


@pytest.fixture
def grow(tmp_path: Path) -> Iterator[Grow]:
    """Starts a worker with children, and ends what is left of it."""
    trees: list[Tree] = []

    def grow_one(url: str, work: Work) -> Tree:
        trees.append(Tree(url, tmp_path, work))
        return trees[-1]

    yield grow_one
    for tree in trees:
        tree.kill()


@pytest.fixture(params=["prefork", "threads"])
def start_another(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Callable[[str], threading.Event]]:
    """Starts another worker on the machine; its event is set once it has adopted something."""
    made: list[WorkerPages | TaskProcess] = []

    def start(url: str) -> threading.Event:
        adopted = threading.Event()
        known = settings(slate_dir=str(tmp_path), rescue_interval=0.1)
        adoption = Adoption(database_digest(url, SCHEMA), known, Trouble(), adopted.set)

        def opened() -> CanonicalStore:
            return open_store(url, SCHEMA)

        if request.param == "prefork":
            made.append(WorkerPages(None, known, opened, Trouble(), adoption=adoption))
        else:
            made.append(TaskProcess(known, opened, Trouble(), adoption=adoption))
        made[-1].start()
        return adopted

    yield start
    for one in made:
        one.database.stop(SOON)


def begin_claimed(process: TaskProcess, index: int) -> Attempt:
    return begin(process, f"task {index}", claim=True, lost_policy="requeue", envelope=WHOLE)


def report_once(process: TaskProcess, index: int, ready: Callable[[], None]) -> None:
    begin_claimed(process, index).update_metadata({"n": index})
    ready()


def adopt(url: str, folder: Path) -> int:
    """One look, over a connection of its own."""
    with closing(open_store(url, SCHEMA)) as store:
        known = settings(slate_dir=str(folder))
        return Adoption(database_digest(url, SCHEMA), known, Trouble()).run_once(lambda: store)


def rows(database: Database) -> list[dict[str, Any]]:
    return database.execute(
        "SELECT id, run_lease, state, heartbeat_at, progress FROM {schema}.jobs ORDER BY task_id"
    )


def checkpoints(found: list[dict[str, Any]]) -> list[int]:
    return [row["progress"]["metadata"]["n"] for row in found]


def test_the_last_reports_of_a_killed_worker_are_kept_and_its_tasks_are_rescued_at_once(
    grow: Grow,
    start_another: Callable[[str], threading.Event],
    own_database: Database,
    tmp_path: Path,
) -> None:
    reported = Counts(CHILDREN)

    def report_for_ever(process: TaskProcess, index: int, ready: Callable[[], None]) -> None:
        one = begin_claimed(process, index)
        for number in range(1, 1 << 32):
            one.update_metadata({"n": number})
            reported[index] = number
            if number == 1_000:
                ready()

    grow(own_database.url, report_for_ever).kill()
    assert start_another(own_database.url).wait(SOON)
    eventually(lambda: list(tmp_path.iterdir()) == [])
    found = rows(own_database)
    assert {(row["state"], row["heartbeat_at"]) for row in found} == {("running", None)}
    kept = checkpoints(found)
    # Of the report that was under way nobody knows whether it was made.
    assert [number - reported[index] in (0, 1) for index, number in enumerate(kept)] == [
        True
    ] * CHILDREN
    with closing(open_store(own_database.url, SCHEMA)) as store:
        leases = [Lease(row["id"], row["run_lease"]) for row in found]
        assert [job.lease for job in store.lost(PATIENT)] == sorted(
            leases, key=lambda lease: lease.job_id
        )
        assert store.rescue(leases, PATIENT) == dict.fromkeys(leases, Rescue.REQUEUED)
        claim = store.claim(described(new_token(), "task 0", from_lease=1))
    assert claim.progress == {"metadata": {"n": kept[0]}}
    assert claim.attempt == 2


def test_children_that_outlive_their_worker_are_waited_for(
    grow: Grow, own_database: Database, tmp_path: Path
) -> None:
    tree = grow(own_database.url, report_once)
    tree.kill_worker()
    assert adopt(own_database.url, tmp_path) == 0
    assert all(row["heartbeat_at"] for row in rows(own_database))
    assert list(orphaned(str(tmp_path), database_digest(own_database.url, SCHEMA)))
    tree.kill()
    assert adopt(own_database.url, tmp_path) == CHILDREN
    assert not any(row["heartbeat_at"] for row in rows(own_database))
    assert list(tmp_path.iterdir()) == []


def test_a_worker_that_lives_keeps_its_slate(
    grow: Grow, own_database: Database, tmp_path: Path
) -> None:
    grow(own_database.url, report_once)
    assert adopt(own_database.url, tmp_path) == 0
    assert all(row["heartbeat_at"] for row in rows(own_database))


def test_a_worker_of_another_schema_leaves_it_alone(
    grow: Grow, own_database: Database, tmp_path: Path
) -> None:
    grow(own_database.url, report_once).kill()
    files = sorted(tmp_path.iterdir())
    another = Adoption(
        database_digest(own_database.url, "another"), settings(slate_dir=str(tmp_path)), Trouble()
    )
    with closing(open_store(own_database.url, SCHEMA)) as store:
        assert another.run_once(lambda: store) == 0
    assert sorted(tmp_path.iterdir()) == files


def test_eight_workers_at_once_adopt_it_once(
    grow: Grow, own_database: Database, tmp_path: Path
) -> None:
    grow(own_database.url, report_once).kill()
    go, written = Signal(), Counts(8)

    def work(index: int) -> None:
        go.wait()
        written[index] = adopt(own_database.url, tmp_path)

    workers = [fork(lambda index=index: work(index)) for index in range(8)]
    go.set(8)
    assert [wait(pid) for pid in workers] == [0] * 8
    assert sorted(written[index] for index in range(8)) == [0] * 7 + [CHILDREN]
    assert checkpoints(rows(own_database)) == list(range(CHILDREN))


def test_an_adopter_that_is_killed_in_the_midst_is_followed_by_another(
    grow: Grow, own_database: Database, tmp_path: Path
) -> None:
    grow(own_database.url, report_once).kill()
    with own_database.locked("task 1"):
        # It waits for the row, half a second at most, with everything of the slate in its hands.
        adopter = fork(lambda: adopt(own_database.url, tmp_path))
        eventually(
            lambda: own_database.execute(
                "SELECT pid FROM pg_stat_activity WHERE datname = current_database() "
                "AND wait_event_type = 'Lock'"
            ),
            interval=0.005,
        )
        os.kill(adopter, signal.SIGKILL)
        assert wait(adopter) == -signal.SIGKILL
    assert adopt(own_database.url, tmp_path) == CHILDREN
    found = rows(own_database)
    assert checkpoints(found) == list(range(CHILDREN))
    assert not any(row["heartbeat_at"] for row in found)


def test_a_row_that_somebody_holds_keeps_no_other_waiting(
    grow: Grow, own_database: Database, tmp_path: Path
) -> None:
    grow(own_database.url, report_once).kill()
    with own_database.locked("task 1"):
        assert adopt(own_database.url, tmp_path) == CHILDREN - 1
        assert [bool(row["heartbeat_at"]) for row in rows(own_database)] == [False, True, False]
    assert adopt(own_database.url, tmp_path) == 1
    assert not any(row["heartbeat_at"] for row in rows(own_database))
    assert list(tmp_path.iterdir()) == []


def test_a_database_that_was_made_anew_is_not_written_for_old_jobs(
    grow: Grow, own_database: Database, tmp_path: Path
) -> None:
    """Its jobs count from 1 again, so that other tasks have the leases of the killed worker's."""
    grow(own_database.url, report_once).kill()
    own_database.empty()
    own_database.execute("ALTER SEQUENCE {schema}.jobs_id_seq RESTART")
    with closing(open_store(own_database.url, SCHEMA)) as store:
        for index in range(CHILDREN):
            lease = store.claim(described(new_token(), f"other {index}")).lease
            assert lease == Lease(index + 1, 1)
            store.heartbeat_with_progress([Beat(lease, Snapshot(1, '{"percent": 7}'))])
    assert adopt(own_database.url, tmp_path) == CHILDREN
    for row in rows(own_database):
        assert (row["progress"], row["heartbeat_at"] is None) == ({"percent": 7}, False)
    assert list(tmp_path.iterdir()) == []


def test_what_a_worker_left_when_its_database_was_away_is_written_when_that_is_back(
    grow: Grow,
    start_another: Callable[[str], threading.Event],
    private_url: str,
    private_postgres: PrivatePostgres,
    tmp_path: Path,
) -> None:
    """An end that a child could not confirm, an attempt that ran, one that had no row yet."""
    begun, go_on = Signal(), Signal()

    def go_on_without_a_database(
        process: TaskProcess, index: int, ready: Callable[[], None]
    ) -> None:
        one = begin(process, "unclaimed") if index == 2 else begin_claimed(process, index)
        begun.set()
        go_on.wait()
        one.update_metadata({"n": 7})
        if index == 0:
            assert process.end(one, Transition(JobState.FAILED, error="boom")) is None
        ready()

    def stop_the_server() -> None:
        for _ in range(CHILDREN):
            begun.wait()
        private_postgres.stop(immediate=True)
        go_on.set(CHILDREN)

    stopper = threading.Thread(target=stop_the_server)
    stopper.start()
    grow(private_url, go_on_without_a_database).kill()
    stopper.join(SOON)
    adopted = start_another(private_url)
    assert not adopted.wait(0.5)
    assert list(tmp_path.iterdir())
    private_postgres.start()
    assert adopted.wait(10.0)
    eventually(lambda: list(tmp_path.iterdir()) == [])
    with closing(Database(f"{private_url}&application_name={OBSERVER}")) as database:
        found = rows(database)
    assert [row["state"] for row in found] == ["failed", "running"]
    assert checkpoints(found) == [7, 7]
    assert found[1]["heartbeat_at"] is None
