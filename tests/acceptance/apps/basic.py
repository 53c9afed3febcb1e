"""The app of most acceptance tests: one task for each way in which an attempt can go.

Tasks wait on files, never on time, and write what they saw into the diary. Acknowledgement is
the app's own (``task_acks_late``, ``task_reject_on_worker_lost``), time limits and countdowns
come with the message. With ``test_plain`` in the configuration the same tasks run on plain Celery.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import threading
from pathlib import Path
from typing import Any

from celery import Task, current_task, shared_task
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded

from tests.acceptance.apps.configured import Unlucky, configured_app
from tests.acceptance.diary import note
from tests.waiting import eventually, hold

app = configured_app("basic")

if app.conf.get("test_plain"):
    from tests.acceptance.apps.silent import SilentTask as AwaTask
    from tests.acceptance.apps.silent import current_attempt
else:
    import celery_awa
    from celery_awa import AwaTask, current_attempt

    celery_awa.install(app)


def begin(task: Any, look: bool = True) -> dict[str, Any]:
    """Note what the attempt finds. Looking at the checkpoint claims; a lazy task must not."""
    found = dict(task.checkpoint) if look else {}
    number = task.attempt.number if look else None
    note(task, "began", checkpoint=found, attempt=number)
    return found


def report_changes(task: Any, changes: int) -> None:
    """Report that many changes as fast as it goes; the last one says 100 %."""
    for change in range(1, changes + 1):
        task.set_progress(100 * change / changes, f"change {change}")
        task.update_metadata({"last_id": change})


@app.task(base=Task)
def echo(value: Any = None) -> Any:
    """A task without the plugin."""
    return value


@app.task(base=AwaTask)
def brief(value: Any = None) -> Any:
    """An AwaTask that neither reports nor lasts."""
    return value


@app.task(base=AwaTask, bind=True)
def work(self: Any, gate: str | None = None) -> str:
    """Run until the gate opens and report nothing."""
    note(self, "began")
    hold(gate)
    return "worked"


@app.task(base=AwaTask, bind=True)
def report(
    self: Any,
    percent: float | None = None,
    message: str | None = None,
    metadata: dict[str, Any] | None = None,
    gate: str | None = None,
    flush: bool = False,
    look: bool = False,
) -> float | None:
    """Report once, wait for the gate and return the percent."""
    begin(self, look or self.request.retries > 0)
    self.set_progress(percent, message)
    if metadata is not None:
        self.update_metadata(metadata)
    note(self, "reported", flushed=self.flush_progress() if flush else None)
    try:
        hold(gate)
    except SoftTimeLimitExceeded:
        note(self, "soft limit")
        raise
    return percent


@app.task(base=AwaTask, bind=True)
def report_until(self: Any, gate: str) -> int:
    """Report in a tight loop until the gate opens; returns the number of changes."""
    begin(self, look=False)
    change = 0
    while not Path(gate).exists():
        change += 1
        report_changes(self, change % 100 + 1)
        if change == 1:
            note(self, "reported")
    return change


@app.task(base=AwaTask, bind=True)
def fail_after(self: Any, changes: int) -> None:
    """Report, then raise."""
    begin(self, look=False)
    report_changes(self, changes)
    raise Unlucky(f"after {changes} changes")


@app.task(base=AwaTask, bind=True)
def retry_after(self: Any, changes: int, countdown: float = 0.0, attempts: int = 2) -> dict:
    """Report and retry explicitly until the last attempt, which returns what it found."""
    found = begin(self)
    if self.request.retries + 1 >= attempts:
        return found
    report_changes(self, changes)
    raise self.retry(countdown=countdown, exc=Unlucky("again"), max_retries=attempts - 1)


@app.task(
    base=AwaTask,
    bind=True,
    autoretry_for=(Unlucky,),
    retry_kwargs={"max_retries": 1},
    default_retry_delay=0,
)
def autoretry_after(self: Any, changes: int) -> dict:
    """Report and raise in the first attempt; the second returns what it found."""
    found = begin(self)
    if self.request.retries:
        return found
    report_changes(self, changes)
    raise Unlucky("again, by itself")


@app.task(base=AwaTask, bind=True)
def retry_and_go_on(self: Any, gate: str | None = None) -> str:
    """Ask for a retry without leaving, and work on."""
    begin(self)
    if self.request.retries:
        return "second"
    self.set_progress(30, "before the retry")
    self.retry(countdown=0, throw=False)
    note(self, "retry asked")
    hold(gate)
    return "first"


@app.task(base=AwaTask, bind=True)
def replace_by(self: Any, name: str, *args: Any) -> None:
    """Report, then become the task of that name."""
    begin(self, look=False)
    self.set_progress(50, "before the replacement")
    raise self.replace(self.app.signature(f"{__name__}.{name}", args=args))


@app.task(base=AwaTask, bind=True)
def ignore_after(self: Any, changes: int) -> None:
    """Report, then have the outcome ignored."""
    begin(self, look=False)
    report_changes(self, changes)
    raise Ignore()


@app.task(base=AwaTask, bind=True, acks_late=True)
def reject_after(self: Any, changes: int, requeue: bool, marker: str) -> dict:
    """Report and reject the message; where it comes back, return what was found."""
    found = begin(self, look=Path(marker).exists())
    if Path(marker).exists():
        return found
    report_changes(self, changes)
    Path(marker).touch()
    raise Reject("not here", requeue=requeue)


@app.task(base=AwaTask, bind=True)
def exit_after(self: Any, changes: int) -> None:
    """Report, then leave by SystemExit."""
    begin(self, look=False)
    report_changes(self, changes)
    raise SystemExit(3)


@app.task(base=AwaTask, bind=True)
def return_unserialisable(self: Any, changes: int) -> object:
    """Report, then return what no serializer takes."""
    begin(self, look=False)
    report_changes(self, changes)
    return object()


@app.task(base=AwaTask, bind=True)
def kill_process(
    self: Any,
    percent: float,
    message: str | None = None,
    metadata: dict[str, Any] | None = None,
    marker: str | None = None,
    before: str | None = None,
) -> dict:
    """Report, wait for the file ``before``, and kill this very process with SIGKILL.

    With a marker only the first attempt does; a later one returns what it found.
    """
    again = marker is not None and Path(marker).exists()
    found = begin(self, look=again)
    if again:
        return found
    self.set_progress(percent, message)
    self.update_metadata(metadata or {})
    note(self, "reported")
    hold(before)
    if marker is not None:
        Path(marker).touch()
    os.kill(os.getpid(), signal.SIGKILL)
    eventually(lambda: False, what="death by SIGKILL")
    return found


@app.task(base=AwaTask, bind=True)
def hold_interpreter(self: Any, seconds: float) -> None:
    """Report, then keep the interpreter's lock in a C call for that long."""
    begin(self, look=False)
    self.set_progress(10, "in a C call")
    note(self, "reported")
    # PyDLL, unlike CDLL, keeps the lock during the call.
    ctypes.PyDLL(None).usleep(int(seconds * 1_000_000))
    note(self, "released")


