"""What rescue, sending and operators do with the rows of the store in memory."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from celery_awa.model import (
    Cancel,
    Job,
    JobState,
    Lease,
    LostJob,
    Rescue,
    Resend,
    Thresholds,
    UnsentJob,
)

if TYPE_CHECKING:
    from .fake_store import FakeDatabase, Row

#: Seconds until a job that was to be published is due again.
AGAIN = 10.0
#: Rescues in one run.
MOST_RESCUES = 20
STATES = {
    Rescue.REQUEUED: JobState.RETRYABLE,
    Rescue.FAILED: JobState.FAILED,
    Rescue.CANCELLED: JobState.CANCELLED,
}


def lost(
    database: FakeDatabase, thresholds: Thresholds, after_id: int, limit: int
) -> list[LostJob]:
    found = (row for row in _by_id(database) if row.id > after_id)
    return [
        LostJob(row.lease, row.task_id, row.kind, database.at(row.attempted_at))
        for row in found
        if _reason(row, thresholds, database.now)
    ][:limit]


def rescue(
    database: FakeDatabase, leases: Sequence[Lease], thresholds: Thresholds
) -> dict[Lease, Rescue]:
    named = [row for row in _by_id(database) if row.lease in leases]
    free = [row for row in named if row.task_id not in database.locked]
    for row in free:
        database.check(row.task_id)
    taken = {}
    for row in free:
        reason = _reason(row, thresholds, database.now)
        if reason:
            row.errors.append(reason)
            taken[row.lease] = _taken(row, database.now)
    return taken


def _taken(row: Row, now: float) -> Rescue:
    _count_anew_after_an_advance(row)
    verdict = _verdict(row)
    row.state, row.send_after = STATES[verdict], now
    row.duplicate_at = row.deadline_at = None
    if verdict is Rescue.REQUEUED:
        row.rescues += 1
        row.rescues_in_place += 1
        row.run_at = now
    return verdict


def _count_anew_after_an_advance(row: Row) -> None:
    mark = json.dumps((row.progress or {}).get("metadata", {}), sort_keys=True)
    if row.rescue_mark != mark:
        row.rescue_mark, row.rescues_in_place = mark, 0


def _verdict(row: Row) -> Rescue:
    if row.cancel_requested:
        return Rescue.CANCELLED
    may = row.lost_policy == "requeue" and row.whole and row.rescues < MOST_RESCUES
    return Rescue.REQUEUED if may and row.rescues_in_place < row.max_rescues else Rescue.FAILED


def _reason(row: Row, thresholds: Thresholds, now: float) -> str | None:
    if row.state is JobState.WAITING_EXTERNAL:
        late = row.callback_timeout_at is not None and now >= row.callback_timeout_at
        return "TimeoutError: no callback came in time" if late else None
    if row.state is not JobState.RUNNING:
        return None
    silent = now - row.heartbeat_at if row.heartbeat_at is not None else thresholds.stale_after
    if silent >= thresholds.stale_after:
        return "WorkerLostError: no heartbeat"
    if row.duplicate_at is not None and silent >= thresholds.duplicate_after:
        return "WorkerLostError: no heartbeat, and a copy came"
    if row.deadline_at is not None and now >= row.deadline_at:
        return "TimeLimitExceeded: the deadline is over"
    return None


def forsake(database: FakeDatabase, leases: Sequence[Lease]) -> None:
    rows = [row for row in map(database.by_lease, leases) if row is not None]
    for row in rows:
        database.check(row.task_id)
    for row in rows:
        row.heartbeat_at = None


def unsent(database: FakeDatabase, resend_after: float, limit: int) -> list[UnsentJob]:
    now = database.now

    def due_at(row: Row) -> float:
        if row.send_after is not None:
            return row.send_after
        if row.sent_at is None or not (row.waits and row.whole):
            return math.inf
        return max(row.sent_at, row.run_at or 0.0) + resend_after

    due = [row for row in _by_id(database) if due_at(row) <= now]
    free = [row for row in due if row.task_id not in database.locked]
    taken = sorted(free, key=due_at)[:limit]
    for row in taken:
        row.send_after, row.sent_at = now + AGAIN, None
    return [_unsent(database, row) for row in taken]


def _unsent(database: FakeDatabase, row: Row) -> UnsentJob:
    return UnsentJob(
        lease=row.lease,
        task_id=row.task_id,
        kind=row.kind,
        state=row.state,
        run_token=row.run_token,
        envelope=row.envelope,
        attempted_at=database.at(row.attempted_at),
        run_at=None if row.run_at is None else database.at(row.run_at),
        error=row.errors[-1] if row.errors else None,
    )


def settle(database: FakeDatabase, lease: Lease, to: JobState, error: str | None) -> bool:
    row = database.by_id(lease.job_id)
    if row is None:
        return False
    database.check(row.task_id)
    if row.lease != lease or row.state.finished:
        return False
    row.state, row.send_after, row.sent_at = to, None, None
    if error is not None:
        row.errors.append(error)
        row.send_after = database.now
    if to is JobState.COMPLETED:
        row.progress = row.envelope = row.committed = None
        row.callbacks = {}
    return True


def published(database: FakeDatabase, lease: Lease, *, finished: bool) -> None:
    """The message of a job that waits was sent, or the end of a finished one told."""
    row = database.by_id(lease.job_id)
    if row is not None:
        database.check(row.task_id)
        waits = row.state.finished if finished else row.waits
        if row.lease == lease and waits:
            row.send_after = None
            row.sent_at = None if finished else database.now


def request_cancel(database: FakeDatabase, task_id: str) -> Cancel:
    row = database.rows.get(task_id)
    if row is None:
        return Cancel.UNKNOWN
    if row.state.finished:
        return Cancel.FINISHED
    row.cancel_requested = True
    if row.state is JobState.RUNNING:
        return Cancel.REQUESTED
    row.state, row.send_after, row.sent_at = JobState.CANCELLED, database.now, None
    return Cancel.CANCELLED


def resend(database: FakeDatabase, task_id: str, keep_progress: bool) -> Resend:
    row = database.rows.get(task_id)
    if row is None:
        return Resend.UNKNOWN
    if row.state is JobState.RUNNING or (keep_progress and not row.state.finished):
        return Resend.LIVE
    if not row.whole:
        return Resend.NO_MESSAGE
    if not keep_progress:
        row.progress, row.generation = None, 0
        row.committed, row.callbacks = None, {}
    row.state, row.send_after, row.sent_at = JobState.AVAILABLE, database.now, None
    row.cancel_requested, row.run_at = False, None
    row.rescues, row.rescues_in_place, row.rescue_mark = 0, 0, None
    return Resend.DONE


def edit_checkpoint(database: FakeDatabase, task_id: str, metadata: str | None) -> bool | None:
    row = database.rows.get(task_id)
    if row is None or row.state is JobState.RUNNING:
        return None if row is None else False
    progress = {name: value for name, value in (row.progress or {}).items() if name != "metadata"}
    if metadata is not None:
        progress["metadata"] = json.loads(metadata)
    row.progress, row.committed = progress or None, None
    return True


def job(database: FakeDatabase, row: Row) -> Job:
    """The row as a read sees it."""
    known = {
        name: getattr(row, name)
        for name in ("id", "task_id", "kind", "state", "attempt", "retries", "rescues", "run_lease")
    }
    unknown = dict.fromkeys(field.name for field in fields(Job))
    times = {"created_at": database.at(row.attempted_at)}
    texts = {"args_repr": "", "kwargs_repr": "", "errors": ()}
    return Job(**(unknown | times | texts | known | {"progress": row.progress}))


def _by_id(database: FakeDatabase) -> Iterable[Row]:
    return sorted(database.rows.values(), key=lambda row: row.id)
