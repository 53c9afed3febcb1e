"""Tasks for the pools of greenlets: some keep the loop, some wait, one feels how others keep it."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from celery import Task

import celery_awa
from celery_awa import AwaTask, StoreUnavailable, current_attempt, native
from tests.acceptance.apps.configured import Unlucky, configured_app
from tests.acceptance.diary import note
from tests.waiting import hold

app = configured_app("green")
celery_awa.install(app)


@app.task(base=Task)
def echo(value: Any) -> Any:
    """A task without the plugin."""
    return value


@app.task(base=AwaTask, bind=True)
def compute(self: Any, gate: str) -> int:
    """Report and flush, then compute until the gate opens, without letting any greenlet run."""
    self.set_progress(10, "computing")
    note(self, "computing", flushed=self.flush_progress())
    rounds = 0
    while not Path(gate).exists():
        rounds += 1
    return rounds


@app.task(base=Task, bind=True)
def tick(self: Any, gate: str) -> float:
    """Sleep for moments until the gate opens; returns the longest, in seconds."""
    note(self, "ticking")
    longest = 0.0
    while not Path(gate).exists():
        began = time.monotonic()
        time.sleep(0.01)
        longest = max(longest, time.monotonic() - began)
    return longest


@app.task(base=AwaTask, bind=True)
def flush(self: Any, gate: str, timeout: float) -> str | None:
    """Flush, wait for the gate, flush again; returns why that failed, if it did."""
    self.set_progress(10)
    note(self, "flushed", flushed=self.flush_progress())
    hold(gate)
    self.set_progress(20)
    began = time.monotonic()
    try:
        self.flush_progress(timeout)
    except StoreUnavailable as exc:
        return str(exc)
    finally:
        note(self, "tried", seconds=time.monotonic() - began)
    return None


@app.task(base=AwaTask, bind=True)
def flush_often(self: Any, times: int, gate: str) -> int:
    """Report and flush that many times, then wait for the gate; returns the confirmed flushes."""
    confirmed = 0
    for number in range(times):
        self.set_progress(message=f"number {number}")
        confirmed += self.flush_progress()
    note(self, "flushed", confirmed=confirmed)
    hold(gate)
    return confirmed


@app.task(base=AwaTask, bind=True)
def report(self: Any, percent: float, gate: str, fail: bool = False) -> dict[str, Any]:
    """Report, wait for the gate and return what was found, or raise."""
    found = dict(self.checkpoint)
    self.set_progress(percent)
    self.update_metadata({"last": percent})
    note(self, "reported", flushed=self.flush_progress(), found=found)
    hold(gate)
    if fail:
        raise Unlucky("on purpose")
    return found


@app.task(base=AwaTask, bind=True)
def look_around(self: Any, gate: str) -> list[bool]:
    """Whether this greenlet, one that it spawns, and a thread, find the attempt after a switch."""
    note(self, "began")
    hold(gate)
    found = [current_attempt() is self.attempt]
    handle = self.attempt

    def look() -> None:
        found.append(current_attempt() is not None)
        handle.update_metadata({"by": "the handle"})

    native.green().spawn(look)
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    note(self, "looked", found=found, metadata=self.progress["metadata"], token=handle.token)
    return found
