"""Puts a process in memory where a worker's would be, for one call on one thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery.backends.base import DisabledBackend

from ..plugin.current import here
from .memory_process import MemoryProcess
from .replaced import replaced

_lock = threading.Lock()
_taken_by: int | None = None


@contextmanager
def alone() -> Iterator[None]:
    """Only one thread is within it. RuntimeError in a worker, and within it already."""
    global _taken_by
    if _taken_by == threading.get_ident():
        raise RuntimeError("a task that run_task runs cannot call run_task itself")
    with _lock:
        if here.process is not None or here.pages is not None:
            raise RuntimeError("run_task stands for a worker, so it cannot be used inside of one")
        _taken_by = threading.get_ident()
        try:
            yield
        finally:
            _taken_by = None


@contextmanager
def standing_in(task: Any, process: MemoryProcess) -> Iterator[None]:
    """Within it the process is this process's, and the task publishes and stores nothing."""
    with (
        replaced(here, process=process, publish=_drop),
        replaced(task, **_without_results(task)),
    ):
        yield


def _drop(app: Any, message: Any) -> None:
    """The next attempt is the test's to begin."""


def _without_results(task: Any) -> dict[str, Any]:
    # Celery's property keeps it there; a class may have a backend of its own in the property's
    # place.
    name = "_backend" if isinstance(getattr(type(task), "backend", None), property) else "backend"
    return {name: DisabledBackend(task.app)}
