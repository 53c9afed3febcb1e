"""Threads that claim, retry and start fresh runs of a few tasks all at once, and write down what
each attempt found and left, so that what was lost on the way can be told afterwards. Others may
rescue, cancel and send again what they work on."""

from __future__ import annotations

import random
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg.conninfo import make_conninfo

from celery_awa.model import (
    Answer,
    Beat,
    Claim,
    JobState,
    Lease,
    Resend,
    Snapshot,
    Transition,
    Verdict,
)
from celery_awa.store.canonical import CanonicalStore, open_store
from tests.conftest import SCHEMA

from .jobs import OLD, lost_attempt

Strike = Callable[[CanonicalStore], None]

#: A lease that no row reaches: a message that carries it is never taken for a used copy.
NEVER_USED = 2**40

_BOTH = f"""
SELECT task_id, count(*) FROM (
    SELECT task_id FROM {SCHEMA}.jobs_hot UNION ALL SELECT task_id FROM {SCHEMA}.scheduled_jobs
) AS both_tables WHERE task_id = ANY (%s) GROUP BY task_id
"""


@dataclass
class Taken:
    """One claim that was granted: what it found, and what its attempt may have left."""

    run: str
    attempt: int
    found: dict[str, Any] | None
    left: list[dict[str, Any] | None]


