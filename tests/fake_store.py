"""A store in memory with the faults of a real one: it fails, hangs, locks, refuses, loses answers.

It knows of runs only what attempts need here: a row is taken over by every claim but a late one.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from celery_awa.errors import RowLocked, StoreRefused, StoreUnavailable
from celery_awa.model import (
    Answer,
    Beat,
    Claim,
    Ended,
    Job,
    JobState,
    Lease,
    NewAttempt,
    Pulse,
    Snapshot,
    Transition,
    Verdict,
)

T = TypeVar("T")
SOON = 5.0


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
    unsent: bool = False
    errors: list[str] = field(default_factory=list)

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
        answer = work()
        if name in self.unanswered:
            self.unanswered.remove(name)
            store.dead = True
            raise StoreUnavailable("the connection was cut")
        self._notify()
        return answer

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

    def sent(self, lease: Lease) -> None:
        def clear() -> None:
            row = self._database.by_id(lease.job_id)
            if row is not None and row.lease == lease:
                row.unsent = False

        self._do("sent", clear)

    def get_job(self, task_id: str) -> Job | None:
        raise NotImplementedError

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
        self._check(attempt.task_id)
        row = rows.get(attempt.task_id)
        if row is None:
            row = rows[attempt.task_id] = Row(
                id=len(rows) + 1,
                task_id=attempt.task_id,
                token=attempt.token,
                run_token=attempt.run_token,
                retries=attempt.retries,
                attempt=attempt.retries + 1,
                began_at=_began(attempt),
            )
        elif row.token == attempt.token:
            if row.state is not JobState.RUNNING:
                return Claim(Verdict.ENDED)
        elif row.began_at > (math.inf if attempt.began_at is None else attempt.began_at):
            return Claim(Verdict.HELD)
        elif row.state.finished:
            return Claim(Verdict.FINISHED)
        else:
            row.run_lease += 1
            row.attempt = max(row.attempt, attempt.retries) + 1
            row.token, row.retries = attempt.token, attempt.retries
            row.began_at = _began(attempt)
            row.state, row.generation, row.unsent = JobState.RUNNING, 0, False
        return Claim(Verdict.YOURS, row.lease, row.attempt, row.progress, row.run_token)

    def _beat(self, beats: Sequence[Beat], skip_locked: bool) -> dict[Lease, Pulse]:
        pulses = {}
        found = [(beat, self._database.by_lease(beat.lease)) for beat in beats]
        for beat, row in found:
            if row is not None and not (skip_locked and row.task_id in self._database.locked):
                self._check(row.task_id, beat.snapshot)
        for beat, row in found:
            if row is None or (skip_locked and row.task_id in self._database.locked):
                continue
            row.beats += 1
            row.write(beat.snapshot)
            pulses[beat.lease] = Pulse(row.generation)
        return pulses

    def _end(self, lease: Lease, token: str, transition: Transition) -> Answer:
        row = self._database.by_id(lease.job_id)
        if row is None:
            return Answer.REPEATED if transition.to is None else Answer.MISSING
        self._check(row.task_id, transition.snapshot, transition.error)
        if row.lease != lease or row.state is not JobState.RUNNING:
            mine = row.lease == lease and row.token == token and row.state is transition.to
            return Answer.REPEATED if mine else Answer.GONE
        if transition.to is None:
            del self._database.rows[row.task_id]
            return Answer.DONE
        row.state, row.unsent = transition.to, transition.unsent
        row.attempt -= transition.uncounted
        row.write(transition.snapshot)
        row.errors += [transition.error] if transition.error else []
        if transition.to is JobState.COMPLETED:
            row.progress = None
        return Answer.DONE

    def _end_unclaimed(self, attempt: NewAttempt, transition: Transition) -> Ended:
        self._check(attempt.task_id, transition.snapshot, transition.error)
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

    def _check(
        self, task_id: str, snapshot: Snapshot | None = None, error: str | None = None
    ) -> None:
        database = self._database
        if task_id in database.locked:
            raise RowLocked(f"the row of {task_id} is locked")
        if (
            task_id in database.refused
            or (snapshot is not None and task_id in database.refused_progress)
            or (error is not None and task_id in database.refused_errors)
        ):
            raise StoreRefused(f"refused: {task_id}")


def _began(attempt: NewAttempt) -> float:
    return -math.inf if attempt.began_at is None else attempt.began_at
