"""Runs on the worker's database thread: writes what dead processes left on their pages.

Their own ends first, each by itself. What is left was in the midst of its work: its last
snapshots are written and its leases given up, in one statement each, so that the rescue finds it.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import RowLocked, StoreRefused
from ..model import Beat, Lease, Transition
from ..store.protocol import Store
from .beats import send_with_progress
from .ending import Ending, from_page, with_last_snapshot
from .page import PageView
from .trouble import Trouble


def write_last(pages: Sequence[PageView], store: Store, trouble: Trouble) -> list[PageView]:
    """Returns the pages of which nothing is left to write; the rows of the others are locked.

    Safe to repeat. An attempt that never took its row has nothing that could be written.
    """
    written, silent = [], []
    for page in pages:
        end = own_end(page, trouble)
        if end is not None:
            written += [page] if _write_end(page, end, store, trouble) else []
        elif page.lease is not None:
            silent.append((page, page.lease))
        else:
            written.append(page)
    return written + _forsake(silent, store, trouble)


def own_end(page: PageView, trouble: Trouble) -> Transition | None:
    """The end that a child left on its page; a lease is needed to write it."""
    data = page.end() if page.lease is not None else None
    try:
        return from_page(data) if data else None
    except ValueError as exc:  # not ours, or of another version
        trouble.warn("bug", "celery-awa: an end cannot be read", exc_info=exc)
        return None


def _write_end(page: PageView, end: Transition, store: Store, trouble: Trouble) -> bool:
    ending = Ending(page.token, page.lease, None, with_last_snapshot(end, page.snapshot()))
    try:
        ending.write(store)
    except RowLocked:
        return False
    except StoreRefused as exc:
        trouble.warn("refused", "celery-awa: the database refused an end: %s", exc)
    return True


def _forsake(
    silent: Sequence[tuple[PageView, Lease]], store: Store, trouble: Trouble
) -> list[PageView]:
    news = [
        Beat(lease, page.snapshot())
        for page, lease in silent
        if page.generation() > page.acknowledged()
    ]
    # Before the leases are given up: a heartbeat takes that back.
    skipped = send_with_progress(store, news).skipped
    leases = [lease for _, lease in silent if lease not in skipped]
    waiting = skipped | give_up(leases, store, trouble)
    return [page for page, lease in silent if lease not in waiting]


def give_up(leases: Sequence[Lease], store: Store, trouble: Trouble) -> frozenset[Lease]:
    """Note that the attempts are dead. By halves, if one row holds up the others.

    Returns those whose rows are locked.
    """
    if not leases:
        return frozenset()
    try:
        store.forsake(leases)
    except RowLocked:
        if len(leases) == 1:
            return frozenset(leases)
    except StoreRefused as exc:
        if len(leases) == 1:
            trouble.warn("refused", "celery-awa: the database refused a write: %s", exc)
            return frozenset()
    else:
        return frozenset()
    half = len(leases) // 2
    first = give_up(leases[:half], store, trouble)
    return first | give_up(leases[half:], store, trouble)
