"""Runs in each process that executes tasks: a pool child, or the worker itself (solo, threads).

Tasks call it from their threads; what it does with the database happens on its database thread.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from ..errors import AwaError, RowLocked, StoreUnavailable
from ..model import Ended, JobState, Lease, NewAttempt, Transition
from ..settings import Settings
from ..store.protocol import Store
from ..store.through import checkpoint_through
from .adoption import Adoption
from .attempt import Attempt
from .attempt_writes import committed_text, flush, forsake
from .claims import Claims
from .completed import Completed
from .database_thread import DatabaseThread
from .ending import Ending, to_page, with_last_snapshot
from .errand import Errand
from .heartbeat import Heartbeat
from .in_flight import InFlight
from .last_words import give_up
from .own_pages import OwnPages
from .slate import Slate
from .trouble import Trouble

T = TypeVar("T")


class TaskProcess:
    """The attempts of one process and their way to the database."""

    def __init__(
        self,
        settings: Settings,
        open_store: Callable[[], Store],
        trouble: Trouble,
        *,
        slate: Slate | None = None,
        idle_after: float | None = None,
        adoption: Adoption | None = None,
        blocks: Collection[signal.Signals] = (),
    ) -> None:
        """``slate`` and ``blocks`` in a pool child, ``adoption`` in a worker without children.

        ``blocks``: signals that the database thread leaves to the task's.
        """
        self.settings = settings
        self.trouble = trouble
        self.in_flight = InFlight()
        self.database = DatabaseThread(open_store, trouble, idle_after=idle_after, blocks=blocks)
        self.heartbeat = Heartbeat(self._beating, settings, trouble)
        self._claims = Claims(self.in_flight, settings, trouble)
        self._completed = Completed(self.database.note_dropped, trouble)
        for service in (self._claims, self.heartbeat, self._completed):
            self.database.add_service(service)
        if adoption is not None:
            self.database.add_service(adoption)
        self._slate = slate
        self._stopping = self._dying = False
        self._pages = OwnPages(slate, self.in_flight)
        #: Ends on their way to the database, by token.
        self._ends: dict[str, Errand[Ended]] = {}

    def attempts(self) -> int:
        """How many attempts run here."""
        return len(self.in_flight)

    def start(self) -> None:
        """In a worker without children: a first look at the database tells what is wrong."""
        self.database.look()

    def worker_stopping(self) -> None:
        """Ask all attempts to stop, those to come too. Safe in a signal's handler."""
        self._stopping = True

    @property
    def stopping(self) -> bool:
        """Whether the worker said that it is stopping: here, or on the slate.

        A pool child that has no slate cannot hear of it.
        """
        return self._stopping or (self._slate is not None and self._slate.is_stopping())

    # The task's thread.

    def begin(self, attempt: Attempt, *, claim: bool, look: bool = False) -> None:
        """Note an attempt. Claims it now if asked, or if a look at the rows finds its task."""
        attempt.claim_due = attempt.started_at + self.settings.claim_after
        self.in_flight.add(attempt)
        self._pages.give(attempt)
        if claim or look:
            self._claim_at_start(attempt, only_if_known=not claim)
        if attempt.claim is None:
            self.database.expect(attempt.claim_due)

    def learn(self, attempt: Attempt, timeout: float) -> None:
        """Claim now and wait for the answer; StoreUnavailable if it does not come in time."""
        late = time.monotonic() - attempt.started_at > self.settings.claim_after
        self.database.ask(lambda store: self._claims.claim(store, attempt, late=late), timeout)

    def flush(self, attempt: Attempt, timeout: float) -> bool:
        """Write the snapshot and wait; True once it is confirmed, False if the lease is lost."""
        attempt.buffer.resync()
        try:
            return self.database.ask(lambda store: flush(store, self._claims, attempt), timeout)
        except StoreUnavailable:
            raise
        except AwaError as exc:
            raise StoreUnavailable(f"the database refused the progress: {exc}") from exc

    def commit(self, attempt: Attempt, connection: Any, values: Mapping[str, Any]) -> bool:
        """Write values into the checkpoint through the task's connection, on the task's thread.

        False if the attempt has no lease. Raises InvalidProgress and ProgressTooLarge, and
        whatever the connection raises.
        """
        lease = attempt.lease
        if lease is None:
            return False
        text = committed_text(attempt, values, self.settings.max_progress_bytes)
        return checkpoint_through(
            connection,
            self.settings.schema,
            lease,
            attempt.token,
            attempt.terms.version,
            text,
        )

    def expect_callback(
        self, attempt: Attempt, callback_id: str, name: str, timeout: float
    ) -> bool:
        """Note in the row what a callback is to be known by; StoreUnavailable if that fails."""
        lease = attempt.lease
        if lease is None:
            return False
        return self.database.ask(
            lambda store: store.expect_callback(lease, attempt.token, callback_id, name), timeout
        )

    def end(self, attempt: Attempt, transition: Transition) -> Ended | None:
        """End an attempt, once; None where the answer is not known (yet) or nothing is to write."""
        errand = self._leave(attempt, lambda: self._hand_over_end(attempt, transition))
        if errand is None:
            return None
        if not errand.done:
            self._leave_on_page(attempt, transition)
        return errand.answer

    def forsake(self, attempt: Attempt) -> None:
        """In place of an end: the attempt was aborted, and the rescue decides what becomes of it.

        Its last snapshot is written and its lease given up. Waits as :meth:`end` does.
        """

        def hand_over() -> Errand[None]:
            return self.database.post(
                lambda store: forsake(store, self._claims, attempt),
                settled=lambda: self._forget(attempt),
                brief=True,
            )

        self._leave(attempt, hand_over)

    def end_unstarted(self, described: NewAttempt, transition: Transition) -> None:
        """End the run of a message that is not executed (revoked, expired). Does not wait."""
        ending = Ending(described.token, None, described, replace(transition, uncounted=True))
        self.database.post(ending.write)

    def owns(self, attempt: Attempt) -> bool:
        """Whether the attempt still has its lease, as far as can be told within a second.

        The database is asked, however young the last heartbeat is: a newer attempt may have
        taken the job since.
        """
        lease, lost = attempt.lease, attempt.lost
        if lease is None:
            return not lost
        try:
            return self.database.ask_briefly(lambda store: store.owns(lease))
        except AwaError:
            return not lost

    def reopen(self, attempt: Attempt) -> None:
        """The row was deleted for a replacement that could not be sent: go on without one."""
        errand = self._ends.pop(attempt.token, None)
        if errand is not None:
            self.database.cancel(errand)
        self._forget(attempt)
        attempt.unclaim()
        self.begin(attempt, claim=False)

    def sent(self, lease: Lease) -> None:
        """The message that continues this lease's job was published. Does not wait."""
        self.database.post(lambda store: store.sent(lease))

    def stop(self, timeout: float, *, dying: bool = False) -> bool:
        """Write what is left, for ``timeout`` seconds at most; True if all was confirmed.

        ``dying``: this process ends right after, whatever runs in it. So the leases of attempts
        that no page speaks for are given up.
        """
        self._dying = dying
        running = any(dying or one.lease or one.generation() for one in self._beating())
        if running or self._completed.due() is not None:
            self.database.post(self._write_rest)
        return self.database.stop(timeout)

    # A process forked by a task.

    def detach(self) -> None:
        """None of the attempts is this process's to report for."""
        for attempt in self.in_flight.all():
            attempt.detach()

    # Steps.

    def _claim_at_start(self, attempt: Attempt, *, only_if_known: bool) -> None:
        def work(store: Store) -> None:
            if not only_if_known or store.knows(attempt.task_id):
                self._claims.claim(store, attempt, late=False)

        if not only_if_known:
            attempt.claim_due = attempt.started_at  # if the wait ends first, the service claims
        try:
            self.database.ask_briefly(work)
        except AwaError:
            pass

    def _leave(
        self, attempt: Attempt, hand_over: Callable[[], Errand[T] | None]
    ) -> Errand[T] | None:
        """End it, once; None where it had ended, or nothing is to write."""
        if attempt.ended:
            return None
        gone = attempt.lost or attempt.unclaimable is not None
        try:
            # Before ``claim_sent`` is looked at: see the head of attempt.py.
            attempt.ended = True
            errand = None if gone else hand_over()
            if errand is None:
                self._forget(attempt)
                return None
        except BaseException:
            attempt.ended = False  # struck in the midst of it: it can be ended again
            raise
        self.database.wait_briefly(errand)
        return errand

    def _hand_over_end(self, attempt: Attempt, transition: Transition) -> Errand[Ended] | None:
        """Queue the end; None where there is nothing to wait for."""
        if transition.to is JobState.COMPLETED:
            if not attempt.claim_sent:
                self._complete_unclaimed(attempt)
                return None
        else:
            transition = with_last_snapshot(transition, attempt.snapshot())
        claimed = attempt.lease is not None and transition.to is JobState.COMPLETED
        described = None if claimed else self._described(attempt)

        def write(store: Store) -> Ended:
            # Both as they are by then: a claim may have been under way, which lays what was
            # reported over what was kept.
            lease, last = attempt.lease, transition
            if last.snapshot is not None:
                last = replace(last, snapshot=attempt.snapshot())
            return Ending(attempt.token, lease, described, last).write(store)

        def settled() -> None:
            self._ends.pop(attempt.token, None)
            self._forget(attempt)

        errand = self.database.post(write, settled=settled, brief=True)
        self._ends[attempt.token] = errand
        if errand.done:  # it was quicker than the line above
            self._ends.pop(attempt.token, None)
        return errand

    def _complete_unclaimed(self, attempt: Attempt) -> None:
        """Nothing was reported: nothing is written. Else the row follows, batched."""
        if attempt.generation():
            described = self._described(attempt)
            if described is not None:
                self.database.expect(self._completed.add(described))

    def _described(self, attempt: Attempt) -> NewAttempt | None:
        try:
            return attempt.describe(late=True)
        except Exception as exc:  # foreign reprs and the like; the lease is enough where known
            self.trouble.warn("bug", "celery-awa: an attempt cannot be described", exc_info=exc)
            return None

    def _leave_on_page(self, attempt: Attempt, transition: Transition) -> None:
        """For the worker to write, should this process die before the end is confirmed."""
        page = attempt.page
        if page is not None and attempt.lease is not None:
            page.set_end(to_page(transition), token=attempt.token)

    def _forget(self, attempt: Attempt) -> None:
        self._pages.take_back(attempt)
        self.in_flight.discard(attempt)

    def _write_rest(self, store: Store) -> None:
        self._claims.run_once(lambda: store, last=True)
        self.heartbeat.run_once(lambda: store, last=True)
        left = self._completed.run_once(lambda: store)
        if self._dying:
            left += self._give_up_running(store)
        if left:
            raise RowLocked  # again, as long as there is time

    def _give_up_running(self, store: Store) -> int:
        """Give up the leases of what still runs; returns how many rows are locked."""
        running = {lease: one for one in self._beating() if (lease := one.lease) is not None}
        locked = give_up(list(running), store, self.trouble)
        for lease, attempt in running.items():
            if lease not in locked:
                self._forget(attempt)  # a heartbeat would take it back
        return len(locked)

    def _beating(self) -> Iterator[Attempt]:
        """Attempts that no page speaks for."""
        return (a for a in self.in_flight.all() if a.page is None and not a.ended and not a.lost)
