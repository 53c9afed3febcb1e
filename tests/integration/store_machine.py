"""A machine that does to one task whatever can be done, over a real store, and checks each step.

Two workers, a rescuer, operators, somebody who answers callbacks, and a broker that delivers
copies. A call may be carried out and
answered; carried out, and its answer be lost; arrive late; be repeated; and overlap another that
is not committed yet.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any, TypeVar

import psycopg
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from psycopg.rows import dict_row

from celery_awa.errors import RowLocked
from celery_awa.model import (
    Answer,
    Beat,
    Callback,
    Claim,
    Ended,
    Envelope,
    JobState,
    Lease,
    NewAttempt,
    Snapshot,
    Transition,
    UnsentJob,
)
from celery_awa.store.canonical import CanonicalStore, open_store
from celery_awa.store.through import checkpoint_through

from .promises import (
    FINISHED,
    MAX_RESCUES,
    RESEND_AFTER,
    STEP,
    THRESHOLDS,
    TICK,
    WAITS,
    Attempt,
    BrokenPromise,
    Message,
    Promises,
    promise,
)

T = TypeVar("T")
TASK = "task"
ENDS = (*FINISHED, *WAITS)
SEED = st.integers(0, 2**32 - 1)
WORK = (*["report"] * 3, *["wait"] * 3, "deliver", "commit", "retry", "end", "kill")
#: Ends that take back the 1 which the claim added.
UNCOUNTED = (JobState.AVAILABLE, JobState.SCHEDULED, JobState.WAITING_EXTERNAL)
#: How often which.
STEPS = {
    "_work": 10,
    "_rescue_pass": 1,
    "_publish_pass": 1,
    "_operate": 1,
    "_reply_to_callback": 2,
    "_apply_again": 1,
    "_lose_message": 1,
    "_two_at_once": 3,
    "_repeat": 4,
    "_wait": 1,
}
_TIMES = (
    "heartbeat_at",
    "duplicate_at",
    "attempted_at",
    "send_after",
    "sent_at",
    "run_at",
    "callback_timeout_at",
)


@dataclass
class Call:
    """One call of a verb: what the database does, what is promised of it, who hears of it."""

    name: str
    carry_out: Callable[[CanonicalStore], Any]
    #: With the answer, and whether nothing else was under way; whether the row may have changed.
    happened: Callable[[Any, bool], bool]
    answered: Callable[[Any], None] = lambda answer: None
    unanswered: Callable[[], None] = lambda: None


class Server:
    """Connections to one schema, and a look past the store."""

    def __init__(self, url: str, schema: str) -> None:
        self.schema = schema
        self._closing = ExitStack()
        connect = self._closing.enter_context
        #: One for each worker.
        self.stores = [connect(closing(open_store(url, schema))) for _ in range(2)]
        self._look = connect(closing(psycopg.connect(url, autocommit=True, row_factory=dict_row)))
        self._beside = connect(ThreadPoolExecutor(1))

    def close(self) -> None:
        self._closing.close()

    def rows(self) -> list[dict[str, Any]]:
        """Each table's row of the task, in one snapshot."""
        return self._execute(
            "SELECT * FROM {schema}.jobs_hot UNION ALL SELECT * FROM {schema}.scheduled_jobs"
        )

    def empty(self) -> None:
        self._execute("DELETE FROM {schema}.jobs_hot")
        self._execute("DELETE FROM {schema}.scheduled_jobs")

    def pass_by(self, seconds: float) -> None:
        """Let time go by for all that is stored."""
        columns = ", ".join(f"{name} = {name} - interval '{seconds} s'" for name in _TIMES)
        for table in ("jobs_hot", "scheduled_jobs"):
            self._execute(f"UPDATE {{schema}}.{table} SET {columns}")

    def overlap(
        self,
        first: Callable[[CanonicalStore], object],
        second: Callable[[CanonicalStore], object],
    ) -> tuple[object, object, bool]:
        """Carry out the second before the first is committed; both answers, and whether it waited.

        If it did, it came after the first; otherwise it is as if it had come before or after. The
        second answer is RowLocked where this machine was too slow for the lock timeout.
        """
        one, other = self.stores
        with one._connection.transaction():
            answer = first(one)
            future = self._beside.submit(second, other)
            while not future.done() and not self._waits(other):
                pass
            waited = not future.done()
        try:
            return answer, future.result(), waited
        except RowLocked as exc:
            return answer, exc, waited

    def _waits(self, store: CanonicalStore) -> bool:
        pid = store._connection.info.backend_pid
        found = self._execute(f"SELECT cardinality(pg_blocking_pids({pid})) > 0 AS waits")
        return bool(found[0]["waits"])

    def _execute(self, text: str) -> list[dict[str, Any]]:
        cursor = self._look.execute(text.replace("{schema}", self.schema))  # type: ignore[arg-type]  # made here
        return cursor.fetchall() if cursor.description else []


