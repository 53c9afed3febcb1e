"""Runs on the database thread of the worker (of a pool child only for attempts without a page).

Two tiers: attempts with a new snapshot get heartbeat and progress in one statement, the others,
when due, the heartbeat alone. Two statements a cycle, whatever the pool and its size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..errors import RowLocked, StoreRefused
from ..model import Beat, Lease, Pulse, Snapshot
from ..settings import Settings
from ..store.protocol import Store
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
        self, *, acknowledged: int, confirmed_at: float, lost: bool = False, stop: bool = False
    ) -> None: ...


@dataclass(slots=True)
class _Memory:
    """What the heartbeat remembers of an attempt between two cycles; monotonic seconds."""

    beaten_at: float
    write_after: float = 0.0
    refused: int = 0


@dataclass(frozen=True, slots=True)
class HeartbeatCounts:
    """What one pass did."""

    with_progress: int = 0
    alone: int = 0
    lost: int = 0
    skipped: int = 0


Pulses = dict[Lease, Pulse]
Turn = tuple[Beating, Lease, "Snapshot | None"]


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
        self._settings = settings
        self._trouble = trouble
        self._always = always
        self._memories: dict[str, _Memory] = {}
        self._next = 0.0

    def due(self) -> float | None:
        if self._always or any(one.lease for one in self._beating()):
            return self._next
        return None

    def run_once(self, open_store: Callable[[], Store], *, last: bool = False) -> HeartbeatCounts:
        """One cycle. With ``last`` everything that is pending is written, however large."""
        now = time.monotonic()
        self._next = now + min(self._settings.write_interval, self._settings.heartbeat_interval)
        running = [(one, one.lease) for one in self._beating()]
        changed, silent = self._tiers([(o, lease) for o, lease in running if lease], now, last)
        if not changed and not silent:
            return HeartbeatCounts()
        store = open_store()
        pulses, skipped = _send_progress(
            store, [Beat(lease, snapshot) for _, lease, snapshot in changed]
        )
        alone, alone_skipped = _send_alone(store, [lease for _, lease, _ in silent])
        pulses, skipped = pulses | alone, skipped | alone_skipped
        lost = sum(self._answer(turn, pulses, skipped, now) for turn in [*changed, *silent])
        return HeartbeatCounts(len(changed), len(silent), lost, len(skipped))

    def _tiers(
        self, running: list[tuple[Beating, Lease]], now: float, last: bool
    ) -> tuple[list[Turn], list[Turn]]:
        # A claim is as good as a heartbeat, so the first is due one interval after it.
        self._memories = {
            one.token: self._memories.get(one.token) or _Memory(beaten_at=now) for one, _ in running
        }
        changed: list[Turn] = []
        silent: list[Turn] = []
        for one, lease in running:
            memory = self._memories[one.token]
            news = one.generation() > max(one.acknowledged(), memory.refused)
            if news and (last or now >= memory.write_after):
                changed.append((one, lease, one.snapshot()))
            elif last or now - memory.beaten_at >= self._settings.heartbeat_interval:
                silent.append((one, lease, None))
        return changed, silent

    def _answer(self, turn: Turn, pulses: Pulses, skipped: frozenset[Lease], now: float) -> bool:
        """Hand the answer on; True if the lease is gone."""
        one, lease, sent = turn
        pulse = pulses.get(lease)
        if pulse is None:
            gone = lease not in skipped
            if gone:
                one.answer(acknowledged=0, confirmed_at=now, lost=True)
            return gone
        self._memories[one.token].beaten_at = now
        if sent is not None:
            self._note_written(one, sent, pulse, now)
        one.answer(acknowledged=pulse.generation, confirmed_at=now, stop=pulse.cancel_requested)
        return False

    def _note_written(self, one: Beating, sent: Snapshot, pulse: Pulse, now: float) -> None:
        memory = self._memories[one.token]
        if pulse.generation < sent.generation:
            memory.refused = sent.generation
            self._trouble.warn(
                "refused", "celery-awa: the database refused the progress of attempt %s", one.token
            )
        cycles = len(sent.json or "") // EVERY_CYCLE_BYTES
        memory.write_after = now + min(
            cycles * self._settings.write_interval, self._settings.heartbeat_interval
        )


def _send_progress(store: Store, beats: Sequence[Beat]) -> tuple[Pulses, frozenset[Lease]]:
    """Write all; a row that is locked or refused costs no other row anything."""
    if not beats:
        return {}, frozenset()
    try:
        return store.heartbeat_with_progress(beats), frozenset()
    except RowLocked:
        pulses = store.heartbeat_with_progress(beats, skip_locked=True)
        return pulses, store.held([b.lease for b in beats if b.lease not in pulses])
    except StoreRefused:
        if len(beats) == 1:
            return _send_alone(store, [beats[0].lease])
        half = len(beats) // 2
        first, second = _send_progress(store, beats[:half]), _send_progress(store, beats[half:])
        return first[0] | second[0], first[1] | second[1]


def _send_alone(store: Store, leases: Sequence[Lease]) -> tuple[Pulses, frozenset[Lease]]:
    """The same for heartbeats alone. What the server refuses even so counts as skipped."""
    if not leases:
        return {}, frozenset()
    try:
        return store.heartbeat(leases), frozenset()
    except RowLocked:
        pulses = store.heartbeat(leases, skip_locked=True)
        return pulses, store.held([lease for lease in leases if lease not in pulses])
    except StoreRefused:
        if len(leases) == 1:
            return {}, frozenset(leases)
        half = len(leases) // 2
        first, second = _send_alone(store, leases[:half]), _send_alone(store, leases[half:])
        return first[0] | second[0], first[1] | second[1]
