"""Tasks whose messages come more than once; each tells the diary what its attempt finds."""

from __future__ import annotations

from typing import Any

from celery.exceptions import Ignore

import celery_awa
from celery_awa import AwaTask
from tests.acceptance.apps.configured import Unlucky, configured_app
from tests.acceptance.diary import note
from tests.waiting import hold

app = configured_app("copied")
celery_awa.install(app)

LEFT = {"last_id": 7}


def begin(task: Any, look: bool = True) -> dict[str, Any]:
    """Note what the attempt finds and return it. Looking at the checkpoint claims."""
    found = dict(task.checkpoint) if look else {}
    note(task, "began", checkpoint=found, attempt=task.attempt.number)
    return found


def leave_something(task: Any) -> None:
    """Report what a later attempt would find."""
    task.set_progress(40, "x")
    task.update_metadata(LEFT)


@app.task(base=AwaTask, bind=True)
def end(self: Any, how: str, look: bool = True) -> str:
    """Report and end in the state of that name, without a look at the checkpoint if told so."""
    begin(self, look)
    leave_something(self)
    if how == "failed":
        raise Unlucky("on purpose")
    if how == "cancelled":
        raise Ignore()
    return how


@app.task(base=AwaTask, bind=True)
def retry(self: Any, countdown: float, look: bool = True) -> dict[str, Any]:
    """Report and retry once, the first time without a look at the checkpoint if told so."""
    if self.request.retries:
        return begin(self)
    begin(self, look)
    leave_something(self)
    raise self.retry(countdown=countdown, exc=Unlucky("again"), max_retries=1)


@app.task(base=AwaTask, bind=True)
def resume(self: Any, gate: str | None = None) -> dict[str, Any]:
    """Return what an earlier attempt left; without that, leave it and wait for the gate."""
    found = begin(self)
    if found:
        return found
    leave_something(self)
    self.flush_progress()
    note(self, "left")
    hold(gate)
    return {}


@app.task(base=AwaTask, bind=True)
def wait(self: Any, gate: str) -> str:
    """Wait for the gate and report nothing."""
    begin(self, look=False)
    hold(gate)
    return "waited"


@app.task(base=AwaTask, bind=True)
def report_twice(self: Any, gate: str) -> int:
    """Report before and after the gate of this very attempt, and return the attempt's number."""
    begin(self)
    number = self.attempt.number
    self.set_progress(message=f"attempt {number}")
    note(self, "flushed first", attempt=number, flushed=self.flush_progress())
    hold(f"{gate}.{number}")
    self.set_progress(message=f"attempt {number} again")
    note(self, "flushed again", attempt=number, flushed=self.flush_progress())
    return number
