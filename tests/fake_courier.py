"""A broker and a result backend in memory, with the faults of real ones."""

from __future__ import annotations

import threading
from collections.abc import Callable

from celery_awa.model import JobState, LostJob, UnsentJob


class FakeCourier:
    """What was published, and what is wrong with it. Several rescuers may share one."""

    def __init__(self) -> None:
        #: Final results of runs, by task id.
        self.results: dict[str, JobState] = {}
        #: Tasks in the order in which they were asked for, sent and told.
        self.asked: list[str] = []
        self.sent: list[str] = []
        self.told: list[tuple[str, JobState, str | None]] = []
        #: What a call raises, by its name and the task; None stands for each task.
        self.raising: dict[tuple[str, str | None], Exception] = {}
        #: Called at the start of each call.
        self.before: dict[str, Callable[[LostJob | UnsentJob], object]] = {}
        self._lock = threading.Lock()

    def result(self, job: LostJob | UnsentJob) -> JobState | None:
        with self._lock:
            self.asked.append(job.task_id)
        self._begin("result", job)
        return self.results.get(job.task_id)

    def send(self, job: UnsentJob) -> None:
        self._begin("send", job)
        with self._lock:
            self.sent.append(job.task_id)

    def tell(self, job: UnsentJob) -> None:
        self._begin("tell", job)
        with self._lock:
            self.told.append((job.task_id, job.state, job.error))

    def _begin(self, name: str, job: LostJob | UnsentJob) -> None:
        if name in self.before:
            self.before[name](job)
        error = self.raising.get((name, job.task_id)) or self.raising.get((name, None))
        if error is not None:
            raise error
