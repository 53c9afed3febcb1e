"""What the rest of celery-awa may ask of a storage, whichever it is.

Every method is one short statement in autocommit, guarded by the lease or by the attempt's
token, and safe to repeat. All of them raise :class:`~celery_awa.errors.StoreUnavailable` when
the database cannot answer, :class:`~celery_awa.errors.RowLocked` when a row stayed locked for
500 ms and :class:`~celery_awa.errors.StoreRefused` when the database refused the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..model import (
    Beat,
    Callback,
    Cancel,
    Claim,
    Ended,
    Job,
    JobState,
    Lease,
    LostJob,
    NewAttempt,
    Pulse,
    Rescue,
    Resend,
    Thresholds,
    Transition,
    UnsentJob,
)


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

    def sent(self, lease: Lease, resends: int = 0) -> None:
        """Note that the message which this lease's job waits for was published.

        ``resends`` is what ``unsent`` said of it; 0 for the message of an attempt itself.
        """
        ...

    def expect_callback(self, lease: Lease, token: str, callback_id: str, name: str) -> bool:
        """Note what the callback that this attempt will wait for is known by; False if it is gone.

        ``callback_id`` is the job's id, a hyphen and a secret. An earlier one counts no more, nor
        does an earlier answer of that name. Not to be repeated once it was handed out.
        """
        ...

    # Rescue and sending.

    def lost(self, thresholds: Thresholds, *, after_id: int = 0, limit: int = 100) -> list[LostJob]:
        """Jobs that are stale, stalled, past their deadline or their callback's time, by id.

        A look only.
        """
        ...

    def rescue(self, leases: Sequence[Lease], thresholds: Thresholds) -> dict[Lease, Rescue]:
        """Take these jobs if they are lost still, and requeue or fail them by their policy.

        What is locked, has a newer lease, or is lost no longer, is left alone and not in the
        answer. What was requeued, failed or cancelled is unsent.
        """
        ...

    def forsake(self, leases: Sequence[Lease]) -> None:
        """Note that the attempts with these leases are dead: they are stale at once."""
        ...

    def unsent(self, *, resend_after: float, limit: int = 100) -> list[UnsentJob]:
        """Jobs of which something is due to be published; each is due again 10 s later.

        Due is also a message that was published and has not come: which is not claimed
        ``resend_after`` seconds after it was sent and after it was to run.
        """
        ...

    def settle(self, lease: Lease, to: JobState, error: str | None = None) -> bool:
        """End a job that nobody is to run any more. False if it went on meanwhile.

        With an error of ours (its message cannot be sent, say) the end is left to be told; a job
        that runs is then let alone. Without one the result backend said so, and the attempt's
        own end, should it still come, adds its last snapshot and its error.
        """
        ...

    def told(self, lease: Lease, resends: int = 0) -> None:
        """Note that the result backend knows of this job's end; ``resends`` as for :meth:`sent`."""
        ...

    # For whoever answers callbacks. Repeated, an answer that was done is refused.

    def complete_callback(self, callback_id: str, payload: str) -> Callback:
        """Answer a callback with its payload (JSON text): the job that waits for it goes on."""
        ...

    def fail_callback(self, callback_id: str, error: str) -> Callback:
        """Answer a callback with an error: the job that waits for it has failed."""
        ...

    # For operators.

    def request_cancel(self, task_id: str) -> Cancel:
        """Cancel a job that waits, ask one that runs to stop."""
        ...

    def resend(self, task_id: str, *, keep_progress: bool) -> Resend:
        """Have the message of a job that has ended sent again, as its next attempt.

        Without ``keep_progress`` it begins from nothing, and a job that waits is taken too.
        """
        ...

    def edit_checkpoint(self, task_id: str, metadata: str | None) -> bool | None:
        """Replace ``metadata`` (a JSON object) of a job that is to run again; None takes it away.

        What was committed in the task's own transactions goes too.
        False if it runs or was completed, None if it has no row.
        """
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
