"""Runs in the process that executes the task: what its attempts write between claim and end.

On the database thread, but ``committed_text``, which is the task's.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from ..errors import ProgressTooLarge, StoreRefused
from ..model import Beat, Lease
from ..progress_values import encode_pairs
from ..store.protocol import Store
from .attempt import Attempt
from .claims import Claims


def flush(store: Store, claims: Claims, attempt: Attempt) -> bool:
    """Write the snapshot of an attempt; True once it is confirmed, False if the lease is lost."""
    claims.claim(store, attempt, late=True)
    if attempt.unclaimable is not None:
        raise StoreRefused(attempt.unclaimable)
    if attempt.lease is None or attempt.lost or attempt.ended:
        return False
    # Another thread's flush may have written this one's as well.
    return not attempt.pending or _write_now(store, attempt, attempt.lease)


def _write_now(store: Store, attempt: Attempt, lease: Lease) -> bool:
    sent_at = time.monotonic()
    snapshot = attempt.snapshot()
    pulse = store.heartbeat_with_progress([Beat(lease, snapshot)]).get(lease)
    if pulse is None:
        attempt.answer(acknowledged=0, confirmed_at=sent_at, lost=True)
        return False
    attempt.answer(
        acknowledged=pulse.generation, confirmed_at=sent_at, cancel=pulse.cancel_requested
    )
    if pulse.generation < snapshot.generation:
        raise StoreRefused("the row does not hold it")
    return True


def forsake(store: Store, claims: Claims, attempt: Attempt) -> None:
    """Leave an attempt that is over, but has no end, to the rescue: it finds it stale at once.

    Its row may be the only copy of its message, so it gets one if it has none yet.
    """
    claims.claim(store, attempt, late=True, forsaken=True)
    lease = attempt.lease
    if lease is None:  # another has the job, or the database refused it
        return
    if attempt.pending:
        try:
            store.heartbeat_with_progress([Beat(lease, attempt.snapshot())])
        except StoreRefused:  # the job goes on from what it has
            pass
    # Last: a heartbeat takes it back.
    store.forsake([lease])


def committed_text(attempt: Attempt, values: Mapping[str, Any], limit: int) -> str:
    """What ``checkpoint_in`` is to write, as JSON text.

    Raises InvalidProgress, and ProgressTooLarge where it and what was reported are too large
    together.
    """
    encode_pairs(values, limit)  # refuses what is no mapping, before it is stamped
    stamped = encode_pairs(attempt.stamped(values), limit)
    text = f"{{{','.join(stamped.values())}}}"
    size = len(text.encode()) + len((attempt.snapshot().json or "").encode())
    if size > limit:
        raise ProgressTooLarge(size, limit)
    return text
