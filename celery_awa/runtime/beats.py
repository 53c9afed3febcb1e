"""Runs on the database thread: sends heartbeats so that no row costs another its own.

A locked row is left out when the statement is repeated, a refused one is found by halves. What
was left out is looked up without a lock, so that it is not taken for a lease that is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ..errors import RowLocked, StoreRefused
from ..model import Beat, Lease, Pulse
from ..store.protocol import Store

T = TypeVar("T", Beat, Lease)


@dataclass(frozen=True, slots=True)
class Sent:
    """What became of heartbeats: answered, or skipped; what is in neither hit no row."""

    pulses: dict[Lease, Pulse] = field(default_factory=dict)
    skipped: frozenset[Lease] = frozenset()

    def __or__(self, other: Sent) -> Sent:
        return Sent(self.pulses | other.pulses, self.skipped | other.skipped)


def send_with_progress(store: Store, beats: Sequence[Beat]) -> Sent:
    """Heartbeats and snapshots. Where a snapshot is refused, the heartbeat is sent alone."""

    def write(some: Sequence[Beat], skip_locked: bool) -> Sent:
        pulses = store.heartbeat_with_progress(some, skip_locked=skip_locked)
        return _told_apart(store, [beat.lease for beat in some], pulses, skip_locked)

    return _send(write, beats, lambda beat: send_alone(store, [beat.lease]))


def send_alone(store: Store, leases: Sequence[Lease]) -> Sent:
    """Heartbeats alone. What the database refuses even so counts as skipped."""

    def write(some: Sequence[Lease], skip_locked: bool) -> Sent:
        pulses = store.heartbeat(some, skip_locked=skip_locked)
        return _told_apart(store, some, pulses, skip_locked)

    return _send(write, leases, lambda lease: Sent(skipped=frozenset({lease})))


def _told_apart(
    store: Store, leases: Sequence[Lease], pulses: dict[Lease, Pulse], skip_locked: bool
) -> Sent:
    unanswered = [lease for lease in leases if lease not in pulses]
    if not skip_locked or not unanswered:
        return Sent(pulses)
    return Sent(pulses, store.held(unanswered))


def _send(
    write: Callable[[Sequence[T], bool], Sent],
    items: Sequence[T],
    refused: Callable[[T], Sent],
    *,
    skip_locked: bool = False,
) -> Sent:
    if not items:
        return Sent()
    try:
        return write(items, skip_locked)
    except RowLocked:
        if not skip_locked:
            return _send(write, items, refused, skip_locked=True)
        if len(items) == 1:
            return refused(items[0])
    except StoreRefused:
        if len(items) == 1:
            return refused(items[0])
    half = len(items) // 2
    first = _send(write, items[:half], refused, skip_locked=skip_locked)
    return first | _send(write, items[half:], refused, skip_locked=skip_locked)