@app.task(base=AwaTask, bind=True)
def report_in_threads(self: Any, threads: int, changes: int, gate: str | None = None) -> None:
    """Report from several threads at once by the attempt's handle."""
    begin(self, look=False)
    handle = self.attempt

    def one(thread: int) -> None:
        for change in range(1, changes + 1):
            handle.update_metadata({f"thread {thread}": change})

    started = [threading.Thread(target=one, args=(number,)) for number in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    note(self, "reported")
    hold(gate)


@app.task(base=AwaTask, bind=True)
def report_in_coroutine(self: Any, gate: str | None = None) -> None:
    """Report from a coroutine and from asyncio's own threads."""

    async def body() -> None:
        current_attempt().set_progress(25, "in a coroutine")
        await asyncio.to_thread(lambda: current_attempt().update_metadata({"by": "to_thread"}))

    begin(self, look=False)
    asyncio.run(body())
    note(self, "reported")
    hold(gate)


@app.task(base=AwaTask, bind=True)
def call_other_task(self: Any, gate: str | None = None) -> float | None:
    """Report, and call another AwaTask as a function, whose reports are not this attempt's."""
    begin(self, look=False)
    self.set_progress(20, "outer")
    answer = inner(70, "inner")
    inner.run(80, "inner")
    note(self, "reported")
    hold(gate)
    return answer


@app.task(base=AwaTask)
def inner(percent: float, message: str) -> float:
    """The task that another calls directly; its body alone is helper code of the other."""
    inner.set_progress(percent, message)
    note(inner, "inner", within=current_attempt() is not None)
    return percent


@app.task(base=AwaTask, bind=False)
def report_unbound(percent: float, message: str, gate: str | None = None) -> float:
    """Report from helper code that knows no task."""
    deep_in_a_library(percent, message)
    note(current_task, "reported")
    hold(gate)
    return percent


def deep_in_a_library(percent: float, message: str) -> None:
    """Helper code that finds the attempt by itself."""
    current_attempt().set_progress(percent, message)


@shared_task(base=AwaTask, bind=True)
def shared_report(self: Any, percent: float, message: str, gate: str | None = None) -> float:
    """A task of a reusable application."""
    begin(self, look=False)
    self.set_progress(percent, message)
    note(self, "reported")
    hold(gate)
    return percent


@app.task(base=AwaTask, bind=True)
def always_retry(self: Any, percent: float) -> None:
    """Report in the first attempt, and retry until no retry is left."""
    begin(self)
    if not self.request.retries:
        self.set_progress(percent)
        self.update_metadata({"last_id": percent})
    raise self.retry(countdown=0, exc=Unlucky("again"), max_retries=1)


@app.task(base=AwaTask, bind=True)
def report_in_first_attempt(self: Any, metadata: dict[str, Any]) -> dict:
    """Report in the first of three attempts; the third returns what it found."""
    found = begin(self)
    if self.request.retries == 2:
        return found
    if self.request.retries == 0:
        self.update_metadata(metadata)
    raise self.retry(countdown=0, max_retries=2)


@app.task(base=AwaTask, bind=True)
def fail_at_gate(self: Any, percent: float, gate: str) -> None:
    """Report and flush, wait for the gate and raise."""
    begin(self)
    self.set_progress(percent)
    self.flush_progress()
    note(self, "reported")
    hold(gate)
    raise Unlucky("after all")


@app.task(base=AwaTask, bind=True)
def retry_with_headers(self: Any) -> dict:
    """Retry with headers of the user's own in place of all that the message had."""
    found = begin(self)
    note(self, "headers", customer=(self.request.headers or {}).get("customer"))
    if self.request.retries:
        return found
    self.update_metadata({"left": True})
    raise self.retry(countdown=0, headers={"customer": "second"})


@app.task(base=AwaTask, bind=True)
def retry_at_gate(self: Any, gate: str) -> str:
    """Report and flush, wait for the gate and retry; the second attempt says so."""
    begin(self)
    if self.request.retries:
        return "second"
    self.set_progress(30)
    self.flush_progress()
    note(self, "reported")
    hold(gate)
    raise self.retry(countdown=0)
