"""What a worker does for its children: beats for them, ends the lost ones, frees their pages."""

from __future__ import annotations

import os
import time

import pytest

from celery_awa.model import Envelope, JobState, NewAttempt, Transition
from celery_awa.runtime import sweep as sweep_module
from celery_awa.runtime.ending import to_page
from celery_awa.runtime.errand import Errand
from celery_awa.runtime.slate import Slate
from celery_awa.runtime.sweep import Sweep
from celery_awa.runtime.trouble import Trouble
from celery_awa.runtime.verdicts import Verdicts
from celery_awa.runtime.worker_pages import WorkerPages
from tests.fake_store import FakeDatabase
from tests.runtime_parts import SOON, Clock, StartWorker, carried, described, new_token, settings
from tests.waiting import eventually

from .children import AVAILABLE, FAILED, Run, describe, own_page

# Heartbeats.


def test_the_worker_beats_for_all_children_over_one_connection(
    worker: WorkerPages, database: FakeDatabase, run: Run
) -> None:
    for n in range(3):
        run(f"task {n}", percent=n)
    before = database.opened
    eventually(
        lambda: (
            [row.progress for row in database.rows.values()] == [{"percent": n} for n in range(3)]
        )
    )
    eventually(lambda: all(row.beats > 2 for row in database.rows.values()))
    assert database.opened <= before + 1
    assert worker.attempts() == 3


def test_a_child_reads_on_its_page_what_the_database_said(
    worker: WorkerPages, database: FakeDatabase, slate: Slate
) -> None:
    page, buffer = own_page(slate, database)
    buffer.set_progress(10)
    began = time.monotonic()
    eventually(lambda: page.acknowledged() == 1)
    assert page.confirmed_at() == pytest.approx(began, abs=SOON)
    assert not page.lost()
    database.rows["task"].run_lease += 1
    buffer.set_progress(20)
    eventually(page.lost)


def test_without_children_nothing_is_sent_but_the_first_look(
    start_worker: StartWorker, slate: Slate, database: FakeDatabase
) -> None:
    worker = start_worker(slate)
    eventually(lambda: worker.heartbeat._next > 0)
    assert worker.stop(SOON)
    assert database.statements == []
    assert not os.path.exists(slate.path)


