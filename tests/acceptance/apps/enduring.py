"""Tasks that go through an outage of the database, step by step as the test opens their gates."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import celery_awa
from celery_awa import AwaTask, StoreUnavailable
from tests.acceptance.apps.configured import Unlucky, configured_app
from tests.acceptance.diary import note
from tests.waiting import hold

app = configured_app("enduring")
celery_awa.install(app)


@app.task(base=AwaTask, bind=True)
def end(self: Any, how: str, gate: str | None = None) -> str:
    """Report and flush, wait for the gate, report again and end in this way at once."""
    if gate is not None:
        self.set_progress(10, "first")
        note(self, "flushed", flushed=self.flush_progress())
        hold(gate)
    self.set_progress(20, "last")
    self.update_metadata({"last_id": 7})
    if how == "FAILURE":
        raise Unlucky("on purpose")
    if how == "RETRY":
        raise self.retry(countdown=300, exc=Unlucky("again"))
    return how


@app.task(base=AwaTask, bind=True)
def go_on(self: Any, gates: list[str]) -> int:
    """Flush before each gate, and report without a pause until it opens."""
    numbers = itertools.count()
    for gate in gates:
        self.set_progress(message=f"number {next(numbers)}")
        note(self, "tried", **_try_to_flush(self))
        while not Path(gate).exists():
            self.set_progress(message=f"number {next(numbers)}")
    return next(numbers)


@app.task(base=AwaTask, bind=True)
def flush_at_gates(self: Any, gates: list[str]) -> None:
    """Flush once, and once more after each gate."""
    for number, gate in enumerate([None, *gates]):
        hold(gate)
        self.set_progress(number)
        note(self, "tried", **_try_to_flush(self))


@app.task(base=AwaTask, bind=True)
def flush_often(self: Any, times: int, gate: str) -> int:
    """Report and flush that many times, then wait for the gate; returns the confirmed flushes."""
    confirmed = 0
    note(self, "began")
    for number in range(times):
        self.set_progress(message=f"number {number}")
        confirmed += self.flush_progress()
    note(self, "flushed", confirmed=confirmed)
    hold(gate)
    return confirmed


def _try_to_flush(task: Any) -> dict[str, Any]:
    try:
        return {"flushed": task.flush_progress(timeout=2)}
    except StoreUnavailable as exc:
        return {"flushed": None, "reason": str(exc)}
