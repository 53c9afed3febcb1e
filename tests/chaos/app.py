"""The tasks that chaos is made around: each says in the diary what it found and what it did.

A task works in steps and reports each. ``by`` in its checkpoint is the token of the attempt that
wrote it, so that a write by an attempt without the lease shows.
"""

from __future__ import annotations

import time
from typing import Any

import celery_awa
from celery_awa import AwaTask, StoreUnavailable
from tests.acceptance.apps.configured import configured_app
from tests.acceptance.diary import note

app = configured_app("chaos")
celery_awa.install(app)

#: So often may an attempt die without a step done: rounds kill more than once.
MAX_RESCUES = 10
FLUSH_EVERY = 3


@app.task(
    base=AwaTask,
    bind=True,
    name="late",
    acks_late=True,
    reject_on_worker_lost=True,
    max_rescues=MAX_RESCUES,
)
def late(self: Any, steps: int, pause: float, retry_at: int | None = None) -> str:
    """Acknowledged when it ends: Celery returns a lost child's message, rescue does the rest."""
    return work(self, steps, pause, retry_at)


@app.task(base=AwaTask, bind=True, name="early", lost_policy="requeue", max_rescues=MAX_RESCUES)
def early(self: Any, steps: int, pause: float, retry_at: int | None = None) -> str:
    """Acknowledged when it begins: the only copy of its message is ours.

    Of a lost child's task Celery says that it failed, and that stands.
    """
    return work(self, steps, pause, retry_at)


@app.task(base=AwaTask, bind=True, name="once", lost_policy="fail")
def once(self: Any, steps: int, pause: float, retry_at: int | None = None) -> str:
    """Not to be run again after a death."""
    return work(self, steps, pause, retry_at)


def work(task: Any, steps: int, pause: float, retry_at: int | None) -> str:
    """Do the steps that are left, and return the token of the attempt that did the last."""
    done = int(_checkpoint(task).get("done", 0))
    attempt = task.attempt
    me = {"token": attempt.token, "lease": attempt.lease.run_lease}
    note(task, "began", done=done, **me)
    for step in range(done + 1, steps + 1):
        time.sleep(pause)
        task.update_metadata({"done": step, "by": attempt.token})
        task.set_progress(current=step, total=steps)
        if step % FLUSH_EVERY == 0 and _flushed(task):
            note(task, "confirmed", done=step, **me)
        if step == retry_at and task.request.retries == 0:
            note(task, "retried", **me)
            raise task.retry(countdown=0.1)
    note(task, "worked", **me)
    return str(attempt.token)


def _checkpoint(task: Any) -> Any:
    # With the database away there is nothing to go on from, and a task that must not begin anew
    # waits for it.
    while True:
        try:
            return task.checkpoint
        except StoreUnavailable:
            continue


def _flushed(task: Any) -> bool:
    try:
        return bool(task.flush_progress(timeout=1.0))
    except StoreUnavailable:
        return False