def test_a_first_look_tells_what_is_wrong(
    start_worker: StartWorker, database: FakeDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    database.go_away("no such host")
    start_worker(None)
    eventually(lambda: "no such host" in caplog.text)


# Verdicts.


@pytest.mark.parametrize("claim", [True, False])
@pytest.mark.parametrize("verdict", [FAILED, AVAILABLE])
def test_a_killed_child_gets_the_verdict_with_its_last_snapshot(
    worker: WorkerPages,
    database: FakeDatabase,
    slate: Slate,
    run: Run,
    claim: bool,
    verdict: Transition,
) -> None:
    child = run(claim=claim)
    pid = child.pid
    child.kill()
    worker.end_lost("task", pid, verdict, describe)
    eventually(lambda: database.rows and database.rows["task"].state is verdict.to)
    row = database.rows["task"]
    assert (row.progress, row.attempt, row.token) == ({"percent": 40}, 1, child.token)
    eventually(lambda: carried(slate) == [])
    assert not worker._verdicts


@pytest.mark.parametrize("claim", [True, False])
def test_without_a_page_the_verdict_finds_the_attempt_by_its_token(
    start_worker: StartWorker, database: FakeDatabase, claim: bool
) -> None:
    """Also under policy requeue, where the database refuses whoever else names the task."""
    requeue = {"lost_policy": "requeue", "envelope": Envelope(b"{}", True)}
    token = new_token()
    if claim:
        database.open().claim(described(token, "task", **requeue))

    def describe_so(known: str | None) -> NewAttempt:
        return described(known or new_token(), "task", **requeue)

    start_worker(None).end_lost("task", 1, FAILED, describe_so, token=token)
    eventually(lambda: database.rows and database.rows["task"].state is JobState.FAILED)
    row = database.rows["task"]
    assert (row.token, row.attempt, row.duplicate_at) == (token, 1, None)


def test_the_same_verdict_twice_is_one_end(
    worker: WorkerPages, database: FakeDatabase, slate: Slate, run: Run
) -> None:
    child = run()
    pid = child.pid
    child.kill()
    with database.hanging():
        for _ in range(2):
            worker.end_lost("task", pid, FAILED, describe)
        assert len(worker._verdicts) == 1
    eventually(lambda: carried(slate) == [])
    assert database.count("end", "end_unclaimed") == 1
    assert database.rows["task"].errors == ["WorkerLostError: signal 9"]


def test_what_a_terminated_child_reports_to_the_last_is_kept(
    worker: WorkerPages, database: FakeDatabase, slate: Slate
) -> None:
    page, buffer = own_page(slate, database)
    buffer.set_progress(60)
    worker.database.ask(lambda store: None, SOON)
    with database.hanging():
        worker.end_lost("task", os.getpid(), Transition(JobState.CANCELLED), describe)
        buffer.set_progress(61)
    eventually(lambda: database.rows["task"].state is JobState.CANCELLED)
    assert database.rows["task"].progress == {"percent": 61}
    page.clear()


def test_what_was_reported_at_the_verdict_is_kept_though_the_page_went_on(
    worker: WorkerPages, database: FakeDatabase, slate: Slate
) -> None:
    page, buffer = own_page(slate, database)
    worker.database.ask(lambda store: None, SOON)
    with database.hanging():
        eventually(lambda: worker.attempts() == 1)
        buffer.set_progress(60)
        worker.end_lost("task", os.getpid(), Transition(JobState.CANCELLED), describe)
        page.begin(new_token(), "next")
    eventually(lambda: database.rows["task"].state is JobState.CANCELLED)
    assert database.rows["task"].progress == {"percent": 60}
    eventually(lambda: not worker._verdicts)
    page.clear()


def test_a_verdict_is_kept_while_the_database_is_away(
    worker: WorkerPages, database: FakeDatabase, slate: Slate, run: Run
) -> None:
    child = run()
    pid = child.pid
    child.kill()
    database.go_away()
    worker.end_lost("task", pid, FAILED, describe)
    eventually(lambda: not worker.database.answering)
    assert carried(slate) == ["task"]
    database.come_back()
    eventually(lambda: carried(slate) == [])
    assert database.rows["task"].state is JobState.FAILED


def test_a_verdict_that_is_refused_altogether_frees_the_page(
    worker: WorkerPages,
    database: FakeDatabase,
    slate: Slate,
    run: Run,
    caplog: pytest.LogCaptureFixture,
) -> None:
    child = run()
    pid = child.pid
    child.kill()
    database.refused.add("task")
    worker.end_lost("task", pid, FAILED, describe)
    eventually(lambda: carried(slate) == [])
    assert "refused" in caplog.text


def test_the_verdict_is_for_the_page_of_that_process(
    worker: WorkerPages, database: FakeDatabase, run: Run, slate: Slate
) -> None:
    first, second = run(percent=10), run(percent=20, claim=False)
    pid = second.pid
    second.kill()
    assert worker.lease_of("task", first.pid) == 1
    assert worker.lease_of("task", pid) is None
    assert worker.lease_of("unknown", pid) is None
    worker.end_lost("task", pid, FAILED, describe)
    eventually(lambda: database.rows["task"].token == second.token)
    assert carried(slate).count("task") >= 1
    assert [page.pid for page in slate.pages() if page.alive()] == [first.pid]


def test_of_two_pages_of_one_task_the_one_without_an_end_is_meant(
    worker: WorkerPages, database: FakeDatabase, slate: Slate
) -> None:
    retried, _ = own_page(slate, database)
    retried.set_end(to_page(Transition(JobState.RETRYABLE)))
    running, _ = own_page(slate, database)
    assert worker.lease_of("task", os.getpid()) == 2
    retried.clear()
    running.clear()


def test_where_the_process_is_not_known_any_page_of_the_task_is_meant(
    worker: WorkerPages, database: FakeDatabase, run: Run
) -> None:
    child = run()
    child.kill()
    worker.end_lost("task", None, FAILED, describe)
    eventually(lambda: database.rows["task"].state is JobState.FAILED)
    assert database.rows["task"].token == child.token


@pytest.mark.parametrize("with_slate", [True, False])
def test_without_a_page_the_task_is_ended_by_its_id_and_counted_once(
    start_worker: StartWorker, slate: Slate, database: FakeDatabase, with_slate: bool
) -> None:
    worker = start_worker(slate if with_slate else None)
    database.open().claim(described("of the child"))
    worker.end_lost("task", 1, FAILED, describe)
    eventually(lambda: database.rows["task"].state is JobState.FAILED)
    row = database.rows["task"]
    assert (row.attempt, row.run_lease) == (1, 2)
    assert worker.attempts() == 0
    assert worker.lease_of("task", 1) is None
    assert worker.stop(SOON)


def test_a_verdict_reaches_its_caller_with_no_error_of_ours(
    worker: WorkerPages, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    def undescribable(token: str | None) -> NewAttempt:
        raise RuntimeError("a repr of the user's")

    child = run()
    worker.end_lost("task", child.pid, FAILED, undescribable)
    worker.end_lost("unknown", None, FAILED, undescribable)
    assert "a verdict is not recorded" in caplog.text


def test_an_attempt_that_got_its_verdict_is_not_beaten_for(
    worker: WorkerPages, database: FakeDatabase, slate: Slate
) -> None:
    page, buffer = own_page(slate, database)
    buffer.set_progress(1)
    eventually(lambda: page.acknowledged() == 1)
    worker.end_lost("task", os.getpid(), FAILED, describe)
    eventually(lambda: database.rows["task"].state is JobState.FAILED)
    worker.database.ask(lambda store: None, SOON)
    before = database.count("heartbeat", "heartbeat_with_progress")
    buffer.set_progress(2)
    next_pass = worker.heartbeat._next
    eventually(lambda: worker.heartbeat._next > next_pass + 0.02)
    assert database.count("heartbeat", "heartbeat_with_progress") == before
    assert not page.lost()
    page.clear()
    eventually(lambda: not worker._verdicts)


# The sweep.


def test_an_end_that_a_child_could_not_confirm_is_written_for_it(
    worker: WorkerPages, database: FakeDatabase, slate: Slate, run: Run
) -> None:
    own_end = to_page(Transition(JobState.RETRYABLE, error="boom", run_in=5.0, unsent=True))
    child = run(own_end=own_end)
    eventually(lambda: database.rows["task"].beats)
    assert database.rows["task"].state is JobState.RUNNING  # it lives, and writes it itself
    child.kill()
    eventually(lambda: carried(slate) == [])
    row = database.rows["task"]
    assert (row.state, row.progress, row.errors, row.unsent) == (
        JobState.RETRYABLE,
        {"percent": 40},
        ["boom"],
        True,
    )


def test_a_verdict_wins_over_an_end_that_was_not_written(
    worker: WorkerPages, database: FakeDatabase, slate: Slate, run: Run
) -> None:
    child = run(own_end=to_page(Transition(JobState.COMPLETED)))
    pid = child.pid
    worker.database.ask(lambda store: None, SOON)
    with database.hanging():
        worker.end_lost("task", pid, FAILED, describe)
        child.kill()
    eventually(lambda: carried(slate) == [])
    assert database.rows["task"].state is JobState.FAILED


def test_an_end_that_was_not_written_waits_while_a_verdict_is_on_its_way(
    database: FakeDatabase, slate: Slate, run: Run
) -> None:
    child = run(own_end=to_page(Transition(JobState.COMPLETED)))
    verdicts: Verdicts = Verdicts()
    verdicts.note(child.token, Errand(1, lambda store: None))
    sweep = Sweep(lambda: list(slate.pages()), verdicts, settings(), Trouble())
    child.kill()
    store = database.open()
    assert sweep.run_once(lambda: store) == 0
    assert database.count("end") == 0
    verdicts.forget(child.token)
    assert sweep.run_once(lambda: store) == 1


def test_one_locked_end_keeps_no_other_from_being_written(
    worker: WorkerPages, database: FakeDatabase, slate: Slate, run: Run
) -> None:
    children = [
        run(task_id, own_end=to_page(Transition(JobState.COMPLETED))) for task_id in ("a", "b", "c")
    ]
    database.locked.add("a")
    for child in children:
        child.kill()
    eventually(lambda: carried(slate) == ["a"])
    database.locked.clear()
    eventually(lambda: carried(slate) == [])
    assert {row.state for row in database.rows.values()} == {JobState.COMPLETED}


def test_an_end_that_is_refused_or_that_cannot_be_read_keeps_no_other_from_being_written(
    worker: WorkerPages,
    database: FakeDatabase,
    slate: Slate,
    run: Run,
    caplog: pytest.LogCaptureFixture,
) -> None:
    completed = to_page(Transition(JobState.COMPLETED))
    children = [
        run("refused", own_end=completed),
        run("garbage", own_end=b"\0garbage"),
        run("sound", own_end=completed),
    ]
    database.refused.add("refused")
    for child in children:
        child.kill()
    eventually(lambda: carried(slate) == ["garbage"])
    assert database.rows["sound"].state is JobState.COMPLETED
    assert "refused an end" in caplog.text
    assert "an end cannot be read" in caplog.text


def test_a_dead_childs_attempt_is_beaten_for_until_the_verdict(
    worker: WorkerPages, database: FakeDatabase, slate: Slate, run: Run
) -> None:
    run().kill()
    beats = database.rows["task"].beats
    eventually(lambda: database.rows["task"].beats > beats + 2)
    assert carried(slate) == ["task"]


@pytest.mark.parametrize("claim", [True, False])
def test_without_a_verdict_a_dead_childs_page_is_written_and_freed_in_the_end(
    database: FakeDatabase, slate: Slate, run: Run, monkeypatch: pytest.MonkeyPatch, claim: bool
) -> None:
    clock = Clock(monkeypatch, sweep_module)
    sweep = Sweep(lambda: list(slate.pages()), Verdicts(), settings(stale_after=1000.0), Trouble())
    child = run(claim=claim)
    store = database.open()
    clock.pass_by(10_000)  # for how long the child lived does not matter
    assert sweep.run_once(lambda: store) == 0
    child.kill()
    assert sweep.run_once(lambda: store) == 0
    clock.pass_by(1_999)
    assert sweep.run_once(lambda: store) == 0
    clock.pass_by(2)
    assert sweep.run_once(lambda: store) == 1
    assert carried(slate) == []
    if claim:
        row = database.rows["task"]
        assert (row.state, row.progress) == (JobState.RUNNING, {"percent": 40})


def test_a_page_that_could_not_be_written_in_the_end_is_kept(
    database: FakeDatabase, slate: Slate, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, sweep_module)
    sweep = Sweep(lambda: list(slate.pages()), Verdicts(), settings(stale_after=1000.0), Trouble())
    run().kill()
    database.locked.add("task")
    store = database.open()
    sweep.run_once(lambda: store)
    clock.pass_by(2_001)
    assert sweep.run_once(lambda: store) == 0
    database.locked.clear()
    assert sweep.run_once(lambda: store) == 1


def test_a_freed_page_is_taken_again(
    worker: WorkerPages, database: FakeDatabase, slate: Slate, run: Run
) -> None:
    for n in range(20):  # more than there are pages
        child = run(f"task {n}", own_end=to_page(FAILED))
        child.kill()
        eventually(lambda: carried(slate) == [])
    assert {row.state for row in database.rows.values()} == {JobState.FAILED}


# Stopping.


def test_the_stop_writes_what_is_on_the_pages_and_removes_the_slate(
    start_worker: StartWorker, database: FakeDatabase, slate: Slate, run: Run
) -> None:
    worker = start_worker(slate, write_interval=500.0, heartbeat_interval=500.0)
    worker.database.ask(lambda store: None, SOON)
    run("beaten", percent=99).kill()
    run("ended", own_end=to_page(FAILED)).kill()
    assert worker.stop(SOON)
    assert database.rows["beaten"].progress == {"percent": 99}
    assert database.rows["ended"].state is JobState.FAILED
    assert not os.path.exists(slate.path)


def test_the_stop_is_not_held_up_by_a_database_that_hangs(
    worker: WorkerPages, database: FakeDatabase, slate: Slate, run: Run
) -> None:
    run()
    with database.hanging():
        began = time.monotonic()
        assert not worker.stop(0.05)
        assert time.monotonic() - began < 1
    assert not os.path.exists(slate.path)
    eventually(lambda: not worker.database._seat.locked())
