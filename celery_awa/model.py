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


class StopReason(str, Enum):
    """Why an attempt is asked to stop, gravest first: ``AwaMixin.stop_reason``."""

    #: A newer attempt has the job, or it has ended: nothing that this one does counts any more.
    LEASE_LOST = "lease_lost"
    #: Somebody asked for the job's cancellation.
    CANCEL = "cancel"
    #: The attempt has run for longer than the task's ``deadline``.
    DEADLINE = "deadline"
    #: The worker is shutting down.
    WORKER_STOPPING = "worker_stopping"
    #: The attempt has run for longer than the task's ``max_runtime``.
    MAX_RUNTIME = "max_runtime"

    __str__ = str.__str__


@dataclass(frozen=True, slots=True)
class Envelope:
    """A task's message, kept so that it can be sent again; ``whole``: with its arguments."""

    data: bytes = field(repr=False)
    whole: bool


@dataclass(frozen=True, slots=True)
class NewAttempt:
    """What a message says of its task: all that a claim needs to know of an attempt.

    ``run_token`` names the run; ``run_named`` tells whether the message named it itself (the
    header ``awa_run``) or a name was made up from the delivery. ``from_lease`` is the lease
    that the message continues (the header ``awa_from``). ``lost_policy`` and ``max_rescues`` say
    what becomes of the job if its worker dies; ``deadline`` is the seconds an attempt may run, and
    ``stall_after`` those that it may report nothing: then it is shown as stalled, and under the
    ``stall_policy`` "stop" it loses its job as one whose worker died.
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
    envelope: Envelope | None = None
    root_id: str | None = None
    parent_id: str | None = None
    group_id: str | None = None
    group_index: int | None = None
    lost_policy: str = "fail"
    max_rescues: int = 3
    deadline: float | None = None
    stall_after: float | None = None
    stall_policy: str = "show"
    #: When the attempt began, in this process's ``time.monotonic()``; None: it begins now.
    began_at: float | None = None
    #: True for a message that ends without having been executed (revoked, expired).
    unstarted: bool = False


class Verdict(str, Enum):
    """What a claim was told.

    HELD: a live attempt has the job, and its row can bring the task back should that one die.
    FINISHED: the run is over, or the message is a used copy. ENDED: this very attempt has ended.
    """

    YOURS = "yours"
    HELD = "held"
    FINISHED = "finished"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Claim:
    """The answer to a claim. Only YOURS carries a lease, an attempt number and what was kept.

    ``committed`` is what earlier attempts of the run wrote in their tasks' own transactions.
    ``callbacks`` are the run's answered callbacks: name to ``{"payload": …}`` or ``{"error": …}``.
    """

    verdict: Verdict
    lease: Lease | None = None
    attempt: int = 0
    progress: dict[str, Any] | None = None
    run_token: str = ""
    committed: dict[str, Any] | None = None
    callbacks: dict[str, Any] = field(default_factory=dict)


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
    ``uncounted`` takes back the 1 that the claim added to the attempt number. A job whose
    cancellation was asked for becomes cancelled instead of waiting for a message.
    ``retries`` is not moved: a row keeps the retries of the attempt that claimed it last, so
    that the message of a retry is always newer than its row.
    ``callback_id`` and ``callback_timeout`` (seconds; None: for ever) are for WAITING_EXTERNAL: the
    job waits if the row still expects that callback. If it was answered meanwhile, the job is
    available at once, or failed.
    """

    to: JobState | None
    snapshot: Snapshot | None = None
    error: str | None = None
    run_in: float | None = None
    unsent: bool = False
    uncounted: bool = False
    envelope: Envelope | None = None
    callback_id: str | None = None
    callback_timeout: float | None = None


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
class Thresholds:
    """After how many seconds without a heartbeat a running attempt is stale.

    ``duplicate_after`` counts instead where a copy of its message came (``duplicate_at``). With
    ``stale_after`` above 1e8 no silence counts, and no attempt is taken for stalled either.
    """

    stale_after: float
    duplicate_after: float


