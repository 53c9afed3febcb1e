"""Every way to end an attempt, on a plugin with a fault of its own that the environment names."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from celery import Task
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded

import celery_awa
from celery_awa import AwaTask
from celery_awa.errors import StoreRefused
from celery_awa.runtime.task_process import TaskProcess
from celery_awa.runtime.worker_pages import WorkerPages
from celery_awa.store import canonical
from tests.acceptance.apps.configured import Unlucky, configured_app
from tests.acceptance.diary import note
from tests.waiting import eventually, hold

FAULT_VARIABLE = "AWA_TEST_FAULT"

app = configured_app("faulty")
celery_awa.install(app)


@app.task(base=Task)
def echo(value: Any) -> Any:
    """A task without the plugin."""
    return value


@app.task(base=AwaTask, bind=True)
def end(self: Any, how: str) -> str:
    """Report and end in this way; where Celery runs it again, return."""
    _report(self)
    if self.request.retries:
        return "again"
    return _ENDS[how](self)


@app.task(base=AwaTask, bind=True, autoretry_for=(Unlucky,), default_retry_delay=0)
def autoretry(self: Any) -> str:
    """Fail in the first attempt."""
    _report(self)
    return "again" if self.request.retries else _fail(self)


@app.task(base=AwaTask, bind=True, acks_late=True, reject_on_worker_lost=True)
def come_back(self: Any, marker: str, how: str) -> str:
    """Have the message returned to the queue, in this way; the second time, return."""
    _report(self)
    if Path(marker).exists():
        return "again"
    Path(marker).touch()
    return _ENDS[how](self)


@app.task(base=AwaTask, bind=True)
def wait(self: Any, gate: str) -> str:
    """Report and wait for the gate."""
    _report(self)
    note(self, "reported")
    hold(gate)
    return "waited"


def _report(task: Any) -> None:
    note(task, "began")
    task.set_progress(40, "x")
    task.update_metadata({"last_id": 7})


def _fail(task: Any) -> NoReturn:
    raise Unlucky("on purpose")


def _retry(task: Any) -> NoReturn:
    raise task.retry(countdown=0)


def _ignore(task: Any) -> NoReturn:
    raise Ignore()


def _reject(task: Any) -> NoReturn:
    raise Reject("not here", requeue=False)


def _requeue(task: Any) -> NoReturn:
    raise Reject("not now", requeue=True)


def _replace(task: Any) -> NoReturn:
    raise task.replace(echo.s("replaced"))


def _kill(task: Any) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError(eventually(lambda: False, what="death by SIGKILL"))


_ENDS: dict[str, Callable[[Any], str]] = {
    "success": lambda task: "done",
    "failure": _fail,
    "retry": _retry,
    "ignore": _ignore,
    "reject": _reject,
    "requeue": _requeue,
    "replace": _replace,
    "kill": _kill,
}


class _BrokenStore:
    """Whatever it is asked, it raises."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getattr__(self, verb: str) -> Any:
        def raising(*_: object, **__: object) -> None:
            raise self._error

        return raising

    def close(self) -> None:
        """Closing a store raises nothing."""


def _raising(error: Exception) -> Callable[..., NoReturn]:
    def raising(*_: object, **__: object) -> NoReturn:
        raise error

    return raising


def _break_parts(bug: Exception) -> None:
    for verb in ("begin", "learn", "flush", "end", "end_unstarted", "owns", "reopen", "sent"):
        setattr(TaskProcess, verb, _raising(bug))
    for verb in ("end_lost", "lease_of"):
        setattr(WorkerPages, verb, _raising(bug))


def _strike_ends_once(error: Exception) -> None:
    """Each attempt's first end is broken off before it is handed over."""
    end, struck = TaskProcess.end, set()

    def broken_off(process: TaskProcess, attempt: Any, transition: Any) -> Any:
        if attempt.token not in struck:
            struck.add(attempt.token)
            raise error
        return end(process, attempt, transition)

    TaskProcess.end = broken_off


def _break(fault: str) -> None:
    bug = RuntimeError("a bug of ours")
    if fault == "opening raises":
        canonical.open_store = _raising(bug)
    elif fault == "the store raises":
        canonical.open_store = lambda url, schema: _BrokenStore(bug)
    elif fault == "the store refuses":
        canonical.open_store = lambda url, schema: _BrokenStore(StoreRefused("a trigger's word"))
    elif fault == "noting what was sent raises":
        TaskProcess.sent = _raising(bug)
    elif fault == "the parts raise":
        _break_parts(bug)
    elif fault == "a time limit strikes each end":
        _strike_ends_once(SoftTimeLimitExceeded())


_break(os.environ.get(FAULT_VARIABLE, ""))