@dataclass
class Hammer:
    """Strikes with ``threads`` threads until a fault is found or the time is over.

    ``disturbed``: :meth:`rescue` and the others run beside, so that attempts lose their jobs and
    claims find finished ones, which are sent again.
    """

    url: str
    tasks: Sequence[str]
    threads: int = 8
    disturbed: bool = False
    #: How often each disturbance changed something.
    disturbances: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    leases: dict[str, Lease] = field(default_factory=dict)
    _taken: dict[tuple[str, int], Taken] = field(default_factory=dict)
    _runs: dict[str, str] = field(default_factory=dict)
    _over: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        # A deadlock must be found before the lock timeout of 500 ms hides it.
        self.url = make_conninfo(self.url, options="-c deadlock_timeout=50ms")

    def strike(self, seconds: float, *beside: Strike) -> list[str]:
        """Returns what went wrong. ``beside`` is called again and again, each in a thread."""
        workers = [self._worker(random.Random(seed)) for seed in range(self.threads)]
        with ExitStack() as stack:
            threads = []
            for strike in (*workers, *beside, self._look):
                store = stack.enter_context(closing(open_store(self.url, SCHEMA)))
                threads.append(threading.Thread(target=self._again_and_again, args=(strike, store)))
            for task_id in self.tasks:
                self._strike_once(store, task_id, random.Random(1))
            for thread in threads:
                thread.start()
            self._over.wait(seconds)
            self._over.set()
            for thread in threads:
                thread.join()
        self._compare()
        return self.faults

    @property
    def claims(self) -> int:
        """How many claims were granted."""
        return len(self._taken)

    def _fault(self, text: str) -> None:
        self.faults.append(text)
        self._over.set()

    def _worker(self, chance: random.Random) -> Strike:
        return lambda store: self._strike_once(store, chance.choice(self.tasks), chance)

    def _again_and_again(self, strike: Strike, store: CanonicalStore) -> None:
        while not self._over.is_set():
            try:
                strike(store)
            except Exception as exc:
                # A row that stays locked for long is no fault; a deadlock is.
                if not isinstance(exc.__cause__, psycopg.errors.LockNotAvailable):
                    self._fault(f"{type(exc).__name__}: {exc.__cause__ or exc}")

    def _look(self, store: CanonicalStore) -> None:
        """In one snapshot: each task has exactly one row, in whichever table."""
        found = dict(store._connection.execute(_BOTH, (list(self.tasks),)).fetchall())
        if found != dict.fromkeys(self.tasks, 1):
            self._fault(f"rows of each task: {found}")
        self._over.wait(0.001)

    def _strike_once(self, store: CanonicalStore, task_id: str, chance: random.Random) -> None:
        token = uuid.uuid4().hex
        if task_id not in self._runs or chance.random() < 0.1:
            self._runs[task_id] = token
        claim = store.claim(
            lost_attempt(token, task_id, run_token=self._runs[task_id], from_lease=NEVER_USED)
        )
        if claim.verdict is Verdict.FINISHED and self.disturbed:
            again = store.resend(task_id, keep_progress=True)
            self.disturbances["resend"] += again is Resend.DONE
            return
        if claim.lease is None:
            self._fault(f"claim of {task_id} was told {claim.verdict}")
            return
        taken = self._note(task_id, claim, claim.lease)
        self._live(store, task_id, token, claim.lease, taken, chance)

    def _note(self, task_id: str, claim: Claim, lease: Lease) -> Taken:
        taken = Taken(claim.run_token, claim.attempt, claim.progress, [claim.progress])
        if (task_id, lease.run_lease) in self._taken:
            self._fault(f"lease {lease.run_lease} of {task_id} was given twice")
        self._taken[task_id, lease.run_lease] = taken
        self.leases[task_id] = lease
        return taken

    def _live(
        self,
        store: CanonicalStore,
        task_id: str,
        token: str,
        lease: Lease,
        taken: Taken,
        chance: random.Random,
    ) -> None:
        """Report, and be retried; now and then die instead, which leaves a running row."""
        generations = chance.randint(0, 2)
        for generation in range(1, generations + 1):
            value = {"percent": generation, "metadata": {"from": token}}
            if store.heartbeat_with_progress([Beat(lease, _snapshot(generation, value))]):
                taken.left = [value]
        if chance.random() < 0.2:
            return
        state = chance.choice([JobState.RETRYABLE, JobState.SCHEDULED, JobState.AVAILABLE])
        value = {"percent": 99, "metadata": {"from": token, "to": state.value}}
        transition = Transition(state, _snapshot(generations + 1, value), unsent=True)
        answer = store.end(lease, token, transition).answer
        if answer is Answer.GONE:
            taken.left.append(value)  # where its cancellation was asked for
        elif answer is Answer.DONE:
            taken.left = [value]
            store.sent(lease)
            if store.end(lease, token, transition).answer is Answer.DONE:
                self._fault(f"{task_id} was ended twice")

    # What goes on beside, for a thread each.

    def beat(self, store: CanonicalStore) -> None:
        """For one thread only: an attempt has one that beats for it, and two would deadlock."""
        store.heartbeat(list(self.leases.values()), skip_locked=random.random() < 0.5)
        self._over.wait(0.01)  # what was forsaken is to be rescued now and then

    def rescue(self, store: CanonicalStore) -> None:
        """Give up the lease of an attempt, and take what is lost."""
        store.forsake([random.choice(list(self.leases.values()))])
        taken = store.rescue([job.lease for job in store.lost(OLD)], OLD)
        self.disturbances.update(rescue.value for rescue in taken.values())

    def publish(self, store: CanonicalStore) -> None:
        """Say of all that is due that it was published."""
        for job in store.unsent(resend_after=0.01):
            (store.told if job.state.finished else store.sent)(job.lease, job.resends)
            self.disturbances["told" if job.state.finished else "sent"] += 1

    def operate(self, store: CanonicalStore) -> None:
        """Cancel, edit or settle a task."""
        task_id = random.choice(self.tasks)
        self.disturbances[store.request_cancel(task_id).value] += 1
        job = store.get_job(random.choice(self.tasks))
        if job is not None:
            error = random.choice([None, "its message cannot be sent"])
            settled = store.settle(Lease(job.id, job.run_lease), JobState.FAILED, error)
            self.disturbances["settled"] += settled
        self._over.wait(0.005)  # attempts are to get on between

    def _compare(self) -> None:
        """Each attempt of a run has found what the one before it left, and no lease is missing."""
        for task_id in self.tasks:
            leases = sorted(number for task, number in self._taken if task == task_id)
            if leases != list(range(1, len(leases) + 1)):
                self.faults.append(f"the leases of {task_id} have gaps: {leases}")
                continue
            for number in leases[1:]:
                before, after = self._taken[task_id, number - 1], self._taken[task_id, number]
                continued = before.run == after.run
                expected = (before.attempt + 1, before.left) if continued else (1, [None])
                if after.attempt != expected[0] or after.found not in expected[1]:
                    self.faults.append(
                        f"attempt {after.attempt} of {task_id}, lease {number}, found "
                        f"{after.found} instead of {expected}"
                    )


def _snapshot(generation: int, value: dict[str, Any]) -> Snapshot:
    return Snapshot(generation, str(value).replace("'", '"'))
