"""Runs on the worker's main thread: starts the services before the pool, stops them after it.

Glue only. Celery stops steps in the reverse of their start order, and the order comes from
``requires`` alone: a step that requires the pool would be stopped before the pool has drained.
So this one requires the hub, and the pool requires this one.
"""

from __future__ import annotations

from typing import Any

from celery import bootsteps
from celery.worker.components import Hub, Pool

from . import checks, start
from .current import here, trouble


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
            start.start_worker(worker.app, worker.pool_cls, self._most_children(worker))
        except Exception as exc:
            trouble.warn("bug", "celery-awa: this worker goes without it", exc_info=exc)

    def stop(self, worker: Any) -> None:
        """After the pool has drained: the last heartbeat, the last ends."""
        start.stop_worker()

    def terminate(self, worker: Any) -> None:
        self.stop(worker)

    def info(self, worker: Any) -> dict[str, Any]:
        """For ``celery inspect stats``."""
        return {"awa": start.report(here)}

    def _most_children(self, worker: Any) -> int:
        if self._autoscale:
            text = str(self._autoscale).strip("[]()")
            return int(text.split(",")[0])
        return int(worker.concurrency or 1)


Pool.requires = (*Pool.requires, HeartbeatStep)
