"""Attempts of a pool child, each on a page of the slate."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from celery_awa.model import Envelope, JobState, Transition
from celery_awa.runtime.page import Page
from celery_awa.runtime.slate import Slate
from tests.fake_store import FakeDatabase
from tests.runtime_parts import (
    SOON,
    StartProcess,
    begin,
    carried,
    claimed,
)
from tests.waiting import eventually

COMPLETED = Transition(JobState.COMPLETED)
FAILED = Transition(
    JobState.FAILED, error="ValueError: boom", envelope=Envelope(b"whole", whole=True)
)
RETRYABLE = Transition(JobState.RETRYABLE, run_in=5.0, unsent=True)


def test_with_a_page_the_worker_speaks_for_the_attempt(
    start_process: StartProcess, database: FakeDatabase, slate: Slate
) -> None:
    process = start_process(slate, write_interval=0.01, heartbeat_interval=0.01)
    one = claimed(process)
    one.set_progress(60)
    (view,) = slate.pages()
    assert (view.task_id, view.lease) == ("task", one.lease)
    assert view.snapshot().json == '{"percent":60}'
    assert process.heartbeat.due() is None
    view.answer(acknowledged=1, confirmed_at=time.monotonic())
    assert not one.pending
    view.answer(acknowledged=1, confirmed_at=time.monotonic(), lost=True)
    assert one.lost


def test_a_page_serves_one_attempt_after_the_other(
    start_process: StartProcess, slate: Slate
) -> None:
    process = start_process(slate)
    pages: set[int] = set()
    for n in range(10):
        one = begin(process, f"task {n}")
        assert carried(slate) == [f"task {n}"]
        pages.add(id(one.page))
        process.end(one, COMPLETED)
        assert carried(slate) == []
    assert len(pages) == 1


def test_an_unconfirmed_end_keeps_its_page_and_lies_on_it(
    start_process: StartProcess, database: FakeDatabase, slate: Slate
) -> None:
    process = start_process(slate)
    one = claimed(process)
    one.set_progress(60)
    database.go_away()
    process.end(one, FAILED)
    second = begin(process, "second")
    views = {view.task_id: view for view in slate.pages()}
    assert views["task"].end() is not None
    assert views["second"].end() is None
    views["task"].answer(acknowledged=0, confirmed_at=0.0, lost=True)
    assert not one.lost  # its own end may have taken the lease
    database.come_back()
    eventually(lambda: carried(slate) == ["second"])
    process.end(second, COMPLETED)


def test_without_a_page_to_be_had_the_process_heartbeats_itself(
    start_process: StartProcess, database: FakeDatabase, tmp_path: Path
) -> None:
    slate = Slate.create(str(tmp_path), 1, 1_024)
    process = start_process(slate, write_interval=0.01, heartbeat_interval=0.02)
    first, second = claimed(process, "first"), claimed(process, "second")
    assert (first.page is None, second.page is None) == (False, True)
    second.set_progress(60)
    eventually(lambda: not second.pending)
    assert database.rows["second"].progress == {"percent": 60}
    assert database.rows["first"].beats == 0
    slate.close(unlink=True)


def test_an_id_too_long_for_a_page_costs_no_page(start_process: StartProcess, slate: Slate) -> None:
    process = start_process(slate)
    long = begin(process, "x" * 3_000)
    long.set_progress(1)
    assert long.page is None
    pages = {id(begin(process, f"task {n}").page) for n in range(4)}
    assert len(pages) == 4
    assert sorted(carried(slate)) == [f"task {n}" for n in range(4)]


def test_what_a_thread_reports_late_does_not_reach_the_next_attempts_page(
    start_process: StartProcess, slate: Slate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread of an ended task is stopped in the midst of a write to its page."""
    process = start_process(slate)
    one = begin(process)
    inside, go_on = threading.Event(), threading.Event()
    write = Page.write_brief

    def stop_inside(page: Page, generation: int, data: bytes) -> None:
        if b"11" in data:
            inside.set()
            go_on.wait(SOON)
        write(page, generation, data)

    monkeypatch.setattr(Page, "write_brief", stop_inside)
    reporter = threading.Thread(target=one.set_progress, args=(11,))
    reporter.start()
    assert inside.wait(SOON)
    ender = threading.Thread(target=process.end, args=(one, COMPLETED))
    ender.start()
    eventually(lambda: one.ended)
    starter = threading.Timer(0.0, go_on.set)
    starter.start()
    ender.join(SOON)
    second = begin(process, "second")
    reporter.join(SOON)
    one.set_progress(12)
    (view,) = slate.pages()
    assert (view.task_id, view.generation()) == ("second", 0)
    process.end(second, COMPLETED)


def test_a_flush_puts_on_the_page_what_an_exception_kept_from_it(
    start_process: StartProcess, slate: Slate, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = start_process(slate)
    one = claimed(process)

    def strike(*_: object) -> None:
        monkeypatch.undo()
        raise TimeoutError

    with monkeypatch.context() as patched:
        patched.setattr(Page, "write_brief", strike)
        with pytest.raises(TimeoutError):
            one.set_progress(60)
    (view,) = slate.pages()
    assert view.generation() == 0
    assert one.flush_progress() is True
    assert view.snapshot().json == '{"percent":60}'
