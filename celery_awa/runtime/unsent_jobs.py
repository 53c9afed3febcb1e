"""Runs on the rescue thread: publishes messages, and ends that no worker could make known."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import Unsendable
from ..model import JobState, Lease, UnsentJob
from ..store.protocol import Store
from .database_thread import DatabaseThread
from .ending import error_text
from .errand import Errand
from .rescue_part import PAGE, Part, Postponed
from .trouble import logger

#: Failed tasks that one pass names in the log.
NAMED = 20


class UnsentJobs:
    """What is known of them from pass to pass."""

    def __init__(self, database: DatabaseThread, resend_after: float) -> None:
        self._database = database
        self._resend_after = resend_after
        #: What could not be published the last time comes after the rest, so as to hide none.
        self._failing: set[Lease] = set()
        #: What was published and is on its way to the database: not again meanwhile.
        self._notes: dict[Lease, Errand[None]] = {}
        self._named = 0

    def publish(self, part: Part) -> None:
        """Page through all that are due."""
        self._named = 0
        seen: set[tuple[Lease, JobState]] = set()
        try:
            while not part.over and (page := self._next(part, seen)):
                self._publish_page(page, part)
        finally:
            self._failing &= {lease for lease, _ in seen}
            if self._named > NAMED:
                logger.warning("celery-awa: %d more tasks failed", self._named - NAMED)

    def _next(self, part: Part, seen: set[tuple[Lease, JobState]]) -> list[UnsentJob]:
        """The next page, without what this pass has had before: that is due again and again."""
        due = part.ask(lambda store: store.unsent(resend_after=self._resend_after, limit=PAGE))
        self._notes = {lease: note for lease, note in self._notes.items() if not note.done}
        page = [
            job
            for job in due
            if (job.lease, job.state) not in seen and job.lease not in self._notes
        ]
        seen.update((job.lease, job.state) for job in page)
        return sorted(page, key=lambda job: job.lease in self._failing)

    def _publish_page(self, page: list[UnsentJob], part: Part) -> None:
        for job in page:
            # Nothing is published that might not be noted: it would be so again.
            if part.over or not self._database.answering:
                return
            self._failing.add(job.lease)
            with part.alone(job):
                self._publish(job, part)
                self._failing.discard(job.lease)

    def _publish(self, job: UnsentJob, part: Part) -> None:
        if job.state.finished:
            self._tell(job, part)
        elif part.gave_up("send"):
            raise Postponed
        elif part.result(job) is JobState.COMPLETED:
            # Other results are of earlier attempts: this job is to run again all the same.
            part.counts["settled"] += part.settle(job, JobState.COMPLETED)
        else:
            self._send(job, part)

    def _send(self, job: UnsentJob, part: Part) -> None:
        try:
            _check(job)
            with part.calling("send"):
                part.courier.send(job)
        except Unsendable as exc:
            # Left to be told, which this same pass does.
            error = error_text(f"its message cannot be sent again: {exc}")
            part.counts["failed"] += part.settle(job, JobState.FAILED, error)
        except Postponed:
            raise
        except Exception as exc:
            part.trouble.warn(
                "publish",
                "celery-awa: the message of task %s cannot be sent now: %s",
                job.task_id,
                error_text(exc),
            )
            raise Postponed from exc
        else:
            self._note(job.lease, lambda store: store.sent(job.lease, job.resends))
            part.counts["sent"] += 1

    def _tell(self, job: UnsentJob, part: Part) -> None:
        try:
            with part.calling("tell"):
                part.courier.tell(job)
        except Postponed:
            raise
        except Exception as exc:
            part.trouble.warn(
                "tell",
                "celery-awa: the result backend cannot be told of task %s now: %s",
                job.task_id,
                error_text(exc),
            )
            raise Postponed from exc
        self._note(job.lease, lambda store: store.told(job.lease, job.resends))
        part.counts["told"] += 1
        if job.state is JobState.FAILED:
            self._name(job)

    def _note(self, lease: Lease, note: Callable[[Store], None]) -> None:
        """Have the database know, until it has confirmed."""
        self._notes[lease] = self._database.post(note)

    def _name(self, job: UnsentJob) -> None:
        self._named += 1
        if self._named <= NAMED:
            logger.warning(
                "celery-awa: task %s[%s] failed: %s", job.kind, job.task_id, job.error or "unknown"
            )


def _check(job: UnsentJob) -> None:
    if job.envelope is None:
        raise Unsendable("it was not kept")
    if not job.envelope.whole:
        raise Unsendable("it was kept without its arguments")
