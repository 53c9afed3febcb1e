"""A store in memory with the faults of a real one: it fails, hangs, locks, refuses, loses answers.

It knows of runs only what attempts need here: a claim is always of the row's run. Its clock stands
still until the test moves it.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any, TypeVar

from celery_awa.errors import RowLocked, StoreRefused, StoreUnavailable
from celery_awa.model import (
    Answer,
    Beat,
    Callback,
    Cancel,
    Claim,
    Ended,
    Envelope,
    Job,
    JobState,
    Lease,
    LostJob,
    NewAttempt,
    Pulse,
    Rescue,
    Resend,
    Snapshot,
    Thresholds,
    Transition,
    UnsentJob,
    Verdict,
)
from tests import fake_rescue

T = TypeVar("T")
SOON = 5.0
_EPOCH = datetime(2020, 1, 1, tzinfo=timezone.utc)
_WAITING = (JobState.SCHEDULED, JobState.RETRYABLE, JobState.AVAILABLE)


@dataclass
class Row:
    """One job."""

    id: int
    task_id: str
    token: str
    run_token: str
    retries: int
    attempt: int
    run_lease: int = 1
    #: When the attempt that has it began; long ago unless it was said.
    began_at: float = -math.inf
    state: JobState = JobState.RUNNING
    progress: Any = None
    generation: int = 0
    beats: int = 0
    errors: list[str] = field(default_factory=list)
    kind: str = "kind"
    envelope: Envelope | None = None
    lost_policy: str = "fail"
    max_rescues: int = 3
    rescues: int = 0
    rescues_in_place: int = 0
    rescue_mark: str | None = None
    cancel_requested: bool = False
    # Seconds of the database's clock.
    attempted_at: float = 0.0
    heartbeat_at: float | None = 0.0
    duplicate_at: float | None = None
    deadline_at: float | None = None
    run_at: float | None = None
    send_after: float | None = None
    sent_at: float | None = None
    # Set by the test, as if the task had written it in a transaction of its own.
    committed: dict[str, Any] | None = None
    callback_id: str | None = None
    callback_name: str | None = None
    callback_timeout_at: float | None = None
    callbacks: dict[str, Any] = field(default_factory=dict)

    @property
    def unsent(self) -> bool:
        return self.send_after is not None

    @property
    def whole(self) -> bool:
        return self.envelope is not None and self.envelope.whole

    @property
    def waits(self) -> bool:
        """Whether it waits for its message."""
        return self.state in _WAITING

    @property
    def lease(self) -> Lease:
        return Lease(self.id, self.run_lease)

    def write(self, snapshot: Snapshot | None) -> None:
        if snapshot is not None and snapshot.generation > self.generation:
            self.generation = snapshot.generation
            self.progress = self.progress if snapshot.json is None else json.loads(snapshot.json)


class FakeDatabase:
    """The rows, what was asked of them, and what is wrong with them."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}
        #: Seconds of its clock.
        self.now = 0.0
        #: Names of the statements that reached the database, in their order.
        self.statements: list[str] = []
        #: How often a connection was asked for, and those that were opened.
        self.tries = 0
        self.stores: list[FakeStore] = []
        #: Task ids whose rows somebody else has locked.
        self.locked: set[str] = set()
        #: Task ids of which nothing is taken, of which no progress is, of which no error text is.
        self.refused: set[str] = set()
        self.refused_progress: set[str] = set()
        self.refused_errors: set[str] = set()
        #: Statements that are carried out, and whose answer is lost with the connection.
        self.unanswered: list[str] = []
        #: What each statement of that name raises.
        self.raising: dict[str, BaseException] = {}
        self._away: str | None = None
        self._flowing = threading.Event()
        self._flowing.set()
        self._changed = threading.Condition()

    # The test's side.

    @property
    def opened(self) -> int:
        return len(self.stores)

    @property
    def closed(self) -> int:
        return sum(store.closed for store in self.stores)

    def pass_by(self, seconds: float) -> None:
        self.now += seconds

    def go_away(self, reason: str = "it is away") -> None:
        """Refuse new connections and end the open ones, until :meth:`come_back`."""
        self._away = reason
        self.end_connections()

    def come_back(self) -> None:
        self._away = None

    def end_connections(self) -> None:
        """As an idle timeout of the server does: whoever uses one learns it then."""
        for store in self.stores:
            store.dead = True

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """Nothing is answered within."""
        self._flowing.clear()
        try:
            yield
        finally:
            self._flowing.set()

    def until(self, probe: Callable[[], T], what: str = "") -> T:
        """Wait until the probe's answer is true: looked at whenever a statement begins or ends."""
        with self._changed:
            if not self._changed.wait_for(probe, SOON):
                raise AssertionError(f"not within {SOON:g} s: {what}; {self.statements}")
            return probe()

    def count(self, *names: str) -> int:
        """How many statements of these names reached the database."""
        return sum(name in names for name in self.statements)

    def by_lease(self, lease: Lease) -> Row | None:
        """The running row of that lease."""
        found = self.by_id(lease.job_id)
        running = found is not None and found.state is JobState.RUNNING
        return found if running and found and found.lease == lease else None

    def by_id(self, job_id: int) -> Row | None:
        return next((row for row in self.rows.values() if row.id == job_id), None)

    def at(self, seconds: float) -> datetime:
        """That point of its clock as a time."""
        return _EPOCH + timedelta(seconds=seconds)

    # The connections' side.

    def open(self) -> FakeStore:
        self.tries += 1
        self._pass("open")
        if self._away is not None:
            raise StoreUnavailable(self._away)
        store = FakeStore(self)
        self.stores.append(store)
        return store

    def carry_out(self, store: FakeStore, name: str, work: Callable[[], T]) -> T:
        self._pass(name)
        if store.dead or store.closed:
            raise StoreUnavailable("the connection is closed")
        error = self.raising.get(name)
        if error is not None:
            raise error
        with self._changed:
            answer = work()
        if name in self.unanswered:
            self.unanswered.remove(name)
            store.dead = True
            raise StoreUnavailable("the connection was cut")
        self._notify()
        return answer

    def check(
        self, task_id: str, snapshot: Snapshot | None = None, error: str | None = None
    ) -> None:
        """Raise what a statement would that writes this to the row."""
        if task_id in self.locked:
            raise RowLocked(f"the row of {task_id} is locked")
        if (
            task_id in self.refused
            or (snapshot is not None and task_id in self.refused_progress)
            or (error is not None and task_id in self.refused_errors)
        ):
            raise StoreRefused(f"refused: {task_id}")

    def _pass(self, name: str) -> None:
        if name != "open":
            self.statements.append(name)
        self._notify()
        assert self._flowing.wait(60), "the test left the database hanging"

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()


