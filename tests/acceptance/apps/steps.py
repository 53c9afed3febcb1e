"""Tasks that report in unusual places, and are struck while they do."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path
from typing import Any

from celery.exceptions import SoftTimeLimitExceeded

import celery_awa
from celery_awa import AwaTask, current_attempt
from tests.acceptance.apps.configured import configured_app
from tests.acceptance.diary import note
from tests.waiting import eventually, hold

app = configured_app("steps")
celery_awa.install(app)


@app.task(base=AwaTask, bind=True)
def follow(self: Any, calls: list[list[Any]], gate: str | None = None) -> None:
    """Make the calls, each the name of a verb and its arguments, flush and wait for the gate."""
    for verb, *args in calls:
        getattr(self, verb)(*args)
    note(self, "flushed", flushed=self.flush_progress())
    hold(gate)


class ClassBased(AwaTask):
    """A task that is a class of the user's own."""

    name = f"{__name__}.class_based"

    def run(self, percent: float, gate: str | None = None) -> None:
        self.set_progress(percent, "of a class")
        note(self, "reported")
        hold(gate)


class_based = app.register_task(ClassBased())


@app.task(base=AwaTask, bind=True)
def report_from_plain_threads(self: Any, gate: str | None = None) -> None:
    """Report from a thread that was given the handle and from one that was not."""

    def without() -> None:
        note(self, "without the handle", attempt=current_attempt())
        self.set_progress(99, "lost")

    def given(attempt: Any) -> None:
        attempt.set_progress(30, "by the handle")
        note(self, "with the handle", flushed=attempt.flush_progress())

    for thread in (
        threading.Thread(target=given, args=(self.attempt,)),
        threading.Thread(target=without),
    ):
        thread.start()
        thread.join()
    hold(gate)


@app.task(base=AwaTask, bind=True)
def apply_within(self: Any, gate: str | None = None) -> str:
    """Report, and run another task eagerly, which reports for itself."""
    self.set_progress(20, "outer")
    inner = follow.apply([[["set_progress", 70, "inner"], ["update_metadata", {"inner": 1}]]])
    note(self, "applied", inner=inner.id)
    hold(gate)
    return str(inner.state)


@app.task(base=AwaTask, bind=True)
def report_many(self: Any, changes: int) -> None:
    """Report that many times as fast as it goes, and flush once at the end."""
    began = time.monotonic()
    for change in range(1, changes + 1):
        self.set_progress(100 * change / changes)
    self.flush_progress()
    note(self, "reported", seconds=time.monotonic() - began)


@app.task(base=AwaTask, bind=True)
def report_now_and_then(self: Any, gate: str) -> None:
    """Report twenty times a second until the gate opens."""
    numbers = itertools.count()

    def report() -> bool:
        self.set_progress(message=f"number {next(numbers)}")
        return Path(gate).exists()

    eventually(report, timeout=60, interval=0.05)


@app.task(base=AwaTask, bind=True)
def report_under_strikes(self: Any, verb: str, strikes: int) -> None:
    """Report as fast as it goes, through all but the last of that many soft time limits."""
    number = 0
    note(self, "began")
    for left in reversed(range(strikes)):
        try:
            while True:
                number += 1
                _report_number(self, verb, number)
        except SoftTimeLimitExceeded:
            note(self, "struck", number=number, flushed=self.flush_progress())
            if not left:
                raise


def _report_number(task: Any, verb: str, number: int) -> None:
    if verb == "update_metadata":
        task.update_metadata({"number": number})
    else:
        task.set_progress(message=str(number))
    if verb == "flush_progress":
        task.flush_progress()