class StoreMachine(RuleBasedStateMachine):
    """See the head of this module. ``server`` is set by who runs it."""

    server: Server
    #: Stands between the callers and the store.
    through: Callable[[CanonicalStore], CanonicalStore] = staticmethod(lambda store: store)

    @initialize(seed=SEED)
    def begin(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.server.empty()
        self.promises = Promises(self.chance.choice(["requeue", "fail"]))
        self.rows: list[dict[str, Any]] = []
        self.broker = [Message("run 1")]
        #: What the broker has forgotten.
        self.forgotten: list[Message] = []
        self.attempts: list[Attempt] = []
        #: Calls whose answer never came: they may be repeated, or arrive late.
        self.open: list[Call] = []
        #: Leases that the rescuer has seen.
        self.seen: list[Lease] = []
        #: Tokens of callbacks that were handed out.
        self.tokens: list[str] = []
        self.count = 0
        self._deliver()

    # One rule, which takes its ways by chance: of many rules Hypothesis leaves some out in most
    # of its examples, and of many draws it likes to repeat some. Either way little happens.

    @rule()
    def step(self) -> None:
        names, weights = zip(*STEPS.items(), strict=True)
        getattr(self, self.chance.choices(names, weights)[0])()

    def _work(self) -> None:
        """A worker gets a message; or one of the attempts goes on, ends, or dies."""
        working = self._working()
        what = self.chance.choice(WORK)
        if not working or (what == "deliver" and len(working) < 4):
            self._deliver()
        elif what == "report":
            self._report(self.chance.choice(working))
        elif what == "kill":
            self._kill(self.chance.choice(working))
        elif what in ("wait", "commit"):
            self._use_lease([one for one in working if one.lease], what)
        else:
            to = JobState.RETRYABLE if what == "retry" else self.chance.choice(ENDS)
            self._carry_out(self._end(self.chance.choice(working), to), self._how())

    def _use_lease(self, working: list[Attempt], what: str) -> None:
        """Commit, or go on with a wait: expect a callback, which may come early, and leave."""
        if not working:
            return
        attempt = next((one for one in working if one.callback), self.chance.choice(working))
        if what == "commit":
            call = self._commit(attempt)
        elif attempt.callback is None:
            call = self._expect(attempt)
        elif self.chance.random() < 0.3:
            call = self._reply(attempt.callback)
        else:
            call = self._end(attempt, JobState.WAITING_EXTERNAL)
        self._carry_out(call, self._how())

    def _rescue_pass(self) -> None:
        """At once, or when nobody was heard of for long."""
        if self.chance.random() < 0.5:
            self._pass_by(2 * STEP)
        self._carry_out(self._look())
        self._carry_out(self._rescue(), self._how())

    def _publish_pass(self) -> None:
        """At once, or when a message that is to come should have come long ago."""
        if self.chance.random() < 0.5:
            self._pass_by(2 * STEP)
        self._carry_out(self._hand_out(), self._how())

    def _operate(self) -> None:
        """An operator asks for something, or the result backend knows of the end."""
        choices = self._operations() + self._settlements()
        self._carry_out(self.chance.choice(choices)(), self._how())

    def _reply_to_callback(self) -> None:
        """By the newest token, or by one of long ago."""
        if self.tokens:
            self._carry_out(self._reply(self.chance.choice([*self.tokens, self.tokens[-1]])))

    def _apply_again(self) -> None:
        """With the same id."""
        if self.promises.state in FINISHED:
            self.broker.append(Message(f"run {self._next()}"))

    def _lose_message(self) -> None:
        """The broker forgets what the job waits for."""
        promises = self.promises
        if promises.state in WAITS:
            ours = [one for one in self.broker if one.run == promises.run and promises.awaits(one)]
            for message in ours:
                self.broker.remove(message)
            self.forgotten += ours

    def _two_at_once(self) -> None:
        """Something that moves the row, and a claim or whatever else."""
        claims = self.broker and self.chance.random() < 0.5
        attempt = self._take_message() if claims else None
        first = self.chance.choice(self._moves())()
        other = self._claim(attempt) if attempt else self.chance.choice(self._possible())()
        self._overlap(first, other)

    def _repeat(self) -> None:
        """What was not answered is tried again, or arrives now."""
        if self.open:
            call = self.open.pop(self.chance.randrange(len(self.open)))
            self._carry_out(call, self.chance.choice(["answered", "lost"]))

    def _wait(self) -> None:
        self._pass_by(STEP)

    @invariant()
    def the_row_keeps_the_promises(self) -> None:
        on_its_way = any(map(self.promises.awaits, self.broker + self.forgotten)) or any(
            self.promises.entitled(one) for one in self.attempts if not one.over
        )
        self.promises.check(self.rows, on_its_way)

    def _deliver(self) -> None:
        if self.broker:
            self._carry_out(self._claim(self._take_message()), self._how())

    def _take_message(self) -> Attempt:
        """Begin an attempt with one that the broker may deliver again."""
        self._pass_by(TICK)
        message = self.chance.choice(self.broker)
        if self.chance.random() < 0.5:
            self.broker.remove(message)
        attempt = Attempt(f"token {self._next()}", message, began=self.promises.clock)
        self.attempts.append(attempt)
        return attempt

    def _report(self, attempt: Attempt) -> None:
        """It is written now or later; or the claim is tried again."""
        attempt.value, attempt.generation = self._next(), attempt.generation + 1
        self._carry_out((self._beat if attempt.lease else self._claim)(attempt), self._how())

    def _kill(self, attempt: Attempt) -> None:
        """Its process dies; what it had sent may arrive all the same."""
        attempt.over = True
        if attempt.lease is None or self.chance.random() < 0.5:
            self.broker.append(attempt.message)
        if attempt.lease is not None and self.chance.random() < 0.5:
            self._carry_out(self._forsake(attempt.lease))

    def _how(self) -> str:
        """Answered; carried out, but the answer is lost; not carried out yet."""
        return self.chance.choices(["answered", "lost", "late"], [3, 1, 1])[0]

    # What can be called.

    def _possible(self) -> list[Callable[[], Call]]:
        """All that anybody may call now."""
        working = self._working()
        return [
            *(_later(self._beat if one.lease else self._claim, one) for one in working),
            *(_later(self._forsake, one.lease) for one in working if one.lease),
            *(_later(self._commit, one) for one in working if one.lease),
            *(_later(self._expect, one) for one in working if one.lease),
            *self._moves(),
            self._hand_out,
        ]

    def _moves(self) -> list[Callable[[], Call]]:
        """What moves the row or takes it away, by whomever."""
        working = self._working()
        ends = [_later(self._end, one, to) for one in working for to in ENDS]
        waits = JobState.WAITING_EXTERNAL
        ends += [_later(self._end, one, waits) for one in working if one.callback]
        replies = [_later(self._reply, token) for token in self.tokens[-1:]]
        return [*ends, *replies, self._rescue, *self._operations(), *self._settlements()]

    def _operations(self) -> list[Callable[[], Call]]:
        again = [_later(self._send_again, keep) for keep in (True, False)]
        return [self._cancel, self._edit, *again]

    def _settlements(self) -> list[Callable[[], Call]]:
        ends = (
            (JobState.COMPLETED, None),
            (JobState.FAILED, None),
            (JobState.FAILED, "its message cannot be sent"),
        )
        known = self.seen[-1:]
        return [_later(self._settle, lease, to, error) for lease in known for to, error in ends]

    def _claim(self, attempt: Attempt) -> Call:
        def answered(claim: Claim) -> None:
            attempt.lease = claim.lease
            attempt.over |= claim.lease is None

        return Call(
            f"claim by {attempt.token}",
            lambda store: store.claim(self._described(attempt)),
            lambda claim, alone: self.promises.claimed(attempt, claim),
            answered,
        )

    def _beat(self, attempt: Attempt) -> Call:
        lease, generation, value = attempt.lease, attempt.generation, attempt.value
        assert lease is not None

        def answered(pulses: dict[Lease, Any]) -> None:
            attempt.over |= lease not in pulses

        return Call(
            f"beat of {attempt.token}, generation {generation}",
            lambda store: (
                store.heartbeat_with_progress([Beat(lease, _snapshot(generation, value))])
                if generation
                else store.heartbeat([lease])
            ),
            lambda pulses, alone: self.promises.heard(
                attempt, generation, value, pulses.get(lease)
            ),
            answered,
        )

    def _end(self, attempt: Attempt, to: JobState) -> Call:
        lease, generation, value = attempt.lease, attempt.generation, attempt.value
        message = attempt.message
        attempt.ending = True
        retried = Message(message.run, message.retries + (to is JobState.RETRYABLE))
        published: list[Message] = []
        waits = to is JobState.WAITING_EXTERNAL
        transition = Transition(
            to,
            _snapshot(generation, value) if generation else None,
            error="boom" if to is JobState.FAILED else None,
            run_in=self.chance.choice([None, STEP]) if to in WAITS else None,
            unsent=to in WAITS,
            uncounted=to in UNCOUNTED,
            envelope=_envelope(retried),
            callback_id=attempt.callback if waits else None,
            callback_timeout=self.chance.choice([None, STEP]) if waits else None,
        )
        if to is JobState.AVAILABLE:
            self.broker.append(message)  # may be running again before the row says so

        def carry_out(store: CanonicalStore) -> Ended:
            if lease is None:
                return store.end_unclaimed(self._described(attempt), transition)
            return store.end(lease, attempt.token, transition)

        def answered(ended: Ended) -> None:
            if ended.answer is not Answer.GONE:
                publish(ended.lease)
            attempt.over = True

        def publish(lease: Lease | None) -> None:
            if to is JobState.RETRYABLE and not published:
                retried.from_lease = None if lease is None else lease.run_lease
                published.append(retried)
                self.broker.append(retried)
                if lease is not None:
                    self._carry_out(self._note_sent(lease, 0))

        return Call(
            f"end of {attempt.token} as {to}",
            carry_out,
            lambda ended, alone: self.promises.ended(attempt, transition, value, ended.answer),
            answered,
            lambda: publish(lease),
        )

    def _expect(self, attempt: Attempt) -> Call:
        lease = attempt.lease
        assert lease is not None
        token = f"{lease.job_id}-{self._next()}"

        def answered(expected: bool) -> None:
            attempt.over |= not expected
            if expected:
                attempt.callback = token
                self.tokens.append(token)

        return Call(
            f"expect {token} by {attempt.token}",
            lambda store: store.expect_callback(lease, attempt.token, token, "callback"),
            lambda answer, alone: self.promises.expected(attempt, token, answer),
            answered,
        )

    def _reply(self, token: str) -> Call:
        value, fails = self._next(), self.chance.random() < 0.3
        reply: dict[str, Any] = {"error": "no"} if fails else {"payload": value}

        def carry_out(store: CanonicalStore) -> Callback:
            if fails:
                return store.fail_callback(token, "no")
            return store.complete_callback(token, f"{value}")

        return Call(
            f"reply to {token}: {reply}",
            carry_out,
            lambda answer, alone: self.promises.replied(token, reply, answer),
        )

    def _commit(self, attempt: Attempt) -> Call:
        lease, value = attempt.lease, self._next()
        assert lease is not None

        def carry_out(store: CanonicalStore) -> bool:
            theirs, schema = store._connection, self.server.schema
            with theirs.transaction():
                text = f'{{"n": {value}}}'
                return checkpoint_through(theirs, schema, lease, attempt.token, 0, text)

        def answered(committed: bool) -> None:
            attempt.over |= not committed

        return Call(
            f"commit {value} by {attempt.token}",
            carry_out,
            lambda answer, alone: self.promises.has_committed(attempt, value, answer),
            answered,
        )

    def _note_sent(self, lease: Lease, resends: int, *, told: bool = False) -> Call:
        def carry_out(store: CanonicalStore) -> None:
            (store.told if told else store.sent)(lease, resends)

        return Call(
            f"told of {lease}" if told else f"sent {lease}",
            carry_out,
            lambda answer, alone: self.promises.published(lease, resends, told=told),
        )

    def _look(self) -> Call:
        def answered(jobs: list[Any]) -> None:
            self.seen.extend(job.lease for job in jobs)

        return Call(
            "look",
            lambda store: store.lost(THRESHOLDS),
            lambda jobs, alone: self.promises.looked([job.lease for job in jobs], alone=alone),
            answered,
        )

    def _rescue(self) -> Call:
        """By this look, or by one of long ago."""
        asked = list(self.seen)
        asked += [Lease(row["id"], row["run_lease"]) for row in self.rows]
        return Call(
            "rescue",
            lambda store: store.rescue(asked, THRESHOLDS),
            lambda taken, alone: self.promises.rescued(asked, taken, alone=alone),
        )

    def _hand_out(self) -> Call:
        def answered(jobs: list[UnsentJob]) -> None:
            for job in jobs:
                self.seen.append(job.lease)
                if not job.state.finished:
                    assert job.envelope is not None
                    self.broker.append(_message_in(job.envelope, job.lease))
                note = self._note_sent(job.lease, job.resends, told=job.state.finished)
                self._carry_out(note, self._how())

        return Call(
            "hand out",
            lambda store: store.unsent(resend_after=RESEND_AFTER),
            lambda jobs, alone: self.promises.handed_out(jobs, alone=alone),
            answered,
        )

    def _forsake(self, lease: Lease) -> Call:
        return Call(
            f"forsake {lease}",
            lambda store: store.forsake([lease]),
            lambda answer, alone: self.promises.forsaken(lease),
        )

    def _settle(self, lease: Lease, to: JobState, error: str | None) -> Call:
        return Call(
            f"settle {lease} as {to}, {error}",
            lambda store: store.settle(lease, to, error),
            lambda answer, alone: self.promises.settled(lease, to, error, answer),
        )

    def _cancel(self) -> Call:
        return Call(
            "cancel",
            lambda store: store.request_cancel(TASK),
            lambda answer, alone: self.promises.cancelled(answer),
        )

    def _send_again(self, keep: bool) -> Call:
        return Call(
            f"send again, keep {keep}",
            lambda store: store.resend(TASK, keep_progress=keep),
            lambda answer, alone: self.promises.sent_again(answer, keep=keep),
        )

    def _edit(self) -> Call:
        value = self._next()
        return Call(
            f"edit {value}",
            lambda store: store.edit_checkpoint(TASK, f'{{"n": {value}}}'),
            lambda answer, alone: self.promises.edited(value, answer),
        )

    # Calling.

    def _carry_out(self, call: Call, how: str = "answered") -> None:
        if how == "late":
            self._leave_open(call)
            return
        before = self.rows
        answer = call.carry_out(self.through(self.chance.choice(self.server.stores)))
        note(f"{call.name}: {answer}, {how}")
        changes = call.happened(answer, True)
        self.rows = self.server.rows()
        if not changes:
            same = _but_for_marks(self.rows) == _but_for_marks(before)
            promise(same, f"what should have no effect changed the row: {call.name}")
        if how == "answered":
            call.answered(answer)
        else:
            self._leave_open(call)

    def _overlap(self, first: Call, second: Call) -> None:
        def carry_out(call: Call) -> Callable[[CanonicalStore], object]:
            return lambda store: call.carry_out(self.through(store))

        one, other, waited = self.server.overlap(carry_out(first), carry_out(second))
        done = [(first, one), (second, other)]
        if isinstance(other, RowLocked):
            self._leave_open(done.pop()[0])
        order = "and then" if waited else "beside"
        note(f"{first.name}: {one}, {order} {second.name}: {other}")
        self.rows = self.server.rows()
        before = self.promises.copy()
        try:
            self._explain(done if waited else done[::-1])
        except BrokenPromise:
            if waited:
                raise
            self.promises = before
            self._explain(done)
        for call, answer in done:
            call.answered(answer)

    def _explain(self, done: Sequence[tuple[Call, object]]) -> None:
        """What came of two calls must be what would have come of one after the other."""
        for call, answer in done:
            call.happened(answer, False)
        self.promises.check(self.rows, on_its_way=True)

    def _leave_open(self, call: Call) -> None:
        call.unanswered()
        self.open.append(call)

    def _pass_by(self, seconds: float) -> None:
        self.promises.clock += seconds
        if self.rows:
            self.server.pass_by(seconds)
            self.rows = self.server.rows()

    def _working(self) -> list[Attempt]:
        """Attempts whose body runs."""
        return [one for one in self.attempts if not one.over and not one.ending]

    def _next(self) -> int:
        self.count += 1
        return self.count

    def _described(self, attempt: Attempt) -> NewAttempt:
        message, policy = attempt.message, self.promises.policy
        return NewAttempt(
            token=attempt.token,
            task_id=TASK,
            kind="kind",
            queue="queue",
            worker="worker",
            run_token=message.run,
            run_named=True,
            retries=message.retries,
            from_lease=message.from_lease,
            lost_policy=policy,
            max_rescues=MAX_RESCUES,
            envelope=_envelope(message, whole=policy == "requeue"),
            began_at=time.monotonic() - (self.promises.clock - attempt.began),
        )


def _later(make: Callable[..., Call], *arguments: Any) -> Callable[[], Call]:
    return lambda: make(*arguments)


def _snapshot(generation: int, value: int | None) -> Snapshot:
    return Snapshot(generation, f'{{"metadata": {{"n": {value}}}}}')


def _envelope(message: Message, *, whole: bool = True) -> Envelope:
    return Envelope(f"{message.run}/{message.retries}".encode(), whole)


def _message_in(envelope: Envelope, lease: Lease) -> Message:
    run, _, retries = envelope.data.decode().partition("/")
    return Message(run, int(retries), lease.run_lease)


def _but_for_marks(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A copy that is dropped leaves a mark, and nothing else."""
    return [row | {"duplicate_at": None} for row in rows]
