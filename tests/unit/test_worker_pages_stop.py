"""What a worker that stops makes of its children's attempts: cancelled, or left as they are."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from celery_awa.model import Answer, JobState, NewAttempt, Transition
from celery_awa.runtime.database_digest import database_digest
from celery_awa.runtime.ending import to_page
from celery_awa.runtime.slate import Slate
from celery_awa.runtime.worker_pages import WorkerPages
from tests.fake_store import FakeDatabase, Row
from tests.runtime_parts import (
    SOON,
    StartProcess,
    StartWorker,
    carried,
    claimed,
    described,
    new_token,
)
from tests.waiting import eventually

from .children import AVAILABLE, FAILED, Run, describe, own_page

COMPLETED = Transition(JobState.COMPLETED)
SELDOM = {"write_interval": 500.0, "heartbeat_interval": 500.0}


@pytest.fixture
def adoptable(tmp_path: Path) -> Iterator[Slate]:
    """A slate that names its database."""
    folder = tmp_path / "adoptable"
    folder.mkdir()
    slate = Slate.create(str(folder), 8, 66_560, database_digest("postgresql:///db", "schema"))
    yield slate
    slate.close(unlink=True)


def is_forsaken(row: Row) -> bool:
    return row.state is JobState.RUNNING and row.heartbeat_at is None


# Celery's word that its children's attempts are to be tried again.


@pytest.mark.parametrize("claim", [True, False])
def test_what_a_child_runs_when_it_is_cancelled_is_ended_with_its_last_snapshot(
    worker: WorkerPages, database: FakeDatabase, slate: Slate, run: Run, claim: bool
) -> None:
    child = run(claim=claim)
    worker.end_cancelled("task", child.pid, AVAILABLE, describe)
    eventually(lambda: database.rows and database.rows["task"].state is JobState.AVAILABLE)
    row = database.rows["task"]
    assert (row.progress, row.token, row.unsent, row.whole) == (
        {"percent": 40},
        child.token,
        True,
        True,
    )
    assert carried(slate) == ["task"]  # it lives
    child.kill()
    eventually(lambda: carried(slate) == [])
    eventually(lambda: not worker._verdicts)


def test_without_a_page_that_carries_the_attempt_nothing_is_cancelled(
    worker: WorkerPages, database: FakeDatabase, slate: Slate, start_worker: StartWorker
) -> None:
    """It ended, and its end is confirmed; or it is another process's, or there is no slate."""
    page, _ = own_page(slate, database)
    worker.database.ask(lambda store: None, SOON)
    statements = database.count("end", "end_unclaimed")
    worker.end_cancelled("task", os.getpid() + 1, AVAILABLE, describe)
    worker.end_cancelled("another", os.getpid(), AVAILABLE, describe)
    start_worker(None).end_cancelled("task", os.getpid(), AVAILABLE, describe)
    page.clear()
    worker.end_cancelled("task", os.getpid(), AVAILABLE, describe)
    worker.database.ask(lambda store: None, SOON)
    assert database.count("end", "end_unclaimed") == statements
    assert not worker._verdicts


def test_an_end_that_lies_on_the_page_wins(
    worker: WorkerPages, database: FakeDatabase, slate: Slate, run: Run
) -> None:
    child = run(own_end=to_page(COMPLETED))
    worker.end_cancelled("task", child.pid, AVAILABLE, describe)
    child.kill()
    eventually(lambda: carried(slate) == [])
    assert database.rows["task"].state is JobState.COMPLETED


def test_an_end_that_a_child_leaves_before_the_cancellation_is_written_wins(
    worker: WorkerPages, database: FakeDatabase, slate: Slate
) -> None:
    page, _ = own_page(slate, database)
    worker.database.ask(lambda store: None, SOON)
    with database.hanging():
        worker.end_cancelled("task", os.getpid(), AVAILABLE, describe)
        page.set_end(to_page(COMPLETED))
    worker.database.ask(lambda store: None, SOON)
    row = database.rows["task"]
    assert row.state is JobState.RUNNING  # it lives, and writes it itself
    beats = row.beats
    eventually(lambda: row.beats > beats + 1)
    page.clear()
    eventually(lambda: not worker._verdicts)


