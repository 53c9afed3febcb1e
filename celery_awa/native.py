"""Runs in any process and thread: real threads and real locks, also where these are patched.

gevent and eventlet put greenlets in the place of threads, and locks that switch between greenlets
in the place of locks. A heartbeat needs a real thread: a greenlet starves while another computes.
And what a real thread and greenlets share needs a real lock: on one of gevent's or eventlet's a
greenlet may wait for ever once a real thread has held it. A real lock must not be held across a
switch, though, since it does not tell the greenlets of one thread apart.

What is patched is looked up at each use, since an app may patch after it has imported us.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from _thread import TIMEOUT_MAX
from collections.abc import Callable, Collection
from typing import Any

#: Seconds between two looks of a greenlet at what it waits for: a tenth of what it has waited
#: already, and no less and no more than these.
FIRST_PAUSE, LONGEST_PAUSE = 0.001, 0.1

#: The threads of :func:`start_thread`, by the system's names for them.
_started: set[int] = set()


def green() -> Any:
    """gevent or eventlet, whichever has put greenlets in the place of threads; else None."""
    # By their names: whoever does not use them need not have them.
    monkey = sys.modules.get("gevent.monkey")
    if monkey is not None and monkey.is_module_patched("threading"):
        return sys.modules["gevent"]
    patcher = sys.modules.get("eventlet.patcher")
    if patcher is not None and patcher.is_monkey_patched("thread"):
        return sys.modules["eventlet"]
    return None


def lock() -> threading.Lock:
    """A real lock, to be waited for by :func:`acquire`."""
    made: threading.Lock = _original("_thread", "allocate_lock")()
    return made


def rlock() -> Any:
    """A real lock that its thread may take again. All greenlets of a thread count as that thread.

    To be held for moments without I/O only.
    """
    return _original("_thread", "RLock")()


def acquire(wanted: threading.Lock, timeout: float) -> bool:
    """Take a real lock within so many seconds; whether it was taken.

    Other greenlets run meanwhile. A real thread beside greenlets waits as threads do. The loop
    that runs greenlets cannot wait, and Celery calls the handlers of signals on it.
    """
    library = green()
    if library is None or beside_greenlets():
        return wanted.acquire(timeout=min(max(timeout, 0.0), TIMEOUT_MAX))
    began = time.monotonic()
    while not wanted.acquire(blocking=False):
        waited = time.monotonic() - began
        if waited >= timeout or _is_loop(library):
            return False
        pause = min(max(waited / 10, FIRST_PAUSE), LONGEST_PAUSE)
        library.sleep(min(pause, timeout - waited))
    return True


def _is_loop(library: Any) -> bool:
    hub = library.get_hub() if library.__name__ == "gevent" else library.hubs.get_hub().greenlet
    return library.getcurrent() is hub


def start_thread(
    run: Callable[[], None], name: str, *, blocks: Collection[signal.Signals] = ()
) -> None:
    """Run it on a real thread, which nobody waits for at exit. RuntimeError if there can be none.

    Not a ``Thread``: its start waits for an Event, in which an exception could strike. ``blocks``:
    the system delivers these signals to other threads of the process only.
    """
    _original("_thread", "start_new_thread")(_run, (run, name, blocks))


def beside_greenlets() -> bool:
    """Whether this is a thread of :func:`start_thread` in a process whose threads are greenlets.

    It must not take any of their locks, such as those of logging.
    """
    return green() is not None and _identity() in _started


def _run(run: Callable[[], None], name: str, blocks: Collection[signal.Signals]) -> None:
    if blocks:
        signal.pthread_sigmask(signal.SIG_BLOCK, blocks)
    identity = _identity()
    _started.add(identity)
    try:
        if green() is None:
            threading.current_thread().name = name
        run()
    finally:
        _started.discard(identity)


def _identity() -> int:
    identity: int = _original("_thread", "get_ident")()
    return identity


def _original(module: str, name: str) -> Any:
    library = green()
    if library is None:
        return getattr(sys.modules[module], name)
    if library.__name__ == "gevent":
        return library.monkey.get_original(module, name)
    return getattr(library.patcher.original(module), name)


# Threads do not survive a fork.
os.register_at_fork(after_in_child=_started.clear)