@dataclass(frozen=True, slots=True)
class LostJob:
    """A job that is stale, stalled, past its deadline or its callback's time, as a look saw it."""

    lease: Lease
    task_id: str
    kind: str
    #: When the attempt began, by the database's clock.
    attempted_at: datetime


class Rescue(str, Enum):
    """What a rescue made of a job."""

    REQUEUED = "requeued"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class UnsentJob:
    """A job of which something is to be published: its message, or, once finished, its end.

    ``state`` tells which: a failed or cancelled job's end is not known to the result backend yet.
    """

    lease: Lease
    task_id: str
    kind: str
    state: JobState
    run_token: str
    envelope: Envelope | None
    #: When the last attempt began, and when the next may; by the database's clock.
    attempted_at: datetime | None
    run_at: datetime | None
    #: The last error that was recorded.
    error: str | None
    #: How often an operator had it sent again since its last claim.
    resends: int = 0


class Cancel(str, Enum):
    """What a request for cancellation was told.

    REQUESTED: the job runs, its next heartbeat asks it to stop. CANCELLED: it was waiting.
    FINISHED: it had ended. UNKNOWN: it has no row.
    """

    REQUESTED = "requested"
    CANCELLED = "cancelled"
    FINISHED = "finished"
    UNKNOWN = "unknown"

    __str__ = str.__str__


class Resend(str, Enum):
    """What an operator's retry or restart was told.

    LIVE: it runs or waits for its message already. NO_MESSAGE: what sending it again needs was
    not kept.
    """

    DONE = "done"
    LIVE = "live"
    NO_MESSAGE = "no_message"
    UNKNOWN = "unknown"

    __str__ = str.__str__


class Callback(str, Enum):
    """What the answer to a callback was told.

    DONE: the job has it, or goes on with it. REFUSED: the job expects this callback no more: it
    was answered before, or in time out, or its job went on. UNKNOWN: no job can have this token.
    """

    DONE = "done"
    REFUSED = "refused"
    UNKNOWN = "unknown"

    __str__ = str.__str__


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
    #: What becomes of it if its worker dies, "requeue" or "fail"; how often without advance.
    lost_policy: str
    max_rescues: int
    rescues: int
    #: Whether what sending it again needs was kept.
    resendable: bool
    run_lease: int
    worker: str | None
    args_repr: str
    kwargs_repr: str
    progress: dict[str, Any] | None
    progress_at: datetime | None
    #: Of the checkpoint what the task wrote in transactions of its own (``checkpoint_in``).
    committed: dict[str, Any] | None
    heartbeat_at: datetime | None
    #: When a copy of its message was dropped; the attempt's next heartbeat takes it away.
    duplicate_at: datetime | None
    deadline_at: datetime | None
    #: Seconds without a report after which it is stalled; and whether it is: it runs, and has
    #: reported nothing for as long.
    stall_after: float | None
    stalled: bool
    cancel_requested: bool
    run_at: datetime | None
    #: Not None: unsent, and due to be published then.
    send_after: datetime | None
    #: The token of the callback that it expects, a secret; and when it waits for that no longer.
    callback_id: str | None
    callback_timeout_at: datetime | None
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
        """The checkpoint that the next attempt would find: reported, and over that committed."""
        reported, committed = _mapping(self._part("metadata")), _mapping(self.committed)
        if reported and _version(committed) < _version(reported):
            return reported  # older code committed it
        return {**reported, **committed}

    @property
    def rate(self) -> float | None:
        """Items a second, as the task's loop measured them; None where unknown."""
        return _number(self._part("rate"))

    @property
    def time_left(self) -> float | None:
        """Seconds until all items are done at that rate; None where unknown."""
        rate, current, total = self.rate, *map(_number, map(self._part, ("current", "total")))
        if not rate or rate < 0 or current is None or total is None:
            return None
        return max(0.0, (total - current) / rate)

    def _part(self, name: str) -> Any:
        # What an operator put there by hand may be no object.
        return self.progress.get(name) if isinstance(self.progress, dict) else None


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> float | None:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _version(values: dict[str, Any]) -> float:
    """Of the code that wrote a checkpoint; not written down where it is 0."""
    return _number(values.get("awa_version")) or 0
