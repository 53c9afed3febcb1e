"""Runs on the database thread: rows of attempts that succeeded before they were claimed.

Who reports leaves a row. It is batched and not waited for; ``add`` is the task's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ..errors import RowLocked, StoreRefused
from ..model import NewAttempt
from ..store.protocol import Store
from .trouble import Trouble

#: Seconds for which rows gather into one batch, and the most of them.
GATHER, BATCH = 0.2, 500
#: Seconds until a locked row is tried again.
LOCKED_PAUSE = 0.5
#: Rows that one process keeps while the database is away.
LIMIT = 1_000


class Completed:
    """The service that records them. ``dropped`` is called for each one that is given up."""

    def __init__(self, dropped: Callable[[], None], trouble: Trouble) -> None:
        self._dropped = dropped
        self._trouble = trouble
        self._waiting: list[NewAttempt] = []
        self._due: float | None = None

    def add(self, described: NewAttempt) -> float:
        """Record it soon; returns when."""
        if len(self._waiting) >= LIMIT:
            self._dropped()
        else:
            self._waiting.append(described)
        if self._due is None:
            self._due = time.monotonic() + GATHER
        return self._due

    def due(self) -> float | None:
        return (self._due or 0.0) if self._waiting else None

    def run_once(self, open_store: Callable[[], Store]) -> int:
        """Record all; returns how many are left, because their rows are locked."""
        self._due = None  # whoever adds from here on sets it again
        todo, left = len(self._waiting), 0
        while todo:
            batch = self._waiting[: min(BATCH, todo)]
            locked = self._record(open_store(), batch)
            # The list empties only as rows are confirmed, so what failed is tried again.
            self._waiting += locked
            del self._waiting[: len(batch)]
            todo -= len(batch)
            left += len(locked)
        if left:
            self._due = time.monotonic() + LOCKED_PAUSE
        return left

    def _record(self, store: Store, batch: list[NewAttempt]) -> list[NewAttempt]:
        """Record a batch, one by one if need be; returns those whose row is locked."""
        try:
            store.record_completed(batch)
            return []
        except RowLocked:
            if len(batch) == 1:
                return batch
        except StoreRefused as exc:
            if len(batch) == 1:
                self._trouble.warn(
                    "refused", "celery-awa: no row for task %s: %s", batch[0].task_id, exc
                )
                return []
        return [left for one in batch for left in self._record(store, [one])]
