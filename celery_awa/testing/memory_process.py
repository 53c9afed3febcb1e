"""What an attempt under test takes for its worker's process; it keeps all in memory.

It has the methods of :class:`~celery_awa.runtime.task_process.TaskProcess` that the plugin calls.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any, NoReturn

from ..model import Ended, Lease, NewAttempt, Transition
from ..plugin.current import here
from ..runtime.attempt import Attempt
from ..runtime.attempt_writes import committed_text
from ..settings import Settings
from .faults import Crash, Fault, Plan
from .memory_job import MemoryJob
from .transaction import write_in


def crash() -> NoReturn:
    """Crash the attempt here, as SIGKILL would; to be called by what a task under test calls.

    For places that no item and no step marks: have a fake of yours call it, in the midst of a
    transaction, say. RuntimeError where ``run_task`` runs no task.
    """
    process: object = here.process
    if not isinstance(process, MemoryProcess):
        raise RuntimeError("crash() is for what a task calls that run_task runs; none does now")
    process.crash()


class MemoryProcess:
    """The process of one attempt of a job, to whom a plan happens.

    ``retries``: of the message that the attempt begins with.
    """

    def __init__(self, job: MemoryJob, retries: int, settings: Settings, plan: Plan) -> None:
        self.job = job
        self.settings = settings
        self.stopping = False
        #: The worker died: nothing counts any more.
        self.dead = False
        self.flushes = 0
        self.attempt: Attempt | None = None
        self._retries = retries
        self._plan = plan

    @property
    def progress(self) -> dict[str, Any] | None:
        """What was reported last, of all that counted."""
        if self.attempt is None or self.dead or self.attempt.lost:
            return self.job.progress
        return self.attempt.buffer.value()

    # What happens to it.

    def crash(self) -> NoReturn:
        """Die: what the attempt's page holds by now is kept."""
        if not self.dead:
            self.dead = True
            if self.attempt is not None and not self.attempt.lost and not self.attempt.ended:
                self.job.keep(self.attempt)
        raise Crash("the worker died here: let this pass")

    def _after_item(self, loop: str, done: int) -> bool:
        self._check_alive()
        return self._plan.item_finished(loop, done) and self._strike()

    def _after_step(self, step: str) -> None:
        self._check_alive()
        if self._plan.step_finished(step):
            self._strike()

    def _strike(self) -> bool:
        if self._plan.fault is Fault.CRASH:
            self.crash()
        if self._plan.fault is Fault.INTERRUPT:
            self.stopping = True
        elif self.attempt is not None:
            # What the newer attempt found.
            self.job.keep(self.attempt)
            self.attempt.answer(acknowledged=0, confirmed_at=0.0, lost=True)
        return True

    def _check_alive(self) -> None:
        """A task that goes on after its worker's death, in a ``finally`` say, gets no further."""
        if self.dead:
            self.crash()

    # What the plugin calls, on the task's thread.

    def begin(self, attempt: Attempt, *, claim: bool, look: bool = False) -> None:
        attempt.on_item, attempt.on_step = self._after_item, self._after_step
        self._claim(attempt)

    def _claim(self, attempt: Attempt) -> None:
        self.attempt = attempt
        attempt.claim_sent = True
        attempt.claimed(self.job.claim(self._retries), time.monotonic())

    def learn(self, attempt: Attempt, timeout: float) -> None:
        self._check_alive()

    def flush(self, attempt: Attempt, timeout: float) -> bool:
        self._check_alive()
        self.job.keep(attempt)
        self.flushes += 1
        attempt.answer(acknowledged=attempt.buffer.generation, confirmed_at=time.monotonic())
        return True

    def commit(self, attempt: Attempt, connection: Any, values: Mapping[str, Any]) -> bool:
        self._check_alive()
        text = committed_text(attempt, values, self.settings.max_progress_bytes)

        def write() -> None:
            self._check_alive()
            self.job.commit(json.loads(text))

        write_in(connection, write)
        return True

    def expect_callback(
        self, attempt: Attempt, callback_id: str, name: str, timeout: float
    ) -> bool:
        self._check_alive()
        self.job.expect(callback_id, name)
        return True

    def end(self, attempt: Attempt, transition: Transition) -> Ended | None:
        if attempt.ended or attempt.lost or self.dead:
            attempt.ended = True
            return None
        if attempt.lease is None:  # it failed before its body was called
            self._claim(attempt)
        attempt.ended = True
        return self.job.end(attempt, transition)

    def forsake(self, attempt: Attempt) -> None:
        if not (attempt.ended or attempt.lost or self.dead):
            self.job.forsake(attempt)
        attempt.ended = True

    def owns(self, attempt: Attempt) -> bool:
        self._check_alive()
        return not attempt.lost

    def reopen(self, attempt: Attempt) -> None:
        attempt.unclaim()
        self._claim(attempt)

    def sent(self, lease: Lease) -> None:
        """Nobody would send it again."""

    def end_unstarted(self, described: NewAttempt, transition: Transition) -> None:
        """Nobody revokes it."""

    def detach(self) -> None:
        """In a process that the task forked: the attempt is not that one's to report for."""
        if self.attempt is not None:
            self.attempt.detach()
