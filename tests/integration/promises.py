"""What a store promises of one task, in plain Python: the model that a real store is checked by.

It is told of every verb as the database carried it out, whether or not the caller ever heard the
answer, and raises BrokenPromise where the answer or the row afterwards is not what was promised.
Its clock stands still until the test moves it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

from celery_awa.model import (
    Answer,
    Callback,
    Cancel,
    Claim,
    JobState,
    Lease,
    Pulse,
    Rescue,
    Resend,
    Thresholds,
    Transition,
    UnsentJob,
)

#: Seconds by which the clock is moved, and some that no moment comes near to: the real time that
#: goes by meanwhile does not count.
TICK, STEP = 10.0, 100.0
THRESHOLDS = Thresholds(stale_after=155.0, duplicate_after=55.0)
DUE_AGAIN = 10.0
RESEND_AFTER = 155.0
MAX_RESCUES = 3
FINISHED = (JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED)
#: States in which a job waits for a message; and all of those that an attempt may leave it in.
WAITS = (JobState.AVAILABLE, JobState.RETRYABLE, JobState.SCHEDULED)
GOES_ON = (*WAITS, JobState.WAITING_EXTERNAL)


class BrokenPromise(AssertionError):
    """The store did something that it may never do."""


def promise(kept: bool, text: str) -> None:
    """Raise BrokenPromise unless it was kept."""
    if not kept:
        raise BrokenPromise(text)


@dataclass(eq=False)
class Message:
    """One message of the task, as a broker has it."""

    run: str
    retries: int = 0
    from_lease: int | None = None


@dataclass(eq=False)
class Attempt:
    """One execution of the task by a worker, as that worker knows it."""

    token: str
    message: Message
    began: float
    #: The newest value that it reported, and how many it did.
    value: int | None = None
    generation: int = 0
    lease: Lease | None = None
    #: The token of the callback that it knows to be expected.
    callback: str | None = None
    #: It has begun to end: it reports and claims no more.
    ending: bool = False
    #: Its process has no more business with it, or is dead.
    over: bool = False


class Promises:
    """One task: who has it, what its checkpoint is, and whether it is owed a message."""

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.clock = 0.0
        self.state: JobState | None = None
        self.run = ""
        self.leases = 0
        #: The attempt of the newest lease.
        self.last: Attempt | None = None
        self.progress: int | None = None
        self.generation = 0
        #: What the task wrote in transactions of its own.
        self.committed: int | None = None
        #: The token that counts now, until when the job waits for it, and the answer that came.
        self.callback: str | None = None
        self._waits_until: float | None = None
        self.answer: dict[str, Any] | None = None
        self.attempts = 0
        self.cancel_asked = False
        #: Since when something is to be published, and not known to be.
        self.due: float | None = None
        #: When the message that it waits for was noted as published, and when that is to run.
        self.sent: float | None = None
        self._run_at = 0.0
        self.resends = 0
        self._whole = False
        self._granted: set[str] = set()
        #: Whose end the present state is, and as what: nobody has touched the job since, unless it
        #: went on by the answer to its callback.
        self._ended_by: Attempt | None = None
        self._ended_as: JobState | None = None
        #: Ended by the word of the result backend; the attempt itself has not been heard of.
        self._settled = False
        self._heard_at = 0.0
        self._forsaken = False
        self._copy_dropped = False
        self._in_place = 0
        self._mark: tuple[int | None, int | None] = (None, None)

    def copy(self) -> Promises:
        """The same, to go on from in another way."""
        other = copy(self)
        other._granted = set(self._granted)
        return other

    # What follows from it.

    @property
    def owner(self) -> Attempt | None:
        """The attempt that has the job now."""
        return self.last if self.state is JobState.RUNNING else None

    @property
    def lost(self) -> bool:
        """Whether a rescue takes the job now."""
        if self.state is JobState.WAITING_EXTERNAL:
            return self._waits_until is not None and self._waits_until <= self.clock
        silent = self.clock - self._heard_at
        stale = silent >= THRESHOLDS.stale_after or (
            self._copy_dropped and silent >= THRESHOLDS.duplicate_after
        )
        return self.state is JobState.RUNNING and (self._forsaken or stale)

    @property
    def missed(self) -> bool:
        """Whether its message was published so long ago that it may have been lost."""
        if self.sent is None:
            return False
        return self._whole and self.clock >= max(self.sent, self._run_at) + RESEND_AFTER

    def awaits(self, message: Message) -> bool:
        """Whether the job is to go on with this message."""
        if message.run != self.run or self.last is None:
            return message.run != self.run
        theirs, ours = message.retries, self.last.message.retries
        newer = theirs > ours or (theirs == ours and (message.from_lease or 0) >= self.leases)
        returned = self.state is JobState.AVAILABLE and theirs == ours
        return self.state not in FINISHED and (newer or returned)

    def entitled(self, attempt: Attempt) -> bool:
        """Whether an attempt that claims now gets the job."""
        if attempt.token in self._granted:
            return False
        if self.last is not None and self.last.began > attempt.began:
            return False
        if self.state is None or self.awaits(attempt.message):
            return True
        used = (
            attempt.message.from_lease is not None
            or self.last is None
            or attempt.message.retries < self.last.message.retries
            # The one that has the job came with a copy of it that was sent later.
            or (
                attempt.message.retries == self.last.message.retries
                and self.last.message.from_lease is not None
            )
        )
        row_brings_it_back = self.policy == "requeue" and self._whole
        return self.state is JobState.RUNNING and not used and not row_brings_it_back

    # Attempts. Each answers whether it may have changed the row.

    def claimed(self, attempt: Attempt, claim: Claim) -> bool:
        lease = None if claim.lease is None else claim.lease.run_lease
        if attempt is self.owner:
            promise(lease == self.leases, "a claim that is repeated is answered with its lease")
            return False
        if not self.entitled(attempt):
            promise(lease is None, f"the job was given to a copy, or to an older attempt: {claim}")
            self._drop(attempt)
            return False
        self._grant(attempt)
        promise(lease is not None, f"the message that a job waits for was dropped: {claim}")
        promise(lease == self.leases, f"each claim raises the lease by one: {lease}")
        found = value_of(claim.progress)
        promise(
            found == self.progress, f"the next attempt reads {self.progress!r} and not {found!r}"
        )
        found = number_of(claim.committed)
        promise(found == self.committed, f"committed was {self.committed!r} and not {found!r}")
        promise(claim.callbacks == self.answers, f"it was answered {self.answers}: {claim}")
        return True

    def heard(
        self, attempt: Attempt, generation: int, value: int | None, pulse: Pulse | None
    ) -> bool:
        if attempt is not self.owner:
            promise(pulse is None, "an attempt without the lease is never confirmed")
            return False
        if pulse is None:
            raise BrokenPromise("an attempt that has its lease is never told that it is lost")
        self._report(generation, value)
        self._heard_at, self._forsaken, self._copy_dropped = self.clock, False, False
        promise(pulse.generation == self.generation, f"{pulse}, stored is {self.generation}")
        promise(pulse.cancel_requested == self.cancel_asked, f"cancellation: {pulse}")
        return True

    def expected(self, attempt: Attempt, callback: str, answer: bool) -> bool:
        mine = attempt is self.owner
        promise(answer == mine, f"a callback is expected by who has the job: {answer}")
        if mine:
            self.callback, self.answer = callback, None
        return mine

    def has_committed(self, attempt: Attempt, value: int, answer: bool) -> bool:
        mine = attempt is self.owner
        promise(answer == mine, f"who has the job commits, and nobody else: {answer}")
        if mine:
            self.committed = value
            self._heard_at, self._forsaken, self._copy_dropped = self.clock, False, False
        return mine

    def ended(
        self, attempt: Attempt, transition: Transition, value: int | None, answer: Answer
    ) -> bool:
        """The end of an attempt, whether it had claimed before or not."""
        to = transition.to
        assert to is not None
        generation = transition.snapshot.generation if transition.snapshot else 0
        if self.entitled(attempt):
            self._grant(attempt)
        if attempt is self.owner and self.cancel_asked and to in GOES_ON:
            promise(answer is Answer.GONE, "who would wait after a cancellation is told to leave")
            self._report(generation, value)
            self._leave(JobState.CANCELLED, due=self.clock)
            self._whole = True
            self.attempts -= transition.uncounted
            return True
        if attempt is self.owner or (attempt is self.last and self._settled and to is self.state):
            promise(answer is Answer.DONE, f"an end is done: {answer}")
            self._report(generation, value)
            if to is JobState.WAITING_EXTERNAL:
                self._park(transition)
            else:
                self._leave(to, due=self.clock + DUE_AGAIN if to in WAITS else None)
            self._ended_by, self._ended_as = attempt, to
            self._whole = to is not JobState.COMPLETED
            self._run_at = self.clock + (transition.run_in or 0.0)
            self.attempts -= transition.uncounted
            return True
        repeated = attempt is self._ended_by and to is self._ended_as
        expected = Answer.REPEATED if repeated else Answer.GONE
        promise(answer is expected, f"an end was told {answer} instead of {expected}")
        if attempt.token not in self._granted:
            self._drop(attempt)
        return False

    def forsaken(self, lease: Lease) -> bool:
        self._forsaken |= self.owner is not None and lease.run_lease == self.leases
        return True

    # The rescuer.

    def looked(self, found: Iterable[Lease], *, alone: bool) -> bool:
        leases = [lease.run_lease for lease in found]
        promise(leases == ([self.leases] if self.lost else []) or not alone, f"lost: {leases}")
        return False

    def rescued(
        self, asked: Collection[Lease], taken: Mapping[Lease, Rescue], *, alone: bool
    ) -> bool:
        asked_for_it = self.leases in {lease.run_lease for lease in asked}
        if not taken:
            promise(not (alone and asked_for_it and self.lost), "a lost job was not rescued")
            return False
        ((lease, made),) = taken.items()
        promise(lease.run_lease == self.leases and self.lost, "a living attempt was rescued")
        expected = self._rescue()
        promise(made is expected, f"rescued as {made} instead of {expected}")
        return True

    def handed_out(self, jobs: Collection[UnsentJob], *, alone: bool) -> bool:
        due = self.due is not None and self.due <= self.clock
        promise(bool(jobs) or not (alone and due), "an unsent job was forgotten")
        promise(bool(jobs) or not (alone and self.missed), "a message was never missed")
        for job in jobs:
            promise(self.due is not None or self.missed, "sent again, though it may come yet")
            current = (job.lease.run_lease, job.state, job.run_token)
            promise(current == (self.leases, self.state, self.run), f"sent as {current}")
            self.due, self.sent = self.clock + DUE_AGAIN, None
        return bool(jobs)

    def published(self, lease: Lease, resends: int, *, told: bool) -> bool:
        """Noted that a job's message was sent, or that its end was told."""
        current = (lease.run_lease, resends) == (self.leases, self.resends)
        if not current or self.state not in (FINISHED if told else WAITS):
            return False
        self.due, self.sent = None, None if told else self.clock
        return True

    def settled(self, lease: Lease, to: JobState, error: str | None, answer: bool) -> bool:
        runs = self.state is JobState.RUNNING
        may = self.state not in FINISHED and not (runs and error is not None)
        promise(answer == (may and lease.run_lease == self.leases), f"settled: {answer}")
        if answer:
            self._leave(to, due=None if error is None else self.clock)
            self._settled = runs
        return answer

    # Whoever answers callbacks.

    def replied(self, callback: str, reply: dict[str, Any], answer: Callback) -> bool:
        counts = callback == self.callback
        expected = Callback.DONE if counts else Callback.REFUSED
        promise(answer is expected, f"a reply was told {answer} instead of {expected}")
        if not counts:
            return False
        self.answer, self.callback = reply, None
        if self.state is JobState.WAITING_EXTERNAL:
            self.state = JobState.FAILED if "error" in reply else JobState.AVAILABLE
            self.due = self.clock
        return True

    # Operators.

    def cancelled(self, answer: Cancel) -> bool:
        if self.state is None:
            expected = Cancel.UNKNOWN
        elif self.state is JobState.RUNNING:
            expected, self.cancel_asked = Cancel.REQUESTED, True
        elif self.state in GOES_ON:
            expected, self.cancel_asked = Cancel.CANCELLED, True
            self._leave(JobState.CANCELLED, due=self.clock)
        else:
            again = self.state is JobState.CANCELLED and self.cancel_asked
            expected = Cancel.CANCELLED if again else Cancel.FINISHED
        promise(answer is expected, f"a cancellation was told {answer} instead of {expected}")
        return answer in (Cancel.REQUESTED, Cancel.CANCELLED)

    def sent_again(self, answer: Resend, *, keep: bool) -> bool:
        expected = self._may_be_sent_again(keep=keep)
        promise(answer is expected, f"sending again was told {answer} instead of {expected}")
        if answer is not Resend.DONE:
            return False
        if not keep:
            self.progress = self.committed = self.answer = None
            self.generation = 0
        if self.answer is not None and "error" in self.answer:
            self.answer = None  # what failed outside is to be asked for anew
        self.cancel_asked = False
        self.resends += 1
        self._in_place = 0
        self._mark = (None, None)
        self._leave(JobState.AVAILABLE, due=self.clock)
        return True

    def edited(self, value: int, answer: bool | None) -> bool:
        may = self.state not in (JobState.RUNNING, JobState.COMPLETED)
        expected = None if self.state is None else may
        promise(answer is expected, f"an edit was told {answer} instead of {expected}")
        if answer:
            self.progress, self.committed = value, None
            if self.state is not self._ended_as:
                self._ended_by = None  # that it had ended to wait is forgotten
        return bool(answer)

    # The row, and what is under way.

    def check(self, rows: Collection[Mapping[str, Any]], on_its_way: bool) -> None:
        """``on_its_way``: somebody has a message that the job awaits, or a broker has lost it."""
        promise(len(rows) <= 1, f"a task is in both tables: {rows}")
        promise(bool(rows) == (self.state is not None), f"{len(rows)} rows, and it {self.state}")
        for row in rows:
            self._check(row)
            if self.state in WAITS:
                promise(row["send_after"] is not None or on_its_way, "a waiting job was forgotten")
            if self.state is JobState.WAITING_EXTERNAL:
                promise(row["callback_id"] is not None, "it waits for what nobody can answer")
            published = row["sent_at"] is not None
            promise(published == (self.sent is not None), f"published at {row['sent_at']}")
            if self.due is not None:
                promise(row["send_after"] is not None, "an unsent job was forgotten")

    def _check(self, row: Mapping[str, Any]) -> None:
        expected = {
            "state": self.state and self.state.value,
            "run_token": self.run,
            "run_lease": self.leases,
            "progress_generation": self.generation,
            "cancel_requested": self.cancel_asked,
            "attempt": self.attempts,
            "callback_id": self.callback,
            "callbacks": self.answers or None,
        }
        found = {name: row[name] for name in expected}
        promise(found == expected, f"the row says {found} instead of {expected}")
        stored = value_of(row["progress"])
        promise(stored == self.progress, f"stored is {stored} instead of {self.progress}")
        stored = number_of(row["committed"])
        promise(stored == self.committed, f"committed is {stored} instead of {self.committed}")
        if self.owner is not None:
            promise(row["attempt_token"] == self.owner.token, "another attempt has the row")

    @property
    def answers(self) -> dict[str, Any]:
        """As the next attempt finds them."""
        return {} if self.answer is None else {"callback": self.answer}

    def _grant(self, attempt: Attempt) -> None:
        if self.state is None or attempt.message.run != self.run:
            self.run, self.progress, self.cancel_asked = attempt.message.run, None, False
            self.committed = self.answer = None
            self.attempts = self._in_place = 0
            self._mark = (None, None)
        self.attempts = max(self.attempts, attempt.message.retries) + 1
        self.callback = None
        self.leases += 1
        self.last, self.state = attempt, JobState.RUNNING
        self._granted.add(attempt.token)
        self.generation = self.resends = 0
        self.due = self.sent = self._ended_by = None
        self._whole = self.policy == "requeue"
        self._heard_at, self._forsaken = self.clock, False
        self._copy_dropped = self._settled = False

    def _drop(self, attempt: Attempt) -> None:
        """A copy was dropped that would have the job if no attempt had it."""
        late = self.last is not None and self.last.began > attempt.began
        known = attempt.token in self._granted or attempt.message.run != self.run
        if self.state is JobState.RUNNING and not late and not known:
            self._copy_dropped = True

    def _report(self, generation: int, value: int | None) -> None:
        if generation > self.generation:
            self.generation = generation
            self.progress = self.progress if value is None else value

    def _leave(self, to: JobState, due: float | None) -> None:
        """The job runs no more, or waits no more."""
        self.state, self.due, self.sent, self._run_at = to, due, None, self.clock
        self._ended_by, self._settled, self.callback = None, False, None
        if to is JobState.COMPLETED:
            self.progress = self.committed = self.answer = None
            self._whole = False

    def _park(self, transition: Transition) -> None:
        """It waits for the callback, unless that was answered, or superseded."""
        callback, timeout = self.callback, transition.callback_timeout
        if transition.callback_id == callback:
            self._leave(JobState.WAITING_EXTERNAL, due=None)
            self.callback = callback
            self._waits_until = None if timeout is None else self.clock + timeout
        else:
            failed = self.answer is not None and "error" in self.answer
            self._leave(JobState.FAILED if failed else JobState.AVAILABLE, due=self.clock)

    def _rescue(self) -> Rescue:
        if self._mark != (self.progress, self.committed):
            self._mark, self._in_place = (self.progress, self.committed), 0
        if self.cancel_asked:
            made, to = Rescue.CANCELLED, JobState.CANCELLED
        elif self.policy == "requeue" and self._whole and self._in_place < MAX_RESCUES:
            made, to = Rescue.REQUEUED, JobState.RETRYABLE
            self._in_place += 1
        else:
            made, to = Rescue.FAILED, JobState.FAILED
        self._leave(to, due=self.clock)
        return made

    def _may_be_sent_again(self, *, keep: bool) -> Resend:
        if self.state is None:
            return Resend.UNKNOWN
        if self.state is JobState.RUNNING or (keep and self.state not in FINISHED):
            return Resend.LIVE
        return Resend.DONE if self._whole else Resend.NO_MESSAGE


def value_of(progress: Any) -> int | None:
    """The number that stands in a progress object of this test."""
    return None if progress is None else number_of(progress["metadata"])


def number_of(values: Any) -> int | None:
    """The number that stands in what this test keeps."""
    return None if values is None else values["n"]
