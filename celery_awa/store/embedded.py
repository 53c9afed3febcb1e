"""The embedded PostgreSQL server: private to one process tree, or shared by a folder's name.

Each server has a guard, a process of its own (embedded_guard.py) that starts it and stops it.
The guard of a private server waits for the end of a pipe whose other end its owner holds; the
guard of a shared server waits until it gets ``users.lock``, of which each user holds a share.
The kernel lets go of both in whichever way a process ends. Children of a fork inherit them, so
they close their copies: a server lives as long as its users, not as long as their children.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import quote

from ..errors import EmbeddedError
from . import embedded_guard
from .embedded_binaries import account_for, find_binaries

PREFIX = "embedded:"

#: Tells descendants of their private server: the owner's process id, ``:``, the folder.
_VARIABLE = "CELERY_AWA_EMBEDDED"

#: Seconds until a shared server that another process started must answer.
_READY_WITHIN = 5.0

#: Seconds that the owner of a private server waits at its exit for the server to be gone.
_GONE_WITHIN = 15.0

_lock = threading.Lock()
_urls: dict[str, str] = {}
#: What keeps our servers alive: ends of pipes, shares of locks.
_holds: set[int] = set()
_private_folders: list[str] = []


def resolve(url: str) -> str:
    """The URL to connect to: for ``embedded:`` and ``embedded:PATH`` that of a running server.

    The first call starts the server, which takes about a second; other URLs come back as they
    are. ``embedded:`` is one server for this process and its descendants, gone with this
    process. ``embedded:PATH`` is one server for all who name the folder, stopped with the last
    of them; its data stay. Raises EmbeddedError.
    """
    if not url.startswith(PREFIX):
        return url
    path = url[len(PREFIX) :]
    key = os.path.realpath(os.path.expanduser(path)) if path else ""
    if key in _urls:
        return _urls[key]  # without the lock, which greenlets and the real thread should not share
    with _lock:
        if key not in _urls:
            _urls[key] = _url(_use_shared(key) if key else _use_private())
        return _urls[key]


def _url(run: str) -> str:
    # A socket in a folder of mode 0700, and no TCP port: the server trusts whoever reaches it,
    # and a port could be reached by everybody on this machine.
    return f"postgresql://postgres@/postgres?host={quote(run, safe='')}&port=5432"


def _use_private() -> str:
    inherited = _inherited()
    if inherited:
        return inherited
    guard_end, our_end = os.pipe()
    _holds.add(our_end)
    try:
        run = _start_guard("", stdin=guard_end)
    except BaseException:
        _let_go(our_end)
        raise
    finally:
        os.close(guard_end)
    _private_folders.append(run)
    os.environ[_VARIABLE] = f"{os.getpid()}:{run}"
    return run


def _inherited() -> str | None:
    owner, _, run = os.environ.get(_VARIABLE, "").partition(":")
    # Our own id without a server of ours: this process became another program by exec.
    if not owner.isdigit() or int(owner) == os.getpid():
        return None
    return run if os.path.isdir(run) and embedded_guard.alive(int(owner)) else None


def _use_shared(path: str) -> str:
    try:
        _prepare(path)
        with _locked(path, "start.lock"):
            return _share(path)
    except OSError as exc:
        raise EmbeddedError(f"the folder {path} cannot be used: {exc.strerror}") from exc


def _prepare(path: str) -> None:
    """Make the folder and its lock files, for the account that runs the server."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
        _give_to_account(path, path)
    for name in ("start.lock", "users.lock", "guard.lock"):
        with suppress(FileExistsError):
            os.close(os.open(os.path.join(path, name), os.O_CREAT | os.O_EXCL, 0o600))
            _give_to_account(os.path.join(path, name), path)


def _give_to_account(made: str, path: str) -> None:
    account = _account(path)
    if account:
        os.chown(made, *account)


def _account(path: str) -> tuple[int, int] | None:
    return account_for(os.path.join(path, "data"), path) if path else account_for()


def _share(path: str) -> str:
    """Hold a share of the users' lock, and see to it that the server runs.

    Called under the start lock. While a share is held the guard cannot begin to stop the server;
    a guard that has begun to holds the whole lock until the server is gone.
    """
    share = os.open(os.path.join(path, "users.lock"), os.O_RDONLY)
    _holds.add(share)
    try:
        fcntl.flock(share, fcntl.LOCK_SH)
        return _running(path) or _start_guard(path)
    except BaseException:
        _let_go(share)
        raise


def _running(path: str) -> str | None:
    """The folder of the server that a live guard keeps; None where there is no guard."""
    deadline = time.monotonic() + _READY_WITHIN
    while _guarded(path):
        if embedded_guard.ready(os.path.join(path, "data")):
            return embedded_guard.recorded_run(path)
        if time.monotonic() > deadline:
            raise EmbeddedError(
                f"the server of embedded:{path} has ended, see {path}/log: stop the processes "
                "that use it, then start again"
            )
        time.sleep(0.02)
    return None


def _guarded(path: str) -> bool:
    with open(os.path.join(path, "guard.lock"), "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@contextmanager
def _locked(path: str, name: str) -> Iterator[None]:
    with open(os.path.join(path, name), "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _start_guard(path: str, stdin: int = subprocess.DEVNULL) -> str:
    """Start a guard with its server; returns the server's folder once it answers."""
    order = {
        "path": path,
        "binaries": find_binaries(),
        "account": _account(path),
    }
    # Run by its file, on the bare standard library: importing this package takes a guard's
    # worth of memory. A session of its own: Ctrl-C is for the owner, not for the guard.
    with subprocess.Popen(
        [sys.executable, "-I", "-S", embedded_guard.__file__, json.dumps(order)],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
    ) as guard:
        assert guard.stdout is not None
        said = guard.stdout.readline()
    answer = json.loads(said or '{"error": "its guard ended without a word"}')
    if "error" in answer:
        raise EmbeddedError(f"the embedded PostgreSQL server did not start: {answer['error']}")
    return str(answer["run"])


def _let_go(hold: int) -> None:
    _holds.discard(hold)
    os.close(hold)


def _forget_in_child() -> None:
    # After a fork another thread's lock would stay locked for ever.
    global _lock
    _lock = threading.Lock()
    _urls.clear()
    _private_folders.clear()
    for hold in list(_holds):
        _let_go(hold)


def _stop_at_exit() -> None:
    # Killed owners leave it to the guard. Where there is time to wait, whoever waits for this
    # process finds nothing left of it.
    for hold in list(_holds):
        _let_go(hold)
    deadline = time.monotonic() + _GONE_WITHIN
    while any(map(os.path.exists, _private_folders)) and time.monotonic() < deadline:
        time.sleep(0.01)


os.register_at_fork(after_in_child=_forget_in_child)
atexit.register(_stop_at_exit)
