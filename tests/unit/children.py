"""Children of a worker with an attempt on a page of its slate."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress

from celery_awa.model import Envelope, JobState, Lease, NewAttempt, Transition
from celery_awa.progress import ProgressBuffer
from celery_awa.runtime.page import Page
from celery_awa.runtime.slate import Slate
from tests.fake_store import FakeDatabase
from tests.runtime_parts import described, new_token

FAILED = Transition(
    JobState.FAILED, error="WorkerLostError: signal 9", envelope=Envelope(b"whole", whole=True)
)
AVAILABLE = Transition(JobState.AVAILABLE, unsent=True, envelope=Envelope(b"whole", whole=True))


class Running:
    """An attempt on a page of a process of its own."""

    def __init__(
        self,
        slate: Slate,
        task_id: str = "task",
        *,
        lease: Lease | None = None,
        token: str | None = None,
        percent: int | None = 40,
        own_end: bytes | None = None,
    ) -> None:
        self.token = token or new_token()
        self.task_id = task_id
        reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            signal.alarm(60)
            with suppress(BaseException):
                page = Slate.open(slate.path).take_page()
                assert page is not None
                page.begin(self.token, task_id)
                buffer = ProgressBuffer(sink=page)
                if percent is not None:
                    buffer.set_progress(percent)
                page.set_lease(lease)
                if own_end is not None:
                    page.set_end(own_end)
                os.write(writing, b"!")
                signal.pause()
            os._exit(1)
        assert os.read(reading, 1) == b"!"
        os.close(reading)
        os.close(writing)

    def kill(self) -> Running:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        self.pid = 0
        return self


Run = Callable[..., Running]


def describe(token: str | None) -> NewAttempt:
    return described(token or new_token())


def own_page(
    slate: Slate, database: FakeDatabase, task_id: str = "task"
) -> tuple[Page, ProgressBuffer]:
    """A claimed attempt in this process."""
    token = new_token()
    page = slate.take_page()
    assert page is not None
    page.begin(token, task_id)
    page.set_lease(database.open().claim(described(token, task_id)).lease)
    return page, ProgressBuffer(sink=page)