def test_such_an_end_is_written_for_a_child_that_dies(
    worker: WorkerPages, database: FakeDatabase, slate: Slate, run: Run
) -> None:
    from_child = run(own_end=None)
    (view,) = slate.pages()
    worker.database.ask(lambda store: None, SOON)
    with database.hanging():
        worker.end_cancelled("task", from_child.pid, AVAILABLE, describe)
        # In the child's place, which is stopped meanwhile.
        view._records.end.write(view._seed, 0, to_page(COMPLETED))
        from_child.kill()
        database.locked.add("task")
    seen = len(database.statements)
    database.until(lambda: database.statements[seen:].count("end") > 2)
    assert carried(slate) == ["task"]
    database.locked.clear()
    eventually(lambda: carried(slate) == [])
    assert database.rows["task"].state is JobState.COMPLETED
    eventually(lambda: not worker._verdicts)


def test_what_gave_way_leaves_the_word_to_celerys_verdict(
    worker: WorkerPages, database: FakeDatabase, slate: Slate, run: Run
) -> None:
    """An end that is not written yet does not hold against it, with and without the stop."""
    child = run()
    pid = child.pid
    (view,) = slate.pages()
    worker.database.ask(lambda store: None, SOON)
    with database.hanging():
        worker.end_cancelled("task", pid, AVAILABLE, describe)
        view._records.end.write(view._seed, 0, to_page(COMPLETED))
    worker.database.ask(lambda store: None, SOON)
    worker.end_lost("task", pid, FAILED, describe)
    eventually(lambda: database.rows["task"].state is JobState.FAILED)


def test_an_end_that_was_made_before_the_cancellation_is_written_wins(
    worker: WorkerPages, database: FakeDatabase, slate: Slate
) -> None:
    page, _ = own_page(slate, database)
    row = database.rows["task"]
    worker.database.ask(lambda store: None, SOON)
    with database.hanging():
        worker.end_cancelled("task", os.getpid(), AVAILABLE, describe)
        row.state = JobState.COMPLETED
        page.clear()
    worker.database.ask(lambda store: None, SOON)
    assert row.state is JobState.COMPLETED
    assert database.count("end", "end_unclaimed") == 0
    eventually(lambda: not worker._verdicts)


def test_a_child_that_lives_on_after_its_cancellation_finds_its_lease_lost(
    start_process: StartProcess, start_worker: StartWorker, database: FakeDatabase, slate: Slate
) -> None:
    worker, child = start_worker(slate), start_process(slate)
    one = claimed(child)
    assert child.owns(one)
    worker.end_cancelled("task", os.getpid(), AVAILABLE, describe)
    eventually(lambda: one.lost)
    assert not child.owns(one)
    assert child.end(one, COMPLETED) is None
    assert database.rows["task"].state is JobState.AVAILABLE


def test_the_first_of_two_ends_wins_in_the_database(
    start_process: StartProcess, start_worker: StartWorker, database: FakeDatabase, slate: Slate
) -> None:
    """The child's success comes between the cancellation and the child's hearing of it."""
    worker, child = start_worker(slate, **SELDOM), start_process(slate)
    one = claimed(child)
    with database.hanging():
        worker.end_cancelled("task", os.getpid(), AVAILABLE, describe)
        assert not one.lost
    eventually(lambda: database.rows["task"].state is JobState.AVAILABLE)
    lease = database.rows["task"].lease
    ended = database.open().end(lease, one.token, COMPLETED)
    assert ended.answer is Answer.GONE


def test_a_verdict_after_the_cancellation_changes_nothing(
    worker: WorkerPages, database: FakeDatabase, slate: Slate, run: Run
) -> None:
    child = run()
    pid = child.pid
    worker.end_cancelled("task", pid, AVAILABLE, describe)
    worker.end_cancelled("task", pid, FAILED, describe)
    child.kill()
    worker.end_lost("task", pid, FAILED, describe)
    eventually(lambda: carried(slate) == [])
    row = database.rows["task"]
    assert (row.state, row.errors) == (JobState.AVAILABLE, [])
    assert database.count("end", "end_unclaimed") == 1


