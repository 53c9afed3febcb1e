"""What strikes a report from the side: exceptions and reports out of signal handlers.

CPython runs signal handlers after calls, at the start of functions and when a loop turns back;
a profile function is run after and at exactly the first two, so it stands for a signal that
comes at each of these points in turn. One test lets real signals come when they like.
"""

from __future__ import annotations

import gc
import itertools
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from celery_awa.progress import ProgressBuffer

from .progress_page import Page, TearingPage


class Strike(Exception):
    """Stands for a soft time limit."""


@contextmanager
def interrupted(handlers: dict[int, Callable[[], None]]) -> Iterator[list[int]]:
    """Run each handler at its point, counted from 1; gives the count of points passed."""
    passed = [0]

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code.co_filename
        ours = code.endswith(("progress.py", "progress_brief.py", "progress_values.py", "_page.py"))
        # After a lock was taken by ``with`` no handler runs before its body is entered.
        entered = getattr(arg, "__name__", "") == "__enter__"
        if event not in ("call", "c_return") or entered or not ours:
            return
        passed[0] += 1
        if handler := handlers.get(passed[0]):
            handler()

    sys.setprofile(profile)
    try:
        yield passed
    finally:
        sys.setprofile(None)


def strike() -> None:
    raise Strike


def reported_before(page: Page) -> ProgressBuffer:
    buffer = ProgressBuffer(sink=page)
    buffer.set_progress(10, "before")
    buffer.update_metadata({"before": 1})
    return buffer


