"""Tasks whose workers die, stop or lose them; each tells the diary what its attempt finds.

Options of the tasks come with the configuration (``task_annotations``), so that one task serves
every policy.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from celery import Task
from celery.utils import uuid

import celery_awa
from celery_awa import AwaTask, StopReason
from tests.acceptance.apps.configured import Unlucky, configured_app
from tests.acceptance.diary import note
from tests.waiting import eventually

app = configured_app("rescued")
celery_awa.install(app)

#: What the tasks leave for a later attempt.
LEFT = {"last_id": 7}


def begin(task: Any) -> dict[str, Any]:
    """Note what the attempt finds and return it."""
    found = dict(task.checkpoint)
    note(
        task,
        "began",
        checkpoint=found,
        attempt=task.attempt.number,
        queue=task.request.delivery_info["routing_key"],
        priority=task.request.delivery_info.get("priority"),
        customer=(task.request.headers or {}).get("customer"),
    )
    return found


def wait(task: Any, gate: str | None, *, until_asked: bool = False) -> None:
    """Until the gate of this very attempt is open or, if told so, the task is asked to stop.

    One gate opens for every attempt, ``<gate>.<number>`` for one.
    """
    if gate is None:
        return
    own = Path(f"{gate}.{task.attempt.number}")

    def over() -> bool:
        return own.exists() or Path(gate).exists() or (until_asked and task.should_stop)

    eventually(over, timeout=60, what=f"{own} was created")


@app.task(base=AwaTask, bind=True)
def wait_silently(self: Any, gate: str) -> str:
    """Wait for the gate, without a report and without a look at the checkpoint."""
    note(self, "waits")
    wait(self, gate)
    return "waited"


def leave_and_wait(task: Any, gate: str, value: Any, flush: bool) -> Any:
    """Leave a checkpoint, flushed if told so, and wait for the gate; returns the value."""
    begin(task)
    task.set_progress(40, "x")
    task.update_metadata(LEFT)
    if flush:
        task.flush_progress()
    note(task, "left")
    wait(task, gate)
    note(task, "went on", stop_reason=task.stop_reason)
    return value


@app.task(base=AwaTask, bind=True)
def resume(self: Any, gate: str, value: Any = None, flush: bool = True) -> Any:
    """Leave a checkpoint and wait for the gate, under the policy of the configuration."""
    return leave_and_wait(self, gate, value, flush)


@app.task(base=AwaTask, bind=True, lost_policy="requeue")
def resume_always(self: Any, gate: str, value: Any = None, flush: bool = True) -> Any:
    """The same, acknowledged early, and to be sent again."""
    return leave_and_wait(self, gate, value, flush)


@app.task(base=AwaTask, bind=True, acks_late=True)
def resume_late(self: Any, gate: str, value: Any = None, flush: bool = True) -> Any:
    """The same, acknowledged late, and so to be sent again."""
    return leave_and_wait(self, gate, value, flush)


class SingleTask(AwaTask):
    """A base that publishes nothing while a task with the same arguments is not over."""

    abstract = True

    def apply_async(
        self, args: Any = None, kwargs: Any = None, task_id: str | None = None, **options: Any
    ) -> Any:
        """Publish, or say which task is not over."""
        task_id = task_id or uuid()
        try:
            descriptor = os.open(self._place(args, kwargs), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            return self.AsyncResult(self._place(args, kwargs).read_text())
        os.write(descriptor, task_id.encode())
        os.close(descriptor)
        return super().apply_async(args, kwargs, task_id=task_id, **options)

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        """It is over."""
        self._place(args, kwargs).unlink()

    def _place(self, args: Any, kwargs: Any) -> Path:
        same = hashlib.sha256(repr((self.name, list(args), kwargs or {})).encode()).hexdigest()
        return Path(self.app.conf["test_diary"]).parent / f"{same}.single"


@app.task(base=SingleTask, bind=True, lost_policy="requeue")
def resume_single(self: Any, gate: str, value: Any = None, flush: bool = True) -> Any:
    """The same, of a base that swallows a second message."""
    return leave_and_wait(self, gate, value, flush)


@app.task(base=AwaTask, bind=True)
def parse_row(self: Any) -> int:
    """Fail with a checkpoint that no attempt can go on from; return the row of another."""
    found = begin(self)
    if not found:
        self.update_metadata({"row": "seven"})
        raise Unlucky("after the checkpoint")
    return int(found["row"])


@app.task(base=AwaTask, bind=True)
def die(self: Any, percent: float = 40, advance: bool = False) -> None:
    """Report and kill this very process."""
    begin(self)
    self.set_progress(percent + self.attempt.number)
    if advance:
        self.update_metadata({"attempt": self.attempt.number})
    self.flush_progress()
    os.kill(os.getpid(), signal.SIGKILL)
    eventually(lambda: False, what="death by SIGKILL")


def wait_until_asked(task: Any, gate: str) -> str | None:
    """Wait until asked to stop and return why; the gate lets it go without that."""
    begin(task)
    note(task, "waits", should_stop=task.should_stop, stop_reason=task.stop_reason)
    wait(task, gate, until_asked=True)
    note(task, "asked", should_stop=task.should_stop, stop_reason=task.stop_reason)
    return task.stop_reason


@app.task(base=AwaTask, bind=True)
def stop_when_asked(self: Any, gate: str) -> str | None:
    """Wait until asked to stop and return why."""
    return wait_until_asked(self, gate)


@app.task(base=AwaTask, bind=True, acks_late=True)
def stop_late_when_asked(self: Any, gate: str) -> str | None:
    """The same, acknowledged late."""
    return wait_until_asked(self, gate)


@app.task(base=AwaTask, bind=True)
def outstay(self: Any, gate: str) -> None:
    """Leave a checkpoint, note what is asked of it, and wait for the gate all the same."""
    begin(self)
    self.update_metadata(LEFT)
    self.flush_progress()
    eventually(lambda: self.stop_reason == StopReason.DEADLINE, what="the deadline")
    note(self, "overdue")
    eventually(lambda: self.stop_reason == StopReason.LEASE_LOST, what="its end")
    note(self, "lease lost")
    wait(self, gate)


@app.task(base=AwaTask, bind=True, deadline=0.001)
def look_when_overdue(self: Any) -> list[Any]:
    """What is asked of it long after its deadline."""
    began = time.monotonic()
    eventually(lambda: time.monotonic() - began > 0.01)
    return [self.should_stop, self.stop_reason]


@app.task(base=AwaTask, bind=True)
def flush_at_gate(self: Any, gate: str) -> bool:
    """Flush before and after the gate of this attempt; returns what the second flush said."""
    begin(self)
    number = self.attempt.number
    self.set_progress(message=f"attempt {number}")
    note(self, "flushed first", attempt=number, flushed=self.flush_progress())
    wait(self, gate)
    self.set_progress(message=f"attempt {number} again")
    flushed = self.flush_progress()
    note(self, "flushed again", attempt=number, flushed=flushed, stop_reason=self.stop_reason)
    return flushed


@app.task(base=AwaTask, bind=True)
def hold_interpreter(self: Any, seconds: float) -> None:
    """Keep the interpreter's lock in a C call for that long."""
    begin(self)
    # PyDLL, unlike CDLL, keeps the lock during the call.
    ctypes.PyDLL(None).usleep(int(seconds * 1_000_000))


