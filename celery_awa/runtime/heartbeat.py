"""Runs on the database thread of the worker (of a pool child only for attempts without a page).

Two tiers: attempts with a new snapshot get heartbeat and progress in one statement, the others,
when due, the heartbeat alone. Two statements a cycle, whatever the pool and its size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from ..model import Beat, Lease, Snapshot
from ..settings import Settings
from ..store.protocol import Store
from .beats import Sent, send_alone, send_with_progress
from .trouble import Trouble

#: Bytes of a snapshot that may be written every cycle; n times as much waits n cycles.
EVERY_CYCLE_BYTES = 8_192


class Beating(Protocol):
    """One running attempt as the heartbeat sees it: a page of the slate, or the attempt itself."""

    @property
    def token(self) -> str: ...
    @property
    def lease(self) -> Lease | None: ...
    def generation(self) -> int: ...
    def acknowledged(self) -> int: ...
    def snapshot(self) -> Snapshot: ...
    def answer(
        self, *, acknowledged: int, confirmed_at: float, lost: bool = False, cancel: bool = False
    ) -> None: ...


@dataclass(slots=True)
class _Memory:
    """What the heartbeat remembers of a lease between two cycles; monotonic seconds."""

    beaten_at: float
    write_after: float = 0.0
    #: The generation that the database refused.
    refused: int = 0
    lost: bool = False


@dataclass(frozen=True, slots=True)
class HeartbeatCounts:
    """What one pass did."""

    with_progress: int = 0
    alone: int = 0
    lost: int = 0
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class _Turn:
    """One attempt's part in a pass; without a snapshot it gets the heartbeat alone."""

    one: Beating
    lease: Lease
    memory: _Memory
    snapshot: Snapshot | None = None


class Heartbeat:
    """The service that proves that attempts live, and carries their progress along.

    ``always``: look every cycle, since attempts come to be without this process hearing of it.
    """

    def __init__(
        self,
        beating: Callable[[], Iterable[Beating]],
        settings: Settings,
        trouble: Trouble,
        *,
        always: bool = False,
    ) -> None:
        self._beating = beating
        self._interval = settings.heartbeat_interval
        self._cycle = min(settings.write_interval, settings.heartbeat_interval)
        self._trouble = trouble
        self._always = always
        self._memories: dict[Lease, _Memory] = {}
        self._next = 0.0

    def due(self) -> float | None:
        if self._always or any(one.lease for one in self._beating()):
            return self._next
        return None

    def run_once(self, open_store: Callable[[], Store], *, last: bool = False) -> HeartbeatCounts:
        """One cycle. With ``last`` everything that is pending is written, however large."""
        now = time.monotonic()
        self._next = now + self._cycle
        turns = list(self._turns(now, last))
        if not turns:
            return HeartbeatCounts()
        changed = [Beat(turn.lease, turn.snapshot) for turn in turns if turn.snapshot]
        silent = [turn.lease for turn in turns if not turn.snapshot]
        store = open_store()
        sent = send_with_progress(store, changed) | send_alone(store, silent)
        lost = sum(self._answer(turn, sent, now) for turn in turns)
        return HeartbeatCounts(len(changed), len(silent), lost, len(sent.skipped))

    def _turns(self, now: float, last: bool) -> Iterable[_Turn]:
        running = [(one, lease) for one in self._beating() if (lease := one.lease)]
        # A claim is as good as a heartbeat, so the first is due one interval after it; and what
        # is seen for the first time was claimed up to a cycle ago.
        claimed = now - self._cycle
        self._memories = {
            lease: self._memories.get(lease) or _Memory(beaten_at=claimed) for _, lease in running
        }
        for one, lease in running:
            memory = self._memories[lease]
            if memory.lost:
                continue  # it was told
            news = one.generation() > max(one.acknowledged(), memory.refused)
            if news and (last or now >= memory.write_after):
                yield _Turn(one, lease, memory, one.snapshot())
            elif last or self._is_due(memory, now):
                yield _Turn(one, lease, memory)

    def _is_due(self, memory: _Memory, now: float) -> bool:
        # In the cycle that is nearest to the interval, so that a long cycle does not double it.
        return now - memory.beaten_at > self._interval - self._cycle / 2

    def _answer(self, turn: _Turn, sent: Sent, now: float) -> bool:
        """Hand the answer on; True if the lease is gone."""
        pulse = sent.pulses.get(turn.lease)
        if pulse is None:
            turn.memory.lost = turn.lease not in sent.skipped
            if turn.memory.lost:
                turn.one.answer(acknowledged=0, confirmed_at=now, lost=True)
            return turn.memory.lost
        turn.memory.beaten_at = now
        if turn.snapshot is not None:
            self._note_written(turn, turn.snapshot, pulse.generation, now)
        turn.one.answer(
            acknowledged=pulse.generation, confirmed_at=now, cancel=pulse.cancel_requested
        )
        return False

    def _note_written(self, turn: _Turn, sent: Snapshot, stored: int, now: float) -> None:
        if stored < sent.generation:
            turn.memory.refused = sent.generation
            self._trouble.warn(
                "refused",
                "celery-awa: the database refused the progress of attempt %s",
                turn.one.token,
            )
        cycles = len(sent.json or "") // EVERY_CYCLE_BYTES
        turn.memory.write_after = now + min(cycles * self._cycle, self._interval)
