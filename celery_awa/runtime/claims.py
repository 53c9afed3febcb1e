"""Runs on the database thread of the process that executes the task: gives attempts their row.

An attempt is claimed once it has run for ``awa_claim_after``, or at the next write cycle after it
reported something; a short task that reports nothing never is (docs/adr/0002).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from ..errors import RowLocked, StoreRefused
from ..model import Claim, NewAttempt
from ..settings import Settings
from ..store.protocol import Store
from .attempt import Attempt
from .in_flight import InFlight
from .trouble import Trouble

#: Seconds until a claim is tried again whose row was locked.
LOCKED_PAUSE = 0.5


class Claims:
    """The service that claims attempts which have run for a while."""

    def __init__(self, in_flight: InFlight, settings: Settings, trouble: Trouble) -> None:
        self._in_flight = in_flight
        self._settings = settings
        self._trouble = trouble
        self._looked_at = 0.0

    def due(self) -> float | None:
        return min((self._due_at(attempt) for attempt in self._unclaimed()), default=None)

    def run_once(self, open_store: Callable[[], Store], *, last: bool = False) -> int:
        """Claim what is due, with ``last`` all that reported; returns how many were claimed."""
        self._looked_at = now = time.monotonic()
        due = [
            attempt
            for attempt in self._unclaimed()
            if self._due_at(attempt) <= now or (last and attempt.generation())
        ]
        # Who was tried before goes last, so that one whose claim fails holds up no other.
        due.sort(key=lambda attempt: attempt.claim_tried_at)
        for count, attempt in enumerate(due):
            attempt.claim_tried_at = now
            try:
                self.claim(open_store(), attempt, late=True)
            except RowLocked:
                attempt.claim_not_before = time.monotonic() + LOCKED_PAUSE
                return count  # half a second went by: errands first, then the others
        return len(due)

    def claim(self, store: Store, attempt: Attempt, *, late: bool, forsaken: bool = False) -> None:
        """Claim one attempt, unless it has its answer, has ended or cannot be claimed.

        ``forsaken``: it is over, but no end of it will be written.
        """
        if attempt.claim is not None or attempt.unclaimable is not None:
            return
        attempt.claim_sent = True
        if attempt.ended and not forsaken:
            return
        try:
            described = replace(attempt.describe(late=late), envelope=attempt.envelope())
        except Exception as exc:  # a foreign repr, a serializer
            self._trouble.warn("bug", "celery-awa: an attempt cannot be described", exc_info=exc)
            attempt.unclaimable = f"it cannot be described: {type(exc).__name__}"
            return
        self._claim_as(store, attempt, described)

    def _claim_as(self, store: Store, attempt: Attempt, described: NewAttempt) -> None:
        sent_at = time.monotonic()
        try:
            claim = store.claim(described)
        except StoreRefused as exc:
            self._give_up(attempt, str(exc))
        else:
            self._hand_on(attempt, claim, sent_at)

    def _hand_on(self, attempt: Attempt, claim: Claim, sent_at: float) -> None:
        if not attempt.claimed(claim, sent_at):
            self._trouble.warn(
                "overflow",
                "celery-awa: what task %s reported before its claim and what it left earlier are "
                "too large together; the earlier checkpoint was kept",
                attempt.task_id,
            )

    def _give_up(self, attempt: Attempt, reason: str) -> None:
        attempt.unclaimable = reason
        self._trouble.warn(
            "refused",
            "celery-awa: task %s runs without a row, the database refused it: %s",
            attempt.task_id,
            reason,
        )

    def _unclaimed(self) -> list[Attempt]:
        return [
            attempt
            for attempt in self._in_flight.all()
            if attempt.claim is None and attempt.unclaimable is None and not attempt.ended
        ]

    def _due_at(self, attempt: Attempt) -> float:
        """Reporting wakes nobody, so whether something was reported is looked at every cycle."""
        cycle = attempt.started_at + self._settings.write_interval
        if not attempt.generation():
            cycle = max(cycle, self._looked_at + self._settings.write_interval)
        return max(min(attempt.claim_due, cycle), attempt.claim_not_before)
