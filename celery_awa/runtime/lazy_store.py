"""Runs on the database thread: its one connection, opened when it is needed.

``forget`` runs in a forked child.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable

from ..errors import AwaError, StoreUnavailable
from ..store.protocol import Store
from .fork_rest import ForkRest

#: Something to do that opens the store only if it has something to say.
Work = Callable[[Callable[[], Store]], object]


class LazyStore:
    """Opened at first use, replaced when it died, closed when unused for ``idle_after`` seconds."""

    def __init__(self, open_store: Callable[[], Store], idle_after: float | None) -> None:
        self._open_store = open_store
        self._idle_after = idle_after
        self._store: Store | None = None
        self._used_at = 0.0
        self._uses = 0
        self._rest = ForkRest()
        _stores.add(self)

    def use(self, work: Work) -> bool:
        """Run it, and once more on a new connection if the old one had died idle.

        Whether the database was asked at all. Raises what the work raises, and StoreUnavailable
        or another AwaError where the store cannot be opened.
        """
        had_one, uses = self._store is not None, self._uses
        with self._rest.work():
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
        with self._rest.work():
            store, self._store = self._store, None
            if store is not None:
                store.close()

    def forget(self) -> None:
        """In a forked child: let go of the parent's connection without a word over its socket."""
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


def _forget_inherited() -> None:
    for store in list(_stores):
        try:
            store.forget()
        except Exception:  # a connection in the midst of its end; the others still count
            continue


os.register_at_fork(after_in_child=_forget_inherited)
