"""What the rest of celery-awa may ask of a storage, whichever it is.

Every method is one short statement in autocommit, guarded by the lease or by the attempt's
token, and safe to repeat. All of them raise :class:`~celery_awa.errors.StoreUnavailable` when
the database cannot answer, :class:`~celery_awa.errors.RowLocked` when a row stayed locked for
500 ms and :class:`~celery_awa.errors.StoreRefused` when the database refused the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..model import Beat, Claim, Ended, Job, JobState, Lease, NewAttempt, Pulse, Transition


class Store(Protocol):
    """One connection's view of the jobs. Not safe for use from two threads."""

    def claim(self, attempt: NewAttempt) -> Claim:
        """Give the attempt its row and a new lease, or say why not."""
        ...

    def knows(self, task_id: str) -> bool:
        """Whether the task has a row, finished or not."""
        ...

    def owns(self, lease: Lease) -> bool:
        """False if a newer attempt or an end has taken the job. A row that is missing has not."""
        ...

    def heartbeat(
        self, leases: Sequence[Lease], *, skip_locked: bool = False
    ) -> dict[Lease, Pulse]:
        """Proof of life for all the leases in one statement; one that is missing hit no row."""
        ...

    def heartbeat_with_progress(
        self, beats: Sequence[Beat], *, skip_locked: bool = False
    ) -> dict[Lease, Pulse]:
        """Heartbeat and snapshot for all the beats in one statement; see :meth:`heartbeat`."""
        ...

    def held(self, leases: Sequence[Lease]) -> frozenset[Lease]:
        """Those of the leases that still hold their running job, read without a lock."""
        ...

    def end(self, lease: Lease, token: str, transition: Transition) -> Ended:
        """End an attempt whose lease is known."""
        ...

    def end_unclaimed(self, attempt: NewAttempt, transition: Transition) -> Ended:
        """Claim and end in one transaction; also right where a claim's answer never came."""
        ...

    def record_completed(self, attempts: Sequence[NewAttempt]) -> None:
        """Completed rows, in one batch, for attempts that succeeded before they were claimed.

        A locked row keeps no other from being recorded: RowLocked is raised after the last.
        """
        ...

    def sent(self, lease: Lease) -> None:
        """Note that the message which this lease's job waits for was published."""
        ...

    def get_job(self, task_id: str) -> Job | None:
        """The job of a task, or None where it has no row."""
        ...

    def list_jobs(
        self,
        *,
        state: JobState | None = None,
        kind: str | None = None,
        limit: int = 100,
        before_id: int | None = None,
    ) -> list[Job]:
        """Jobs, newest first."""
        ...

    def close(self) -> None:
        """Give the connection back. Never raises."""
        ...

    def abandon(self) -> None:
        """In a forked child: let go of the inherited connection without using its socket."""
        ...
