"""Attempts, settings and a clock for the tests of the runtime."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any

import pytest

from celery_awa.model import Envelope, NewAttempt
from celery_awa.runtime.attempt import Attempt
from celery_awa.runtime.database_thread import DatabaseThread
from celery_awa.runtime.desk import Desk, Terms
from celery_awa.runtime.slate import Slate
from celery_awa.runtime.task_process import TaskProcess
from celery_awa.runtime.worker_pages import WorkerPages
from celery_awa.settings import Settings
from celery_awa.store.protocol import Store

#: Seconds that nothing here may take; what waits longer waits for ever.
SOON = 5.0
_tokens = itertools.count(1)

StartProcess = Callable[..., TaskProcess]
StartWorker = Callable[..., WorkerPages]
MakeThread = Callable[..., DatabaseThread]


class Clock:
    """Stands for the module ``time`` in others; the test moves it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
        self.now = time.monotonic()
        for module in modules:
            monkeypatch.setattr(module, "time", self)

    def monotonic(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


def new_token() -> str:
    # With the process's id: forked ones go on counting where their parent was.
    return f"{os.getpid():016x}{next(_tokens):016x}"


def settings(**changed: Any) -> Settings:
    """Settings under which nothing happens by itself for a long while, but what is changed."""
    slow: dict[str, Any] = {
        "write_interval": 200.0,
        "heartbeat_interval": 500.0,
        "stale_after": 1000.0,
        "claim_after": 500.0,
        "rescue_interval": 500.0,
    }
    return Settings(**(slow | changed))


#: An envelope without arguments.
IN_PART = Envelope(b"envelope", whole=False)


def described(token: str, task_id: str = "task", **fields: Any) -> NewAttempt:
    known: dict[str, Any] = {
        "kind": "kind",
        "queue": None,
        "worker": None,
        "run_token": "run",
        "run_named": True,
        "envelope": IN_PART,
    }
    return NewAttempt(token=token, task_id=task_id, **(known | fields))


def attempt(
    task_id: str = "task",
    desk: Desk | None = None,
    *,
    may_run: float | None = None,
    terms: Terms | None = None,
    envelope: Envelope | None = IN_PART,
    **fields: Any,
) -> Attempt:
    """A new attempt of a task; ``fields`` are what its message says."""

    def describe(token: str) -> NewAttempt:
        return described(token, task_id, envelope=None, **fields)

    return Attempt(
        new_token(),
        task_id,
        describe,
        desk,
        envelope=lambda: envelope,
        limit=65_536,
        terms=terms or Terms(deadline=may_run),
    )


def undescribable(task_id: str = "task", desk: Desk | None = None) -> Attempt:
    """An attempt whose task has an argument that cannot be shown."""

    def describe(token: str) -> NewAttempt:
        raise RuntimeError("a repr of the user's")

    return Attempt(new_token(), task_id, describe, desk, limit=65_536)


def begin(
    process: TaskProcess, task_id: str = "task", *, claim: bool = False, **fields: Any
) -> Attempt:
    """Begin an attempt, as its message says by ``fields``."""
    one = attempt(task_id, process, **fields)
    process.begin(one, claim=claim)
    return one


def claimed(process: TaskProcess, task_id: str = "task", **fields: Any) -> Attempt:
    """Begin an attempt that has its row."""
    one = begin(process, task_id, claim=True, **fields)
    if one.claim is None:  # a courtesy that was too short for a busy machine
        process.learn(one, SOON)
    assert one.lease is not None, one.claim
    return one


class Strike(BaseException):
    """Stands for what a signal's handler raises; nobody may catch it for an error of his own."""


def struck_at_every_point(call: Callable[[], object]) -> Iterator[int]:
    """Call it again and again, each time struck at the next point, until it ends unharmed.

    The points are those at which CPython runs signal handlers, in our code and in the standard
    library's: the start of a function, and after a call of a built-in one. But not where Python
    drops what is raised, as in the callback of a weak reference.
    """
    for point in itertools.count(1):
        if not _struck(call, point):
            return
        yield point


def _struck(call: Callable[[], object], point: int) -> bool:
    left = point

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal left
        spared = ("/tests/", "_weakrefset.py")
        if event in ("call", "c_return") and not any(
            part in frame.f_code.co_filename for part in spared
        ):
            left -= 1
            if left == 0:
                raise Strike

    sys.setprofile(profile)
    try:
        call()
    except Strike:
        return True
    finally:
        sys.setprofile(None)
    return False


class Pass:
    """A service that is due whenever it is told so, and notes its passes."""

    def __init__(self, work: Callable[[Callable[[], Store]], object] = lambda opened: None) -> None:
        self.at: float | None = None
        self.passes = 0
        self.passed = threading.Event()
        self._work = work

    def due(self) -> float | None:
        return self.at

    def run_once(self, open_store: Callable[[], Store]) -> None:
        self.at = None
        self.passes += 1
        try:
            self._work(open_store)
        finally:
            self.passed.set()


def knows(task_id: str) -> Callable[[Store], bool]:
    return lambda store: store.knows(task_id)


def failing(error: BaseException) -> Callable[[Store], Any]:
    def work(store: Store) -> None:
        store.knows("failing")
        raise error

    return work


def is_done(errand: Any) -> bool:
    return bool(errand.done)


def carried(slate: Slate) -> list[str]:
    """The tasks whose attempts are on a page."""
    return sorted(page.task_id for page in slate.pages())