def in_another_thread(action: Callable[[], object]) -> bool:
    """Whether the action comes to its end in a thread that holds no lock."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(5)
    return not thread.is_alive()


def check_usable(buffer: ProgressBuffer, page: Page) -> None:
    assert in_another_thread(buffer.resync)
    assert page.whole() == buffer.value()
    assert page.generation == buffer.generation
    generation = buffer.generation
    assert in_another_thread(lambda: buffer.update_metadata({"after": 1}))
    assert in_another_thread(lambda: buffer.acknowledge(buffer.generation))
    assert buffer.generation == generation + 1
    assert not buffer.pending
    assert page.whole() == buffer.value()


REPORTS: list[Callable[[ProgressBuffer], None]] = [
    lambda buffer: buffer.set_progress(60, "after"),
    lambda buffer: buffer.update_metadata({"row": [1]}),
    lambda buffer: buffer.acknowledge(1),
    lambda buffer: buffer.attach(buffer._sink),
    lambda buffer: buffer.resync(),
    lambda buffer: assert_laid_over(buffer),
]
report_ids = ["set_progress", "update_metadata", "acknowledge", "attach", "resync", "lay_over"]


def assert_laid_over(buffer: ProgressBuffer) -> None:
    buffer.lay_over({"percent": 1, "metadata": {"kept": 1}})


def points(report: Callable[[ProgressBuffer], None]) -> int:
    """At how many points a report can be struck."""
    buffer = reported_before(TearingPage())
    with interrupted({}) as passed:
        report(buffer)
    return passed[0]


@pytest.mark.parametrize("report", REPORTS, ids=report_ids)
def test_an_exception_at_any_point_leaves_buffer_lock_and_page_usable(
    report: Callable[[ProgressBuffer], None],
) -> None:
    struck = 0
    for point in range(1, points(report) + 1):
        page = TearingPage()
        buffer = reported_before(page)
        before = buffer.value()
        with interrupted({point: strike}):
            try:
                report(buffer)
            except Strike:
                struck += 1
        whole = reported_before(Page())
        report(whole)
        assert buffer.value() in (before, whole.value())
        check_usable(buffer, page)
    assert struck >= 1


@pytest.mark.parametrize("report", REPORTS[:2], ids=report_ids[:2])
def test_a_handler_may_report_at_any_point_and_nothing_is_lost(
    report: Callable[[ProgressBuffer], None],
) -> None:
    for point in range(1, points(report) + 1):
        page = TearingPage()
        buffer = reported_before(page)

        def handler(buffer: ProgressBuffer = buffer) -> None:
            buffer.update_metadata({"handler": 1})
            buffer.set_progress(77, "handler")

        with interrupted({point: handler}):
            report(buffer)

        value = buffer.value() or {}
        assert buffer.generation == 5
        assert value["metadata"]["handler"] == 1
        assert value["message"] in ("after", "handler")
        assert page.whole() == value
        assert page.generation == 5


@pytest.mark.parametrize("report", REPORTS[:2], ids=report_ids[:2])
def test_a_handler_that_reports_before_an_exception_strikes_leaves_the_page_repairable(
    report: Callable[[ProgressBuffer], None],
) -> None:
    # The report inside adds points of its own: a few more than the outer one has.
    count = points(report)
    for first, second in itertools.product(range(1, count + 1), range(1, count + 20)):
        page = TearingPage()
        buffer = reported_before(page)

        def handler(buffer: ProgressBuffer = buffer) -> None:
            buffer.set_progress(77, "handler")

        with interrupted({first: handler, first + second: strike}):
            try:
                report(buffer)
            except Strike:
                pass
        buffer.resync()
        assert page.whole() == buffer.value()
        assert page.generation == buffer.generation


def test_a_handler_that_reports_and_raises_leaves_the_page_repairable() -> None:
    for point in range(1, points(REPORTS[0]) + 1):
        page = TearingPage()
        buffer = reported_before(page)

        def handler(buffer: ProgressBuffer = buffer) -> None:
            buffer.set_progress(77, "handler")
            raise Strike

        with interrupted({point: handler}), pytest.raises(Strike):
            buffer.set_progress(60, "after")
        assert (buffer.value() or {})["message"] in ("handler", "after")
        check_usable(buffer, page)


def lagging(page: Page) -> ProgressBuffer:
    """A buffer whose last change was struck before it was on the page."""
    for point in itertools.count(1):
        page.calls.clear()
        buffer = reported_before(page)
        with interrupted({point: strike}), pytest.raises(Strike):
            buffer.set_progress(60, "after")
        if buffer.generation == 3 and page.generation == 2:
            return buffer
    raise AssertionError


def test_resync_can_be_struck_and_done_again() -> None:
    lagging_buffer = lagging(TearingPage())
    with interrupted({}) as passed:
        lagging_buffer.resync()
    for point in range(1, passed[0] + 1):
        page = TearingPage()
        buffer = lagging(page)
        with interrupted({point: strike}), pytest.raises(Strike):
            buffer.resync()
        check_usable(buffer, page)


def test_a_change_that_missed_the_page_reaches_it_with_the_next_one_the_older_first() -> None:
    page = Page()
    buffer = lagging(page)
    page.calls.clear()
    buffer.update_metadata({"next": 1})

    assert [(kind, generation) for kind, generation, _ in page.calls] == [
        ("brief", 3),
        ("metadata", 4),
    ]


class Hammer:
    """Reports all the time while a timer's signal raises between any two steps."""

    def __init__(self, buffer: ProgressBuffer) -> None:
        self.buffer = buffer
        self.armed = False
        self.strikes = self.begun = self.reported = self.updated = 0

    def run(self, seconds: float) -> None:
        # Counts the time of this process only, and leaves alone the timer that bounds the test.
        previous = signal.signal(signal.SIGVTALRM, self.strike)
        # What is raised in a callback of the collector is printed, not raised.
        gc.disable()
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.001, 0.001)
        deadline = time.monotonic() + seconds
        try:
            while time.monotonic() < deadline and self.begun < 50_000:
                try:
                    self.armed = True
                    self.report(100)
                except Strike:
                    self.strikes += 1
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            gc.enable()
            signal.signal(signal.SIGVTALRM, previous)

    def strike(self, signum: int, frame: FrameType | None) -> None:
        if self.armed:
            self.armed = False
            raise Strike

    def report(self, times: int) -> None:
        for _ in range(times):
            self.begun += 1
            self.buffer.set_progress(self.begun % 101, str(self.begun))
            self.reported = self.begun
            self.buffer.update_metadata({f"k{self.begun % 50}": self.begun})
            self.updated = self.begun
        self.armed = False


def test_real_signals_leave_buffer_lock_and_page_usable() -> None:
    page = TearingPage()
    buffer = ProgressBuffer(sink=page)
    hammer = Hammer(buffer)
    hammer.run(seconds=1)

    assert hammer.strikes > 0
    assert hammer.begun > 1000
    value = buffer.value() or {}
    assert hammer.reported <= int(value["message"]) <= hammer.begun
    assert hammer.updated <= max(value["metadata"].values()) <= hammer.begun
    assert buffer.generation <= 2 * hammer.begun
    check_usable(buffer, page)
