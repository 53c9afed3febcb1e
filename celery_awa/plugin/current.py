"""Runs in every process and thread: which attempt this code belongs to, and what its process has.

A ContextVar follows coroutines and ``asyncio.to_thread``; plain threads get the handle instead.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from celery.exceptions import SoftTimeLimitExceeded

from ..runtime.attempt import Attempt
from ..runtime.rescuer import Rescuer
from ..runtime.task_process import TaskProcess
from ..runtime.trouble import Trouble
from ..runtime.worker_pages import WorkerPages
from .broker import publish_once
from .wire import Message

_attempt: ContextVar[Attempt | None] = ContextVar("celery_awa_attempt", default=None)

#: Where a request carries its attempt, so that signal handlers find it after the body.
ON_REQUEST = "awa_attempt"

trouble = Trouble()


class Here:
    """What this process has: it executes tasks, or it is a prefork worker that reads pages."""

    process: TaskProcess | None = None
    pages: WorkerPages | None = None
    #: In a worker, unless it leaves rescues to others.
    rescuer: Rescuer | None = None
    #: True in a pool child, where the worker gives the verdict on an aborted attempt.
    is_child: bool = False
    #: Publishes a message that a task's own thread sends past its class.
    publish: Callable[[Any, Message], None] = staticmethod(publish_once)
    #: Seconds of the worker's own hard time limit, for tasks that have none.
    time_limit: float | None = None

    def __init__(self) -> None:
        #: What a fork handed down; kept, so that nothing of it is closed on the parent's behalf.
        self.inherited: list[object] = []


here = Here()


def current_attempt() -> Attempt | None:
    """The attempt that this code runs in, or None; see docs for plain threads.

    Works in helper code however deep, in coroutines and in ``asyncio.to_thread``.
    """
    return _attempt.get()


@contextmanager
def running(attempt: Attempt | None) -> Iterator[None]:
    """Within it, this is the attempt; None hides the outer one from a direct call of a task."""
    token = _attempt.set(attempt)
    try:
        yield
    finally:
        _attempt.reset(token)


@contextmanager
def bugs_told(what: str) -> Iterator[None]:
    """Within it bookkeeping cannot hurt the task: what it raises is told and goes no further.

    A time limit that strikes in here is the task's own and goes on.
    """
    try:
        yield
    except SoftTimeLimitExceeded:
        raise
    except Exception as exc:
        trouble.warn("bug", "celery-awa: %s", what, exc_info=exc)


def is_ours(task: Any) -> bool:
    """Whether this is a task of one of our classes; a proxy is what it stands for.

    Celery's own tasks are not, though ``default_base`` puts our class under them too:
    ``celery.chord_unlock`` retries itself once a second, which is no news to anybody.
    """
    return getattr(task, "awa_task", False) is True and not task.name.startswith("celery.")


def attempt_of(request: Any) -> Attempt | None:
    """The attempt that this request began, if it began one."""
    return getattr(request, "__dict__", {}).get(ON_REQUEST)


def _leave_inherited() -> None:
    """In a forked child: nothing of the parent's is ours. A pool child starts its own later."""
    parts = (here.process, here.pages, here.rescuer)
    here.inherited += [part for part in parts if part is not None]
    if here.process is not None:
        here.process.detach()
    here.process = here.pages = here.rescuer = None
    here.is_child = False


os.register_at_fork(after_in_child=_leave_inherited)