def test_a_cancellation_after_the_verdict_changes_nothing(
    worker: WorkerPages, database: FakeDatabase, slate: Slate, run: Run
) -> None:
    child = run()
    pid = child.pid
    child.kill()
    with database.hanging():
        worker.end_lost("task", pid, FAILED, describe)
        worker.end_cancelled("task", pid, AVAILABLE, describe)
    eventually(lambda: carried(slate) == [])
    assert database.rows["task"].state is JobState.FAILED


def test_a_cancellation_that_cannot_be_described_is_told_of(
    worker: WorkerPages, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    def undescribable(token: str | None) -> NewAttempt:
        raise RuntimeError("a repr of the user's")

    worker.end_cancelled("task", run().pid, AVAILABLE, undescribable)
    assert "a verdict is not recorded" in caplog.text


# A worker that dies with its children.


def test_a_dying_worker_gives_up_what_nobody_will_speak_for(
    start_worker: StartWorker, database: FakeDatabase, slate: Slate, run: Run
) -> None:
    worker = start_worker(slate, **SELDOM)
    worker.database.ask(lambda store: None, SOON)
    alive, dead, judged = run("alive", percent=1), run("dead", percent=2), run("judged", percent=3)
    run("ended", own_end=to_page(COMPLETED))
    run("unclaimed", claim=False)
    worker.end_cancelled("judged", judged.pid, AVAILABLE, describe)
    dead.kill()
    assert worker.stop(SOON, dying=True)
    rows = database.rows
    assert {name for name, row in rows.items() if is_forsaken(row)} == {"alive", "dead"}
    assert {name: row.progress for name, row in rows.items() if row.progress} == {
        "alive": {"percent": 1},
        "dead": {"percent": 2},
        "judged": {"percent": 3},
    }
    assert (rows["ended"].state, rows["judged"].state) == (JobState.COMPLETED, JobState.AVAILABLE)
    assert database.count("forsake") == 1
    assert alive.pid
    assert not os.path.exists(slate.path)


def test_a_worker_that_stops_in_order_gives_nothing_up(
    start_worker: StartWorker, database: FakeDatabase, slate: Slate, run: Run
) -> None:
    worker = start_worker(slate, **SELDOM)
    run().kill()
    assert worker.stop(SOON)
    assert database.count("forsake") == 0
    assert database.rows["task"].progress == {"percent": 40}


def test_no_heartbeat_takes_back_what_a_dying_worker_gave_up(
    worker: WorkerPages, database: FakeDatabase, run: Run
) -> None:
    run("given up")
    run("locked")
    worker.database.ask(lambda store: None, SOON)
    database.locked.add("locked")  # keeps the stop open
    stopping = threading.Thread(target=worker.stop, args=(SOON,), kwargs={"dying": True})
    stopping.start()
    row = database.rows["given up"]
    eventually(lambda: is_forsaken(row))
    beats, seen = row.beats, len(database.statements)
    database.until(lambda: len(database.statements) > seen + 20)
    assert (row.beats, is_forsaken(row)) == (beats, True)
    database.locked.clear()
    stopping.join(SOON)
    assert is_forsaken(database.rows["locked"])


# What is left behind.


def test_a_slate_that_is_not_confirmed_is_left_to_the_next_worker(
    start_worker: StartWorker, database: FakeDatabase, adoptable: Slate
) -> None:
    worker = start_worker(adoptable, **SELDOM)
    _, buffer = own_page(adoptable, database)
    buffer.set_progress(40)
    database.go_away()
    assert not worker.stop(0.1)
    assert os.path.exists(adoptable.path)


def test_a_slate_that_carries_nothing_goes_even_if_something_is_not_confirmed(
    start_worker: StartWorker, database: FakeDatabase, adoptable: Slate
) -> None:
    worker = start_worker(adoptable, **SELDOM)
    database.go_away()
    worker.end_unstarted(described(new_token()), Transition(JobState.CANCELLED))
    assert not worker.stop(0.1)
    assert not os.path.exists(adoptable.path)


def test_a_slate_that_nobody_could_adopt_goes(
    start_worker: StartWorker, database: FakeDatabase, slate: Slate
) -> None:
    worker = start_worker(slate, **SELDOM)
    _, buffer = own_page(slate, database)
    buffer.set_progress(40)
    database.go_away()
    assert not worker.stop(0.1)
    assert not os.path.exists(slate.path)
