"""Runs on the rescue thread: one part of a pass, how far it may go and what it did."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from ..errors import AwaError, SchemaError, StoreUnavailable, Unsendable
from ..model import JobState, LostJob, UnsentJob
from ..store.protocol import Store
from .contact import Contact
from .courier import Courier
from .database_thread import DatabaseThread
from .ending import error_text
from .fork_rest import ForkRest
from .trouble import Trouble

T = TypeVar("T")

#: Jobs that are looked at with one statement.
PAGE = 100
#: Seconds that the rescue thread waits for an answer of the database.
ASK_TIMEOUT = 5.0
#: Seconds for one part of a pass. What is left then is left to the next.
PART_LIMIT = 30.0
#: Seconds of a part that may be lost on calls of one kind which fail: a broker that refuses at
#: once is tried for every job, one that does not answer is left alone until the next pass.
PATIENCE = 5.0


class Postponed(Exception):
    """Nothing can be done for this job now. Why has been told."""


class Means:
    """What every part of every pass works with."""

    def __init__(
        self,
        database: DatabaseThread,
        courier: Courier,
        trouble: Trouble,
        over: Callable[[], bool],
        contact: Contact,
    ) -> None:
        self.database = database
        self.contact = contact
        self.courier = courier
        self.trouble = trouble
        #: Whether the rescuer is to stop.
        self.over = over
        self.rest = ForkRest()


class Part:
    """One part of one pass. ``counts`` is the pass's, by the names of RescueCounts."""

    def __init__(self, means: Means, counts: Counter[str]) -> None:
        self.counts = counts
        self.courier = means.courier
        self.trouble = means.trouble
        self._means = means
        self._ends_at = time.monotonic() + PART_LIMIT
        self._wasted: dict[str, float] = {}

    @property
    def over(self) -> bool:
        """Whether to leave off here: the rescuer is to stop, or this has taken too long."""
        return self._means.over() or time.monotonic() >= self._ends_at

    @property
    def silence_counts(self) -> bool:
        """Whether an attempt that is silent for too long is lost, by what this rescuer knows."""
        return self._means.contact.silence_counts

    def gave_up(self, kind: str) -> bool:
        """Whether calls of this kind have failed for too long."""
        return self._wasted.get(kind, 0.0) >= PATIENCE

    def ask(self, work: Callable[[Store], T]) -> T:
        """Ask the database, and wait.

        Raises StoreUnavailable where it is away, and as it is what concerns single rows, such
        as RowLocked: that is for the next pass, not to be waited for.
        """

        def carry_out(store: Store) -> tuple[T | None, Exception | None]:
            try:
                return work(store), None
            except (StoreUnavailable, SchemaError):
                raise
            except Exception as exc:
                return None, exc

        try:
            answer, error = self._means.database.ask(carry_out, ASK_TIMEOUT)
        except StoreUnavailable:
            self._means.contact.broke()
            raise
        self._means.contact.answered()
        if error is not None:
            raise error
        return answer  # type: ignore[return-value]  # the work's own

    def settle(self, job: LostJob | UnsentJob, to: JobState, error: str | None = None) -> bool:
        """End a job; False if it went on meanwhile."""
        return self.ask(lambda store: store.settle(job.lease, to, error))

    def result(self, job: LostJob | UnsentJob) -> JobState | None:
        """How this run ended, by the result backend; Postponed where that cannot be asked."""
        try:
            with self.calling("result"):
                return self.courier.result(job)
        except Postponed:
            raise
        except Exception as exc:
            self.trouble.warn(
                "result",
                "celery-awa: task %s waits, since the result backend cannot be asked: %s",
                job.task_id,
                error_text(exc),
            )
            raise Postponed from exc

    @contextmanager
    def calling(self, kind: str) -> Iterator[None]:
        """Within it the courier is called. Raises Postponed where calls of this kind gave up."""
        if self.gave_up(kind):
            raise Postponed
        began = time.monotonic()
        try:
            with self._means.rest.work():
                yield
        except Unsendable:
            raise  # that is an answer
        except Exception:
            self._wasted[kind] = self._wasted.get(kind, 0.0) + time.monotonic() - began
            raise

    @contextmanager
    def alone(self, job: LostJob | UnsentJob) -> Iterator[None]:
        """Within it one job is dealt with: what goes wrong there keeps no other from its turn."""
        try:
            yield
        except StoreUnavailable:
            raise
        except Exception as exc:
            self.counts["postponed"] += 1
            if not isinstance(exc, Postponed):
                self.trouble.warn(
                    "rescue",
                    "celery-awa: task %s is left to the next pass of the rescuer: %s",
                    job.task_id,
                    error_text(exc),
                    exc_info=None if isinstance(exc, AwaError) else exc,
                )
