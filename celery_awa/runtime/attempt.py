"""Runs in the process that executes the task: its thread reports, the database thread answers.

The fields are written one at a time and each by one side only, so no lock is needed beside the
buffer's own: ``ended`` is set before ``claim_sent`` is read, and the other way about in the
database thread, so one of the two always sees the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ..errors import InvalidProgress, LeaseLost, NotInAttempt, StoreUnavailable
from ..model import Claim, Envelope, Lease, NewAttempt, Snapshot, StopReason, Verdict
from ..progress import ProgressBuffer
from ..progress_brief import UNSET, Unset
from .callbacks import Callbacks
from .checkpoint import STATE, Checkpoint, check_keys
from .desk import NO_TERMS, Desk, Terms
from .page import Page
from .page_values import Answer

#: Seconds that reading a checkpoint before the claim waits, unless it is known.
READ_TIMEOUT = 5.0
_NOTHING_TOLD = Answer()


def check_timeout(timeout: float) -> None:
    """Raise InvalidProgress unless it is a number of seconds above 0."""
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise InvalidProgress("timeout", f"{timeout!r} is not a number of seconds above 0")


class Attempt:
    """One execution of a task, for its task and, as a handle, for the task's other threads.

    Every method may be called from any thread of the process that executes the task.
    """

    def __init__(
        self,
        token: str,
        task_id: str,
        describe: Callable[[str], NewAttempt],
        desk: Desk | None,
        *,
        envelope: Callable[[], Envelope | None] = lambda: None,
        owner: object = None,
        limit: int,
        number: int = 1,
        terms: Terms = NO_TERMS,
    ) -> None:
        #: The task that began it; a task nested in it does not report to it.
        self.owner = owner
        self.token = token
        self.task_id = task_id
        self.buffer = ProgressBuffer(limit)
        self.page: Page | None = None
        self.started_at = time.monotonic()
        self.claim_due = float("inf")
        #: When its claim was tried last, and until when not again; monotonic seconds.
        self.claim_tried_at = 0.0
        self.claim_not_before = 0.0
        self.claim_sent = False
        self.claim: Claim | None = None
        self.unclaimable: str | None = None
        self.confirmed_at = self.started_at
        self.ended = False
        self.run_token: str | None = None
        self.lease: Lease | None = None
        #: The number of this attempt in its run, from 1. A guess until the claim.
        self.number = number
        self.terms = terms
        #: What its task's loops and steps know (celery_awa.resume), made when it is wanted.
        self.resumption: Any = None
        #: For celery_awa.testing: called after each finished item of a loop, and after each step.
        self.on_item: Callable[[str, int], bool] | None = None
        self.on_step: Callable[[str], None] | None = None
        #: What a claim stores of the message, made when it is wanted; may raise as describe may.
        self.envelope = envelope
        self._describe = describe
        self._desk = desk
        self._lost = False
        self._cancel = False
        self._acknowledged = 0
        self._found = Checkpoint(terms.version, terms.migrate)
        self._stamped = not terms.version
        #: What was reported before the claim brought another version's checkpoint.
        self._early: dict[str, Any] = {}
        #: Whether a migrated checkpoint is not known to be written.
        self._moved = False
        #: Who outside has answered; known with the claim.
        self.answers = Callbacks()

    # The task and its threads.

    def set_progress(
        self,
        percent: float | Unset | None = UNSET,
        message: str | None = None,
        *,
        current: float | None = None,
        total: float | None = None,
    ) -> None:
        """Report how far the work is; see :meth:`celery_awa.AwaMixin.set_progress`."""
        self.buffer.set_progress(percent, message, current=current, total=total)

    def update_metadata(self, values: Mapping[str, Any]) -> None:
        """Merge into the checkpoint; see :meth:`celery_awa.AwaMixin.update_metadata`."""
        self._found.check_reported(values)
        self._merge(values)

    def _merge(self, values: Mapping[str, Any]) -> None:
        self.migrate()
        # Before the claim it may yet be laid over what another version left, whose stamp stays.
        if self._stamped or not values or (self.claim is None and self._desk is not None):
            self.buffer.update_metadata(values)
            return
        self.buffer.update_metadata(self._found.stamped(values))
        self._stamped = True

    def flush_progress(self, timeout: float = 5.0) -> bool:
        """Write now and wait; see :meth:`celery_awa.AwaMixin.flush_progress`."""
        check_timeout(timeout)
        if self._desk is None:
            return True
        if self.lost or self.ended:
            return False
        if not self.pending:
            return True
        return self._desk.flush(self, timeout)

    @property
    def progress(self) -> dict[str, Any] | None:
        """The progress as it is now, a copy; None if nothing was ever reported.

        Before the claim it waits for it: raises StoreUnavailable after 5 seconds, and LeaseLost.
        """
        self._learn()
        self.migrate()
        return self.buffer.value()

    @property
    def checkpoint(self) -> Mapping[str, Any]:
        """What earlier attempts left in ``metadata``, read-only; empty in a new run.

        Before the claim it waits for it: raises StoreUnavailable after 5 seconds, and LeaseLost.
        """
        self._learn()
        self.migrate()
        return self._found.values

    @property
    def committed(self) -> Mapping[str, Any]:
        """Of the checkpoint what ``checkpoint_in`` wrote; waits and raises as ``checkpoint``."""
        self._learn()
        self.migrate()
        return self._found.committed

    def migrate(self) -> None:
        """Have the task make an older version's checkpoint fit, once (the task's thread)."""
        if self._found.unmigrated:
            made = self._found.migrated()
            left = {**made, **self._early}
            self.buffer.replace_metadata(self._found.stamped(left) if left else left)
            self._stamped = bool(left) or not self.terms.version
            self._moved = True

    def keep(self, state: Mapping[str, Any]) -> None:
        """Replace what the task's loops and steps keep."""
        self._merge({STATE: state})

    def report(
        self,
        *,
        current: float,
        total: float | None,
        percent: float | Unset | None = UNSET,
        message: str | None = None,
        rate: float | None = None,
    ) -> None:
        """What loops report of themselves; ``rate``: of ``current``, a second."""
        self.buffer.set_progress(percent, message, current=current, total=total, rate=rate)

    def checkpoint_in(self, connection: Any, values: Mapping[str, Any]) -> None:
        """Write into the checkpoint in the caller's open transaction.

        See :meth:`celery_awa.AwaMixin.checkpoint_in`.
        """
        check_keys(values)
        self.commit(connection, values)

    def commit(self, connection: Any, values: Mapping[str, Any]) -> None:
        """As :meth:`checkpoint_in`, the keys of celery-awa itself too."""
        if self._desk is None:
            # In eager mode there is no row: what the transaction becomes cannot be known.
            self._merge(self._found.beside_committed(values))
            return
        self._learn()
        self.migrate()
        if self._moved:
            # The first values of this version take the place of all that another committed.
            if not self.flush_progress(READ_TIMEOUT):
                raise LeaseLost
            self._moved = False
        if self.ended or self.lost or not self._desk.commit(self, connection, values):
            raise LeaseLost

    def stamped(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """The values with the version of the task's code, where it has one."""
        return self._found.stamped(values)

    @property
    def callbacks(self) -> Mapping[str, Any]:
        """The payloads of this run's callbacks that have come, by name; waits as ``checkpoint``."""
        self._learn()
        return self.answers.payloads

    def callback_token(self, name: str, timeout: float = READ_TIMEOUT) -> str:
        """What a callback that this attempt is to wait for is known by, made once.

        See :meth:`celery_awa.AwaMixin.callback_token`.
        """
        known = self.answers.expected(name)
        if known is not None:
            return known
        if self._desk is None:
            raise NotInAttempt("nobody can call back in eager mode, or without celery-awa's worker")
        self._learn()
        if self.lease is None or self.ended:
            raise LeaseLost
        callback_id = self.answers.new_id(name, self.lease.job_id)
        if not self._desk.expect_callback(self, callback_id, name, timeout):
            raise LeaseLost
        self.answers.expect(name, callback_id)
        return callback_id

    @property
    def should_stop(self) -> bool:
        """Whether the task is asked to stop; see :attr:`celery_awa.AwaMixin.should_stop`."""
        return self.stop_reason is not None

    @property
    def stop_reason(self) -> StopReason | None:
        """Why it is asked to stop: the first reason of StopReason that holds; None if none does.

        Costs microseconds and no statement: it tells what this process knows, and what the
        worker wrote on the page. Once the attempt has ended, it is LEASE_LOST.
        """
        page = self.page
        told = page.told() if page is not None else _NOTHING_TOLD
        if self.ended or self._lost or told.lost:
            return StopReason.LEASE_LOST
        if self._cancel or told.cancel:
            return StopReason.CANCEL
        if self._ran_for(self.terms.deadline):
            return StopReason.DEADLINE
        if self._desk is not None and self._desk.stopping:
            return StopReason.WORKER_STOPPING
        return StopReason.MAX_RUNTIME if self._ran_for(self.terms.max_runtime) else None

    def _ran_for(self, seconds: float | None) -> bool:
        return seconds is not None and time.monotonic() - self.started_at >= seconds

    def _learn(self) -> None:
        if self._desk is None:
            return
        if self.claim is None and self.unclaimable is None and not self.ended:
            self._desk.learn(self, READ_TIMEOUT)
        if self.unclaimable is not None:
            raise StoreUnavailable(f"the database refused this attempt: {self.unclaimable}")
        if self.claim is not None and self.claim.verdict is not Verdict.YOURS:
            raise LeaseLost

    # The process around it.

    @property
    def lost(self) -> bool:
        """Whether the lease is known to be gone; an end that is on its way may take it itself."""
        page = self.page
        return self._lost or (not self.ended and page is not None and page.lost())

    @property
    def pending(self) -> bool:
        """Whether something was reported that the database has not confirmed."""
        return self.buffer.generation > self.acknowledged()

    def describe(self, *, late: bool) -> NewAttempt:
        """What the message says of this attempt. Raises whatever foreign code raises in it."""
        described = self._describe(self.token)
        return replace(described, began_at=self.started_at) if late else described

    def claimed(self, claim: Claim, sent_at: float) -> bool:
        """The answer to the claim (database thread). False if not all that was reported fits."""
        fits = True
        if claim.verdict is Verdict.YOURS and claim.lease is not None:
            fits = self.start_from(claim.progress, claim.committed)
            self.answers.found(claim.callbacks or {})
            self.lease, self.number = claim.lease, claim.attempt
            self.run_token = claim.run_token
            self.confirmed_at = sent_at
            page = self.page
            if page is not None:
                page.set_lease(claim.lease, token=self.token)
        else:
            self._lost = True
        self.claim = claim  # last: the readers look at it first
        return fits

    def start_from(
        self, kept: dict[str, Any] | None, committed: dict[str, Any] | None = None
    ) -> bool:
        """Begin with kept progress; False if not all that was reported before fits beside it."""
        # Whatever is in the row was perhaps edited by hand: what is no object is no progress.
        kept = kept if isinstance(kept, dict) else {}
        reported = (self.buffer.value() or {}).get("metadata") or {}
        fits = self._found.found(kept.get("metadata"), committed)
        complete = self.buffer.lay_over(kept)
        if not fits:
            self._early = reported  # it lies over the old one, until the task has migrated that
        elif kept.get("metadata"):
            self._stamped = True
        elif reported and not self._stamped:
            self.buffer.update_metadata(self._found.stamped({}))
            self._stamped = True
        return complete

    def unclaim(self) -> None:
        """The row was deleted for a replacement that was never sent: begin anew without one."""
        self.claim, self.lease, self.claim_sent = None, None, False
        self._acknowledged = 0  # what the row held went with it
        self.ended = False

    def detach(self) -> None:
        """In a process forked by the task: this attempt is not ours to report for."""
        self._desk, self.page = None, None
        self.buffer.attach(None)

    # One attempt's part in a heartbeat (database thread); a page offers the same.

    def generation(self) -> int:
        return self.buffer.generation

    def acknowledged(self) -> int:
        """The generation that the database confirmed, to this process or to the worker."""
        page = self.page
        return max(self._acknowledged, page.acknowledged() if page is not None else 0)

    def snapshot(self) -> Snapshot:
        return self.buffer.snapshot()

    def answer(
        self, *, acknowledged: int, confirmed_at: float, lost: bool = False, cancel: bool = False
    ) -> None:
        if lost:
            self._lost = True
            return
        self._cancel = self._cancel or cancel
        self._acknowledged = max(self._acknowledged, acknowledged)
        self.buffer.acknowledge(acknowledged)
        self.confirmed_at = confirmed_at
