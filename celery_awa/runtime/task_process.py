"""Runs in each process that executes tasks: a pool child, or the worker itself (solo, threads).

Tasks call it from their threads; what it does with the database happens on its database thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from ..errors import AwaError, StoreRefused, StoreUnavailable
from ..model import Beat, Ended, JobState, Lease, NewAttempt, Transition
from ..settings import Settings
from ..store.protocol import Store
from .attempt import Attempt
from .claims import Claims
from .database_thread import KEPT_LIMIT, DatabaseThread, Errand
from .ending import Ending, to_page, with_last_snapshot
from .heartbeat import Heartbeat
from .in_flight import InFlight
from .page import Page
from .slate import Slate
from .trouble import Trouble

#: Seconds that a task waits for bookkeeping which it did not ask for.
COURTESY = 1.0
#: Seconds for which completed rows gather into one batch, and the most of them.
GATHER, BATCH = 0.2, 500


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
    ) -> None:
        self.settings = settings
        self.trouble = trouble
        self.in_flight = InFlight()
        self.database = DatabaseThread(open_store, trouble, idle_after=idle_after)
        self.heartbeat = Heartbeat(self._beating, settings, trouble)
        self._claims = Claims(self.in_flight, settings, trouble)
        self.database.add_service(self._claims)
        self.database.add_service(self.heartbeat)
        self._slate = slate
        self._idle_pages: list[Page] = []
        self._completed: list[NewAttempt] = []

    def attempts(self) -> int:
        """How many attempts run here."""
        return len(self.in_flight)

    def start(self) -> None:
        """In a worker without children: a first look at the database tells what is wrong."""
        self.database.post(lambda store: None)

    # The task's thread.

    def begin(self, attempt: Attempt, *, claim: bool, look: bool = False) -> None:
        """Note an attempt. Claims it now if asked, or if a look at the rows finds its task."""
        attempt.page = self._take_page(attempt)
        attempt.buffer.attach(attempt.page)
        attempt.claim_due = attempt.started_at + self.settings.claim_after
        self.in_flight.add(attempt)
        if claim or look:
            self._claim_at_start(attempt, only_if_known=not claim)
        else:
            self.database.expect(attempt.claim_due)

    def learn(self, attempt: Attempt, timeout: float) -> None:
        """Claim now and wait for the answer; StoreUnavailable if it does not come in time."""
        late = time.monotonic() - attempt.started_at > self.settings.claim_after

        def work(store: Store) -> None:
            self._claims.claim(store, attempt, late=late)

        self.database.ask(work, timeout)

    def flush(self, attempt: Attempt, timeout: float) -> bool:
        """Write the snapshot and wait; True once it is confirmed, False if the lease is lost."""

        def work(store: Store) -> bool:
            self._claims.claim(store, attempt, late=True)
            if attempt.lease is None or attempt.lost or attempt.ended:
                return False
            return self._write_now(store, attempt, attempt.lease)

        attempt.buffer.resync()
        try:
            return self.database.ask(work, timeout)
        except StoreUnavailable:
            raise
        except AwaError as exc:
            raise StoreUnavailable(f"the database refused the progress: {exc}") from exc

    def end(self, attempt: Attempt, transition: Transition) -> Ended | None:
        """End an attempt, once; None where the answer is not known (yet) or nothing is to write."""
        if attempt.ended:
            return None
        attempt.ended = True
        if attempt.lost or attempt.unclaimable is not None:
            self._forget(attempt)
            return None
        success = transition.to is JobState.COMPLETED
        if success and not attempt.claim_sent:
            self._completed_unclaimed(attempt)
            return None
        if not success:
            transition = with_last_snapshot(transition, attempt.snapshot())
        return self._end_and_wait(attempt, transition)

    def end_unstarted(self, described: NewAttempt, transition: Transition) -> None:
        """End the run of a message that is not executed (revoked, expired). Does not wait."""
        ending = Ending(described.token, None, lambda: described, transition)
        self.database.post(ending.write)

    def owns(self, attempt: Attempt) -> bool:
        """Whether the attempt still has its lease, as far as can be told within a second."""
        lease = attempt.lease
        silent = time.monotonic() - attempt.heard_of_at
        if lease is None or (not attempt.lost and silent <= self.settings.stale_after):
            return not attempt.lost
        if not self.database.answering:
            return not attempt.lost
        try:
            return self.database.ask(lambda store: store.owns(lease), COURTESY)
        except AwaError:
            return not attempt.lost

    def reopen(self, attempt: Attempt) -> None:
        """The row was deleted for a replacement that could not be sent: go on without one."""
        attempt.unclaim()
        self.begin(attempt, claim=False)

    def sent(self, lease: Lease) -> None:
        """The message that continues this lease's job was published. Does not wait."""
        self.database.post(lambda store: store.sent(lease))

    def stop(self, timeout: float) -> bool:
        """Write what is left, for ``timeout`` seconds at most; True if all was confirmed."""
        if any(attempt.lease for attempt in self._beating()):
            self.database.post(lambda store: self.heartbeat.run_once(lambda: store, last=True))
        return self.database.stop(timeout)

    # A process forked by a task.

    def detach(self) -> None:
        """None of the attempts is this process's to report for."""
        for attempt in self.in_flight.all():
            attempt.detach()

    # Steps.

    def _claim_at_start(self, attempt: Attempt, *, only_if_known: bool) -> None:
        def work(store: Store) -> None:
            if only_if_known and not store.knows(attempt.task_id):
                return
            self._claims.claim(store, attempt, late=False)

        if not only_if_known:
            attempt.claim_due = attempt.started_at  # if the wait ends first, the service claims
        if self.database.answering:
            try:
                self.database.ask(work, COURTESY)
                return
            except AwaError:
                pass
        self.database.expect(attempt.claim_due)

    def _write_now(self, store: Store, attempt: Attempt, lease: Lease) -> bool:
        sent_at = time.monotonic()
        snapshot = attempt.snapshot()
        pulse = store.heartbeat_with_progress([Beat(lease, snapshot)]).get(lease)
        if pulse is None:
            attempt.answer(acknowledged=0, confirmed_at=sent_at, lost=True)
            return False
        attempt.answer(acknowledged=pulse.generation, confirmed_at=sent_at)
        return True

    def _end_and_wait(self, attempt: Attempt, transition: Transition) -> Ended | None:
        try:
            described = attempt.describe(late=True)
        except Exception as exc:  # foreign reprs and the like; the lease is enough where known
            self.trouble.warn("bug", "celery-awa: an attempt cannot be described", exc_info=exc)
            if attempt.lease is None:
                self._forget(attempt)
                return None
        errand: Errand[Ended] = self.database.post(
            lambda store: self._write_end(
                store, Ending(attempt.token, attempt.lease, lambda: described, transition), attempt
            )
        )
        if self.database.answering:
            errand.done.wait(COURTESY)
        if not errand.done.is_set() and attempt.page is not None and attempt.lease is not None:
            attempt.page.set_end(to_page(transition), token=attempt.token)
        return errand.answer

    def _write_end(self, store: Store, ending: Ending, attempt: Attempt) -> Ended:
        ended = ending.write(store)
        if attempt.ended:
            self._forget(attempt)
        return ended

    def _completed_unclaimed(self, attempt: Attempt) -> None:
        """Nothing was reported: nothing is written. Else the row follows, batched."""
        self._forget(attempt)
        if not attempt.generation():
            return
        if len(self._completed) >= KEPT_LIMIT:
            self.trouble.warn("dropped", "celery-awa dropped the row of a completed task")
            return
        self._completed.append(attempt.describe(late=True))
        if len(self._completed) == 1:
            self.database.post(self._record_completed, after=GATHER)

    def _record_completed(self, store: Store) -> None:
        # The list empties only as rows are confirmed; who appends meanwhile is in the next batch.
        while batch := self._completed[:BATCH]:
            try:
                store.record_completed(batch)
            except StoreRefused:
                self._record_singly(store, batch)
            del self._completed[: len(batch)]

    def _record_singly(self, store: Store, batch: list[NewAttempt]) -> None:
        for described in batch:
            try:
                store.record_completed([described])
            except StoreRefused as exc:
                self.trouble.warn(
                    "refused", "celery-awa: no row for task %s: %s", described.task_id, exc
                )

    def _take_page(self, attempt: Attempt) -> Page | None:
        page = None
        if self._idle_pages:
            page = self._idle_pages.pop()
        elif self._slate is not None:
            page = self._slate.take_page()
        if page is not None:
            page.begin(attempt.token, attempt.task_id)
        return page

    def _forget(self, attempt: Attempt) -> None:
        self.in_flight.discard(attempt)
        page, attempt.page = attempt.page, None
        if page is not None:
            attempt.buffer.attach(None)
            page.clear(token=attempt.token)
            self._idle_pages.append(page)

    def _beating(self) -> Iterator[Attempt]:
        """Attempts that no page speaks for."""
        return (a for a in self.in_flight.all() if a.page is None and not a.ended and not a.lost)
