"""Runs on a thread that calls foreign libraries, and on one that forks: the fork waits for rest.

A child that is forked while another thread is inside OpenSSL or a client's library inherits
their locks as they are, some of them taken for ever.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .. import native

#: Seconds that a fork waits for a library to come to rest; and where no greenlet could run
#: meanwhile.
FORK_WAIT, FORK_WAIT_OF_GREENLETS = 1.0, 0.05


class ForkRest:
    """``with rest.work():`` goes around what a fork had better not meet."""

    def __init__(self) -> None:
        # Held over I/O, and beside greenlets across switches: only a fork of another thread waits
        # for it, and that with a bound.
        self._at_work = native.rlock()
        self._entered = 0
        self._waited_for = -1
        _all.add(self)

    @contextmanager
    def work(self) -> Iterator[None]:
        """Within it a library is at work. Entered while another thread forks, it waits for that."""
        with self._at_work:
            self._entered += 1
            yield

    def pause(self) -> None:
        """Before a fork: wait for rest, once for each use.

        What is at work for longer rests in a silent network as a rule, where it holds no lock.
        """
        patience = FORK_WAIT if native.green() is None else FORK_WAIT_OF_GREENLETS
        if self._waited_for == self._entered:
            patience = 0.0
        if not self._at_work.acquire(timeout=patience):
            self._waited_for = self._entered

    def resume(self) -> None:
        """After a fork, in the parent."""
        if self._at_work._is_owned():
            self._at_work.release()

    def forget(self) -> None:
        """In a forked child: whoever held the lock is not here to let go of it."""
        self._at_work = native.rlock()


_all: weakref.WeakSet[ForkRest] = weakref.WeakSet()


def _for_each(do: Callable[[ForkRest], None]) -> None:
    for rest in list(_all):
        do(rest)


os.register_at_fork(
    before=lambda: _for_each(ForkRest.pause),
    after_in_parent=lambda: _for_each(ForkRest.resume),
    after_in_child=lambda: _for_each(ForkRest.forget),
)
