"""Runs on the worker's main thread: starts the services before the pool, stops them after it.

Glue only. Celery stops steps in the reverse of their start order, and the order comes from
``requires`` alone: a step that requires the pool would be stopped before the pool has drained.
So this one requires the hub, and the pool requires this one.
"""

from __future__ import annotations

import atexit
from typing import Any

from celery import bootsteps
from celery.worker.components import Hub, Pool

from . import checks, start
from .current import bugs_told, here, trouble


class HeartbeatStep(bootsteps.StartStopStep):  # type: ignore[misc]  # celery ships no types
    """Worker step: ``app.steps["worker"].add(HeartbeatStep)``; ``install`` does it for you."""

    requires = (Hub,)

    def __init__(self, worker: Any, autoscale: Any = None, **kwargs: Any) -> None:
        self._autoscale = autoscale
        super().__init__(worker, **kwargs)

    def include_if(self, worker: Any) -> bool:
        # The pool of every app in this process requires us; only some have asked for us.
        return checks.has_step(worker.app, HeartbeatStep)

    def create(self, worker: Any) -> HeartbeatStep:
        return self

    def start(self, worker: Any) -> None:
        """Before the pool: children inherit what is started here."""
        try:
            start.start_worker(worker, self._most_children(worker))
            _tell_before_soft_shutdown(worker)
        except Exception as exc:
            trouble.warn("bug", "celery-awa: this worker goes without it", exc_info=exc)

    def close(self, worker: Any) -> None:
        """Before the pool drains, however the stop was asked for: by remote control, too."""
        _tell_attempts()

    def stop(self, worker: Any) -> None:
        """After the pool has drained: the last heartbeat, the last ends."""
        self._stop(worker, dying=False)

    def terminate(self, worker: Any) -> None:
        """After the pool was ended by force."""
        self._stop(worker, dying=True)

    def _stop(self, worker: Any, *, dying: bool) -> None:
        if start.attempts_go_on() and not getattr(worker.pool, "is_green", False):
            # Nobody can end a thread: the process lasts as long as its threads, or as Python
            # waits for them.
            atexit.register(start.stop_worker, dying=True)
        else:
            start.stop_worker(dying=dying)

    def info(self, worker: Any) -> dict[str, Any]:
        """For ``celery inspect stats``."""
        return {"awa": start.report(here)}

    def _most_children(self, worker: Any) -> int:
        if self._autoscale:
            text = str(self._autoscale).strip("[]()")
            return int(text.split(",")[0])
        return int(worker.concurrency or 1)


def _tell_attempts() -> None:
    with bugs_told("no attempt knows that its worker stops"):
        start.worker_stopping()


def _tell_before_soft_shutdown(worker: Any) -> None:
    """Celery waits first and sends its signal then, when there is nothing left to stop for."""
    wait = worker.wait_for_soft_shutdown

    def told() -> None:
        _tell_attempts()
        wait()

    worker.wait_for_soft_shutdown = told


Pool.requires = (*Pool.requires, HeartbeatStep)