class FakeStore:
    """One connection."""

    def __init__(self, database: FakeDatabase) -> None:
        self._database = database
        self.dead = False
        self.closed = False
        self.abandoned = False

    def claim(self, attempt: NewAttempt) -> Claim:
        return self._do("claim", lambda: self._claim(attempt))

    def knows(self, task_id: str) -> bool:
        return self._do("knows", lambda: task_id in self._database.rows)

    def owns(self, lease: Lease) -> bool:
        def work() -> bool:
            missing = all(row.id != lease.job_id for row in self._database.rows.values())
            return missing or self._database.by_lease(lease) is not None

        return self._do("owns", work)

    def heartbeat(
        self, leases: Sequence[Lease], *, skip_locked: bool = False
    ) -> dict[Lease, Pulse]:
        beats = [Beat(lease) for lease in leases]
        return self._do("heartbeat", lambda: self._beat(beats, skip_locked))

    def heartbeat_with_progress(
        self, beats: Sequence[Beat], *, skip_locked: bool = False
    ) -> dict[Lease, Pulse]:
        return self._do("heartbeat_with_progress", lambda: self._beat(beats, skip_locked))

    def held(self, leases: Sequence[Lease]) -> frozenset[Lease]:
        by_lease = self._database.by_lease
        return self._do("held", lambda: frozenset(one for one in leases if by_lease(one)))

    def end(self, lease: Lease, token: str, transition: Transition) -> Ended:
        return self._do("end", lambda: Ended(self._end(lease, token, transition), lease))

    def end_unclaimed(self, attempt: NewAttempt, transition: Transition) -> Ended:
        return self._do("end_unclaimed", lambda: self._end_unclaimed(attempt, transition))

    def record_completed(self, attempts: Sequence[NewAttempt]) -> None:
        self._do("record_completed", lambda: self._record(attempts))

    def sent(self, lease: Lease, resends: int = 0) -> None:
        self._do("sent", lambda: fake_rescue.published(self._database, lease, finished=False))

    def told(self, lease: Lease, resends: int = 0) -> None:
        self._do("told", lambda: fake_rescue.published(self._database, lease, finished=True))

    def expect_callback(self, lease: Lease, token: str, callback_id: str, name: str) -> bool:
        return self._do("expect_callback", lambda: self._expect(lease, token, callback_id, name))

    def complete_callback(self, callback_id: str, payload: str) -> Callback:
        answer = {"payload": json.loads(payload)}
        return self._do("complete_callback", lambda: self._answer(callback_id, answer))

    def fail_callback(self, callback_id: str, error: str) -> Callback:
        return self._do("fail_callback", lambda: self._answer(callback_id, {"error": error}))

    def lost(self, thresholds: Thresholds, *, after_id: int = 0, limit: int = 100) -> list[LostJob]:
        return self._do(
            "lost", lambda: fake_rescue.lost(self._database, thresholds, after_id, limit)
        )

    def rescue(self, leases: Sequence[Lease], thresholds: Thresholds) -> dict[Lease, Rescue]:
        return self._do("rescue", lambda: fake_rescue.rescue(self._database, leases, thresholds))

    def forsake(self, leases: Sequence[Lease]) -> None:
        self._do("forsake", lambda: fake_rescue.forsake(self._database, leases))

    def unsent(self, *, resend_after: float, limit: int = 100) -> list[UnsentJob]:
        return self._do("unsent", lambda: fake_rescue.unsent(self._database, resend_after, limit))

    def settle(self, lease: Lease, to: JobState, error: str | None = None) -> bool:
        return self._do("settle", lambda: fake_rescue.settle(self._database, lease, to, error))

    def request_cancel(self, task_id: str) -> Cancel:
        return self._do(
            "request_cancel", lambda: fake_rescue.request_cancel(self._database, task_id)
        )

    def resend(self, task_id: str, *, keep_progress: bool) -> Resend:
        return self._do(
            "resend", lambda: fake_rescue.resend(self._database, task_id, keep_progress)
        )

    def edit_checkpoint(self, task_id: str, metadata: str | None) -> bool | None:
        return self._do(
            "edit_checkpoint",
            lambda: fake_rescue.edit_checkpoint(self._database, task_id, metadata),
        )

    def get_job(self, task_id: str) -> Job | None:
        def look() -> Job | None:
            row = self._database.rows.get(task_id)
            return None if row is None else fake_rescue.job(self._database, row)

        return self._do("get_job", look)

    def list_jobs(
        self,
        *,
        state: JobState | None = None,
        kind: str | None = None,
        limit: int = 100,
        before_id: int | None = None,
    ) -> list[Job]:
        raise NotImplementedError

    def close(self) -> None:
        self.closed = True
        self._database._notify()

    def abandon(self) -> None:
        self.abandoned = True

    def _do(self, name: str, work: Callable[[], T]) -> T:
        return self._database.carry_out(self, name, work)

    def _claim(self, attempt: NewAttempt) -> Claim:
        rows = self._database.rows
        self._database.check(attempt.task_id)
        row = rows.get(attempt.task_id)
        if row is None:
            row = rows[attempt.task_id] = Row(
                id=len(rows) + 1,
                task_id=attempt.task_id,
                token=attempt.token,
                run_token=attempt.run_token,
                retries=attempt.retries,
                attempt=attempt.retries + 1,
            )
            self._begin(row, attempt)
        elif row.token == attempt.token:
            if row.state is not JobState.RUNNING:
                return Claim(Verdict.ENDED)
        elif row.began_at > (math.inf if attempt.began_at is None else attempt.began_at):
            return Claim(Verdict.HELD)
        elif row.state.finished:
            return Claim(Verdict.FINISHED)
        elif row.state is JobState.RUNNING and _is_copy(row, attempt):
            row.duplicate_at = self._database.now
            return Claim(Verdict.HELD)
        else:
            row.run_lease += 1
            row.attempt = max(row.attempt, attempt.retries) + 1
            row.token, row.retries = attempt.token, attempt.retries
            row.state, row.generation = JobState.RUNNING, 0
            self._begin(row, attempt)
        return Claim(
            Verdict.YOURS,
            row.lease,
            row.attempt,
            row.progress,
            row.run_token,
            row.committed,
            dict(row.callbacks),
        )

    def _begin(self, row: Row, attempt: NewAttempt) -> None:
        now = self._database.now
        row.began_at = _began(attempt)
        row.kind, row.envelope = attempt.kind, attempt.envelope
        row.lost_policy, row.max_rescues = attempt.lost_policy, attempt.max_rescues
        row.attempted_at = row.heartbeat_at = now
        row.deadline_at = None if attempt.deadline is None else now + attempt.deadline
        row.duplicate_at = row.run_at = row.send_after = row.sent_at = None
        row.callback_id = row.callback_name = row.callback_timeout_at = None

    def _beat(self, beats: Sequence[Beat], skip_locked: bool) -> dict[Lease, Pulse]:
        pulses = {}
        found = [(beat, self._database.by_lease(beat.lease)) for beat in beats]
        for beat, row in found:
            if row is not None and not (skip_locked and row.task_id in self._database.locked):
                self._database.check(row.task_id, beat.snapshot)
        for beat, row in found:
            if row is None or (skip_locked and row.task_id in self._database.locked):
                continue
            row.beats += 1
            row.heartbeat_at, row.duplicate_at = self._database.now, None
            row.write(beat.snapshot)
            pulses[beat.lease] = Pulse(row.generation, row.cancel_requested)
        return pulses

    def _end(self, lease: Lease, token: str, transition: Transition) -> Answer:
        row = self._database.by_id(lease.job_id)
        if row is None:
            return Answer.REPEATED if transition.to is None else Answer.MISSING
        self._database.check(row.task_id, transition.snapshot, transition.error)
        if row.lease != lease or row.state is not JobState.RUNNING:
            mine = row.lease == lease and row.token == token
            # A job that was to wait for a callback may have gone on since by its answer.
            waited = row.callback_name is not None and transition.to is JobState.WAITING_EXTERNAL
            same = waited or row.state is transition.to
            return Answer.REPEATED if mine and same else Answer.GONE
        if transition.to is None:
            del self._database.rows[row.task_id]
            return Answer.DONE
        self._leave(row, transition)
        row.attempt -= transition.uncounted
        row.write(transition.snapshot)
        row.errors += [transition.error] if transition.error else []
        if transition.to is JobState.COMPLETED:
            row.progress = row.envelope = row.committed = None
            row.callbacks = {}
        return Answer.DONE

    def _leave(self, row: Row, transition: Transition) -> None:
        """Into the state that it ends in, and unsent if it needs a message."""
        now, to = self._database.now, transition.to or row.state
        duplicate, row.duplicate_at = row.duplicate_at, None
        row.envelope = transition.envelope or row.envelope
        row.state = to
        row.send_after = now + fake_rescue.AGAIN if transition.unsent else None
        row.run_at = None if transition.run_in is None else now + transition.run_in
        if row.cancel_requested and (row.waits or to is JobState.WAITING_EXTERNAL):
            row.state, row.send_after = JobState.CANCELLED, now
        elif row.waits and duplicate is not None:
            row.send_after = now  # its copy was dropped
        row.sent_at = now if row.waits and not row.unsent else None
        if row.state is JobState.WAITING_EXTERNAL:
            self._park(row, transition)
        else:
            row.callback_id = row.callback_name = None

    def _park(self, row: Row, transition: Transition) -> None:
        """Wait for the callback, unless it was answered meanwhile."""
        now = self._database.now
        row.send_after = None
        if transition.callback_id == row.callback_id:
            timeout = transition.callback_timeout
            row.callback_timeout_at = None if timeout is None else now + timeout
            return
        answer = row.callbacks.get(row.callback_name or "", {})
        row.errors += [f"CallbackFailed: {answer['error']}"] if "error" in answer else []
        row.state = JobState.FAILED if "error" in answer else JobState.AVAILABLE
        row.callback_id, row.send_after = None, now

    def _expect(self, lease: Lease, token: str, callback_id: str, name: str) -> bool:
        row = self._database.by_lease(lease)
        if row is None or row.token != token:
            return False
        self._database.check(row.task_id)
        row.callback_id, row.callback_name = callback_id, name
        row.callbacks.pop(name, None)
        return True

    def _answer(self, callback_id: str, answer: dict[str, Any]) -> Callback:
        found = (row for row in self._database.rows.values() if _is_of(callback_id, row))
        row = next(found, None)
        if row is None:
            return Callback.UNKNOWN
        self._database.check(row.task_id)
        if row.callback_id != callback_id:
            return Callback.REFUSED
        row.callbacks[row.callback_name or ""] = answer
        row.callback_id = row.callback_timeout_at = None
        if row.state is JobState.WAITING_EXTERNAL:
            row.errors += [f"CallbackFailed: {answer['error']}"] if "error" in answer else []
            row.state = JobState.FAILED if "error" in answer else JobState.AVAILABLE
            row.send_after = self._database.now
        return Callback.DONE

    def _end_unclaimed(self, attempt: NewAttempt, transition: Transition) -> Ended:
        self._database.check(attempt.task_id, transition.snapshot, transition.error)
        claim = self._claim(attempt)
        if claim.verdict not in (Verdict.YOURS, Verdict.ENDED):
            return Ended(Answer.GONE)
        row = self._database.rows[attempt.task_id]
        return Ended(self._end(row.lease, attempt.token, transition), row.lease, row.run_token)

    def _record(self, attempts: Sequence[NewAttempt]) -> None:
        if any(attempt.task_id in self._database.refused for attempt in attempts):
            raise StoreRefused("refused")
        for attempt in attempts:
            if attempt.task_id not in self._database.locked:
                self._end_unclaimed(attempt, Transition(JobState.COMPLETED))
        if any(attempt.task_id in self._database.locked for attempt in attempts):
            raise RowLocked("locked")


def _is_of(callback_id: str, row: Row) -> bool:
    return callback_id.startswith(f"{row.id}-")


def _is_copy(row: Row, attempt: NewAttempt) -> bool:
    """Whether a message that meets a live attempt is dropped, since its row can bring it back."""
    if attempt.retries > row.retries or attempt.from_lease == row.run_lease:
        return False
    return attempt.from_lease is not None or (row.lost_policy == "requeue" and row.whole)


def _began(attempt: NewAttempt) -> float:
    return -math.inf if attempt.began_at is None else attempt.began_at
