"""Runs on the database thread: its one connection, opened when it is needed.

``pause`` and ``resume`` run on a thread that forks, ``forget`` in the forked child.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable

from ..errors import AwaError, StoreUnavailable
from ..store.protocol import Store

#: Something to do that opens the store only if it has something to say.
Work = Callable[[Callable[[], Store]], object]


#: Seconds that a fork waits for the driver to come to rest.
FORK_WAIT = 1.0


class LazyStore:
    """Opened at first use, replaced when it died, closed when unused for ``idle_after`` seconds."""

    def __init__(self, open_store: Callable[[], Store], idle_after: float | None) -> None:
        self._open_store = open_store
        self._idle_after = idle_after
        self._store: Store | None = None
        self._used_at = 0.0
        self._uses = 0
        # Taken while the driver is at work. A child that is forked meanwhile inherits OpenSSL's
        # locks as they are, some of them taken for ever, and could never encrypt anything.
        self._at_work = threading.RLock()
        self._entered = 0
        self._waited_for = -1
        _stores.add(self)

    def use(self, work: Work) -> bool:
        """Run it, and once more on a new connection if the old one had died idle.

        Whether the database was asked at all. Raises what the work raises, and StoreUnavailable
        or another AwaError where the store cannot be opened.
        """
        had_one, uses = self._store is not None, self._uses
        with self._at_work:
            self._entered += 1
            try:
                work(self._opened)
            except StoreUnavailable:
                self.close()
                if not had_one:
                    raise
                work(self._opened)
        return self._uses != uses

    @property
    def idle_at(self) -> float | None:
        """When the connection is to be closed unless it is used; None: never."""
        if self._store is None or self._idle_after is None:
            return None
        return self._used_at + self._idle_after

    def close_idle(self) -> None:
        """Close the connection if it was not used for long."""
        idle_at = self.idle_at
        if idle_at is not None and idle_at <= time.monotonic():
            self.close()

    def close(self) -> None:
        """Close the connection if there is one."""
        with self._at_work:
            store, self._store = self._store, None
            if store is not None:
                store.close()

    def pause(self) -> None:
        """Before a fork: wait for the driver to come to rest, once for each use of it.

        Where it rests in a silent network it holds no lock, so forking then does no harm.
        """
        if self._waited_for != self._entered and not self._at_work.acquire(timeout=FORK_WAIT):
            self._waited_for = self._entered

    def resume(self) -> None:
        """After a fork, in the parent."""
        if self._at_work._is_owned():  # type: ignore[attr-defined]  # typeshed lacks it
            self._at_work.release()

    def forget(self) -> None:
        """In a forked child: let go of the parent's connection without a word over its socket."""
        self._at_work = threading.RLock()
        store, self._store = self._store, None
        if store is not None:
            store.abandon()

    def _opened(self) -> Store:
        if self._store is None:
            self._store = self._open()
        self._uses += 1
        self._used_at = time.monotonic()
        return self._store

    def _open(self) -> Store:
        try:
            return self._open_store()
        except AwaError:
            raise
        except Exception as exc:  # of a driver, a resolver, the user's own code
            raise StoreUnavailable(f"{type(exc).__name__}: {exc}") from exc


_stores: weakref.WeakSet[LazyStore] = weakref.WeakSet()


def _for_each(do: Callable[[LazyStore], None]) -> None:
    for store in list(_stores):
        try:
            do(store)
        except Exception:  # a connection in the midst of its end; the others still count
            continue


os.register_at_fork(
    before=lambda: _for_each(LazyStore.pause),
    after_in_parent=lambda: _for_each(LazyStore.resume),
    after_in_child=lambda: _for_each(LazyStore.forget),
)
