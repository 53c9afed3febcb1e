"""The frozen values that the parts hand to one another. No I/O in here."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Any


class JobState(str, Enum):
    """The states of a job; see docs/lifecycle.md for the moves between them."""

    SCHEDULED = "scheduled"
    AVAILABLE = "available"
    RUNNING = "running"
    COMPLETED = "completed"
    RETRYABLE = "retryable"
    FAILED = "failed"
    CANCELLED = "cancelled"
    WAITING_EXTERNAL = "waiting_external"

    __str__ = str.__str__

    @property
    def finished(self) -> bool:
        """Whether a run that reached this state is over."""
        return self in _FINISHED

    @property
    def celery_state(self) -> str:
        """The word that Celery uses for this state."""
        return _CELERY_WORDS[self]


_FINISHED = frozenset({JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED})
_CELERY_WORDS = {
    JobState.SCHEDULED: "PENDING",
    JobState.AVAILABLE: "PENDING",
    JobState.RUNNING: "STARTED",
    JobState.COMPLETED: "SUCCESS",
    JobState.RETRYABLE: "RETRY",
    JobState.FAILED: "FAILURE",
    JobState.CANCELLED: "REVOKED",
    JobState.WAITING_EXTERNAL: "STARTED",
}


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to write one job: its id and the count of its claims."""

    job_id: int
    run_lease: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A progress object at one point.

    ``generation`` counts the changes of one attempt, from 1; ``json`` is the object as JSON
    text, None where nothing was ever reported.
    """

    generation: int
    json: str | None


@dataclass(frozen=True, slots=True)
class NewAttempt:
    """What a message says of its task: all that a claim needs to know of an attempt.

    ``run_token`` names the run; ``run_named`` tells whether the message named it itself (the
    header ``awa_run``) or a name was made up from the delivery. ``from_lease`` is the lease
    that the message continues (the header ``awa_from``).
    """

    token: str
    task_id: str
    kind: str
    queue: str | None
    worker: str | None
    run_token: str
    run_named: bool
    from_lease: int | None = None
    retries: int = 0
    redelivered: bool = False
    max_attempts: int | None = None
    args_repr: str = ""
    kwargs_repr: str = ""
    envelope: bytes | None = None
    root_id: str | None = None
    parent_id: str | None = None
    group_id: str | None = None
    group_index: int | None = None
    #: When the attempt began, in this process's ``time.monotonic()``; None: it begins now.
    began_at: float | None = None
    #: True for a message that ends without having been executed (revoked, expired).
    unstarted: bool = False


class Verdict(str, Enum):
    """What a claim was told."""

    YOURS = "yours"
    HELD = "held"
    FINISHED = "finished"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Claim:
    """The answer to a claim. Only YOURS carries a lease, an attempt number and progress."""

    verdict: Verdict
    lease: Lease | None = None
    attempt: int = 0
    progress: dict[str, Any] | None = None
    run_token: str = ""


@dataclass(frozen=True, slots=True)
class Beat:
    """One attempt's part of a heartbeat. Without a snapshot it is proof of life alone."""

    lease: Lease
    snapshot: Snapshot | None = None


@dataclass(frozen=True, slots=True)
class Pulse:
    """What the database said to one beat: the row is still this lease's."""

    generation: int
    cancel_requested: bool = False


@dataclass(frozen=True, slots=True)
class Transition:
    """An end of an attempt: the state its job takes and what is stored with it.

    ``to`` is None where the row goes away (a replaced task). ``run_in`` is seconds from now,
    by the database's clock. ``unsent`` asks for a message that is not known to be published.
    ``uncounted`` takes back the 1 that the claim added to the attempt number.
    ``retries`` is not moved: a row keeps the retries of the attempt that claimed it last, so
    that the message of a retry is always newer than its row.
    """

    to: JobState | None
    snapshot: Snapshot | None = None
    error: str | None = None
    run_in: float | None = None
    unsent: bool = False
    uncounted: bool = False
    envelope: bytes | None = field(default=None, repr=False)


class Answer(str, Enum):
    """What a transition was told.

    REPEATED: done before, by this very attempt. GONE: another has the job, or it has ended.
    MISSING: there is no such row.
    """

    DONE = "done"
    REPEATED = "repeated"
    GONE = "gone"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Ended:
    """The answer to a transition, with the lease it used where there was one."""

    answer: Answer
    lease: Lease | None = None
    run_token: str = ""


@dataclass(frozen=True, slots=True)
class JobError:
    """One recorded failure of a job."""

    attempt: int
    at: datetime
    error: str


@dataclass(frozen=True, slots=True)
class Job:
    """A job as one read saw it. Times are aware, in the database's clock."""

    id: int
    task_id: str
    kind: str
    queue: str | None
    state: JobState
    attempt: int
    max_attempts: int | None
    retries: int
    rescues: int
    run_lease: int
    worker: str | None
    args_repr: str
    kwargs_repr: str
    progress: dict[str, Any] | None
    progress_at: datetime | None
    heartbeat_at: datetime | None
    run_at: datetime | None
    created_at: datetime
    attempted_at: datetime | None
    finalized_at: datetime | None
    errors: tuple[JobError, ...]
    root_id: str | None
    parent_id: str | None
    group_id: str | None
    group_index: int | None

    @property
    def percent(self) -> int | None:
        """How far the work is, 0 to 100; None where unknown."""
        percent: int | None = self._part("percent")
        return percent

    @property
    def message(self) -> str | None:
        """What the task says it does."""
        message: str | None = self._part("message")
        return message

    @property
    def metadata(self) -> dict[str, Any]:
        """The checkpoint that the next attempt would find."""
        metadata = self._part("metadata")
        return metadata if isinstance(metadata, dict) else {}

    def _part(self, name: str) -> Any:
        # What an operator put there by hand may be no object.
        return self.progress.get(name) if isinstance(self.progress, dict) else None
