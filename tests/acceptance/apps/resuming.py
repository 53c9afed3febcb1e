"""Tasks that can stop anywhere: loops, steps, snoozes and waits, told to the diary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import celery_awa
from celery_awa import AwaTask
from celery_awa.plugin.current import here
from celery_awa.resume import Lines
from tests.acceptance.apps.configured import configured_app
from tests.acceptance.diary import note
from tests.waiting import eventually, hold

app = configured_app("resuming")
celery_awa.install(app)


def _refuse(app: Any, message: Any) -> None:
    raise ConnectionError("the broker is away")


if app.conf.get("test_publish_fails"):
    here.publish = _refuse


def begin(task: Any, **facts: Any) -> None:
    """Note that an attempt began."""
    delivery = task.request.delivery_info
    note(
        task,
        "began",
        attempt=task.attempt.number,
        priority=delivery.get("priority"),
        customer=(task.request.headers or {}).get("customer"),
        **facts,
    )


@app.task(base=AwaTask, bind=True)
def loop(self: Any, count: int, stop_at: int | None, gate: str | None = None) -> int:
    """Loop over numbers; at one of them, wait until asked to stop, or for the gate."""
    begin(self)
    for number in self.iterate(range(count), checkpoint_every=1):
        note(self, "item", item=number)
        if number == stop_at:
            eventually(
                lambda: self.should_stop or (gate is not None and Path(gate).exists()),
                timeout=60,
                what="being asked to stop",
            )
    return count


@app.task(base=AwaTask, bind=True)
def loop_that_catches(self: Any, count: int, stop_at: int) -> int:
    """As ``loop``, in a body that catches every exception of its items."""
    begin(self)
    try:
        for number in self.iterate(range(count), checkpoint_every=1):
            note(self, "item", item=number)
            if number == stop_at:
                eventually(lambda: self.should_stop, timeout=60, what="being asked to stop")
    except Exception as exc:
        note(self, "caught", error=repr(exc))
    return count


@app.task(base=AwaTask, bind=True, max_retries=1)
def interrupt_once(self: Any, options: dict[str, Any] | None = None) -> str:
    """Leave off by hand in the first attempt."""
    begin(self, checkpoint=dict(self.checkpoint))
    if not self.checkpoint:
        self.update_metadata({"left": 1})
        self.interrupt()
    return "done"


@app.task(base=AwaTask, bind=True)
def snooze_once(self: Any, seconds: float) -> str:
    """Leave off for a while in the first attempt."""
    begin(self, checkpoint=dict(self.checkpoint))
    if not self.checkpoint:
        self.set_progress(10, "asleep")
        self.update_metadata({"left": 1})
        self.snooze(seconds)
    return "done"


@app.task(base=AwaTask, bind=True)
def in_steps(self: Any, fail_in: str | None = None) -> list[str]:
    """Three steps, one of which fails in the first attempt."""
    begin(self)
    for name in ("first", "second", "third"):
        with self.step(name) as step:
            if step.todo:
                note(self, "step", name=name)
                if name == fail_in and self.request.retries == 0:
                    raise self.retry(countdown=0)
    return ["first", "second", "third"]


@app.task(base=AwaTask, bind=True)
def ask_outside(self: Any, timeout: float | None, gate: str | None = None) -> Any:
    """Hand out a token and wait for who has it."""
    begin(self)
    if self.callback_payload is None:
        note(self, "asks", token=self.callback_token())
        hold(gate)
    return self.wait_for_callback(timeout)


@app.task(base=AwaTask, bind=True)
def ask_twice(self: Any) -> list[Any]:
    """Wait for two callbacks, one after the other."""
    begin(self)
    answers = []
    for name in ("bank", "carrier"):
        if name not in self.callbacks:
            note(self, "asks", name=name, token=self.callback_token(name=name))
        answers.append(self.wait_for_callback(60, name=name))
    return answers


@app.task(base=AwaTask, bind=True)
def stall(self: Any, gate: str) -> str:
    """Report once and then nothing."""
    begin(self)
    self.set_progress(10)
    self.flush_progress()
    note(self, "reported")
    eventually(lambda: self.should_stop or Path(gate).exists(), timeout=60, what="an end")
    return str(self.stop_reason)


class Versioned(AwaTask):
    """A task of the second version, to which the first left a row number in other words."""

    checkpoint_version = 2

    def migrate_checkpoint(self, metadata: dict[str, Any], version: int) -> Any:
        return {"row": metadata["line"] - 1} if version == 1 else None


@app.task(base=Versioned, bind=True, max_retries=1)
def leave_versioned(self: Any, version: int) -> dict[str, Any]:
    """Leave a checkpoint as code of that version did, and tell what the next attempt finds."""
    begin(self)
    if self.request.retries == 0:
        self.attempt.buffer.update_metadata({"line": 7, "awa_version": version})
        raise self.retry(countdown=0)
    return {"checkpoint": dict(self.checkpoint), "progress": self.progress}


@app.task(base=AwaTask, bind=True, max_retries=1)
def unversioned(self: Any) -> None:
    """Leave a checkpoint of newer code, and come again."""
    begin(self)
    self.attempt.buffer.update_metadata({"line": 7, "awa_version": 1})
    raise self.retry(countdown=0)


@app.task(base=AwaTask, bind=True)
def read_lines(self: Any, path: str, fail_at: int) -> str:
    """Read a file by lines, and fail once at one of them."""
    begin(self)
    last = ""
    for number, last in enumerate(self.iterate(Lines(path))):
        note(self, "line", line=last)
        if number == fail_at and self.request.retries == 0:
            raise self.retry(countdown=0)
    return last
