"""Looking at the row of a task until it shows what a test waits for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery_awa import Client
from celery_awa.model import Job
from tests.waiting import eventually


class Jobs:
    """The rows as a user sees them."""

    def __init__(self, url: str) -> None:
        self._client = Client(url)

    def get(self, task_id: str) -> Job | None:
        """The row now."""
        return self._client.get_job(task_id)

    def all(self) -> list[Job]:
        """All rows, newest first."""
        return self._client.list_jobs(limit=1_000)

    def wait_for(self, task_id: str, *states: str, timeout: float = 15.0) -> Job:
        """Wait until the task's row is in one of the states."""

        def found() -> Job | None:
            job = self.get(task_id)
            assert job is not None
            assert job.state in states, job
            return job

        job = eventually(found, timeout=timeout, what=f"{task_id} in {states}")
        assert job is not None
        return job

    def close(self) -> None:
        self._client.close()


@contextmanager
def opened_jobs(url: str) -> Iterator[Jobs]:
    jobs = Jobs(url)
    try:
        yield jobs
    finally:
        jobs.close()


def outcome(result: Any, timeout: float = 20.0) -> Any:
    """What the task returned or raised."""
    return result.get(timeout=timeout, propagate=False)