@app.task(base=AwaTask, bind=True)
def count_up(self: Any, steps: int) -> int:
    """Count from the checkpoint on, confirming each step, and leave when asked to."""
    begin(self)
    number = self.attempt.number
    for step in range(self.checkpoint.get("step", 0) + 1, steps + 1):
        note(self, "step", step=step, attempt=number)
        self.update_metadata({"step": step})
        if not self.flush_progress():
            break
        threading.Event().wait(0.08)
    return steps


@app.task(base=AwaTask, bind=True)
def retry_once(self: Any, countdown: float = 0.0, gate: str | None = None) -> dict[str, Any]:
    """Leave a checkpoint and retry; the second attempt returns what it found."""
    found = begin(self)
    if self.request.retries:
        return found
    self.update_metadata(LEFT)
    note(self, "left")
    wait(self, gate)
    raise self.retry(countdown=countdown, exc=Unlucky("again"), max_retries=1)


def exit_once(task: Any) -> dict[str, Any]:
    """Leave a checkpoint and the process by SystemExit; the second attempt says what it found."""
    found = begin(task)
    if found:
        return found
    task.update_metadata(LEFT)
    raise SystemExit(3)


@app.task(base=AwaTask, bind=True)
def leave_by_exit(self: Any) -> dict[str, Any]:
    """Leave by SystemExit, and for good."""
    return exit_once(self)


@app.task(base=AwaTask, bind=True, lost_policy="requeue")
def exit_and_come_again(self: Any) -> dict[str, Any]:
    """Leave by SystemExit, once."""
    return exit_once(self)


@app.task(base=Task, bind=True)
def heard(self: Any, *args: Any) -> Any:
    """A link, an errback or a chord's body: note what came."""
    note(self, "heard", args=args)
    return args


@app.task(base=Task, bind=True)
def hear_failure(self: Any, task_id: str) -> None:
    """An errback: note of which task."""
    note(self, "failure", of=task_id)


@app.task(base=Task)
def plain(value: Any = None) -> Any:
    """A task of no class of ours."""
    return value
