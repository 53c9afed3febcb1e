"""Runs in the worker and its pool children, any thread: the files of slates, and whose they are.

A slate is one file, and beside it another that is only locked: closing any descriptor of a file
would drop a process's locks on it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from mmap import mmap
from typing import NamedTuple

from .processes import UNKNOWN, lives, started
from .slate_layout import FILE_HEADER_BYTES, NOBODYS, Header, Layout, Unfit

SHARED_MEMORY = "/dev/shm"
PREFIX = "celery-awa-"
_LOCK_SUFFIX = ".lock"

# What posix_fallocate says on a file system that cannot do it.
_NOT_SUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENODEV)

# What says that there is too little room, and not that the folder is of no use.
_FULL = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG)

# A name that somebody else gave to a pipe or a link must neither block nor lead elsewhere.
_OPENING = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def folders(directory: str | None) -> Iterator[str]:
    """Where slates lie: in that folder; None: in shared memory, else in the temporary folder."""
    if directory is not None:
        yield directory
        return
    if os.path.isdir(SHARED_MEMORY):
        yield SHARED_MEMORY
    try:
        yield tempfile.gettempdir()
    except OSError:  # there is none that can be written to
        return


def lock_path(path: str) -> str:
    """The file that stands for the right to take pages of a slate."""
    return path + _LOCK_SUFFIX


# Making and removing.


def make(folder: str, layout: Layout, database: bytes) -> tuple[str, mmap]:
    """The files of a new slate of this process, with all their memory; raises OSError."""
    path = os.path.join(folder, f"{PREFIX}{secrets.token_hex(8)}")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    header = Header(layout, os.getpid(), started(os.getpid()) or UNKNOWN, database)
    try:
        os.close(os.open(lock_path(path), flags, 0o600))
        descriptor = os.open(path, flags, 0o600)
        try:
            _allocate(descriptor, layout.file_bytes)
            os.pwrite(descriptor, header.packed(), 0)
            return path, mmap(descriptor, layout.file_bytes)
        finally:
            # The mapping has a duplicate of its own.
            os.close(descriptor)
    except BaseException:
        remove(path)
        raise


def why_not(folder: str, layout: Layout, error: OSError | ValueError) -> str:
    """Why a slate could not be made there."""
    number = error.errno if isinstance(error, OSError) else None
    reason = os.strerror(number) if number is not None else str(error)
    if number in _FULL:
        return f"no room for {layout.file_bytes:,} bytes of shared memory in {folder}: {reason}"
    return f"cannot make the slate in {folder}: {reason}"


def remove(path: str) -> None:
    """Both files; the slate first, so that who gets the lock afterwards finds nothing."""
    for name in (path, lock_path(path)):
        try:
            os.unlink(name)
        except OSError:  # never made, or removed by somebody else
            continue


def _allocate(descriptor: int, size: int) -> None:
    """Take the memory in full: on a sparse file of a full tmpfs a later write kills its process."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except AttributeError:  # macOS
        _fill(descriptor, size)
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise
        _fill(descriptor, size)


def _fill(descriptor: int, size: int) -> None:
    zeros = bytes(1 << 20)
    written = 0
    while written < size:
        written += os.pwrite(descriptor, zeros[: size - written], written)


# Those that are there.


class _Found(NamedTuple):
    descriptor: int
    header: Header
    user: int


def map_parents(path: str) -> tuple[mmap, Layout]:
    """The slate that this process's parent made; raises OSError and Unfit."""
    with _opened(path) as found:
        owner = found.header.owner
        if owner != os.getppid() or not lives(owner, found.header.start):
            raise Unfit(f"it belongs to process {owner}, which is not the parent of this one")
        return _map(found)


def map_orphaned(path: str, database: bytes) -> tuple[mmap, Layout] | None:
    """A slate as :func:`orphaned` finds them; None if it is none, or no longer."""
    try:
        with _opened(path) as found:
            return _map(found) if _is_orphaned(found, database) else None
    except (OSError, ValueError):  # gone, being made, damaged, of another version
        return None


def orphaned(directory: str | None, database: bytes) -> Iterator[str]:
    """The paths of all slates of that database and this user whose worker is dead.

    Those of another version are not among them, nor those that are damaged.
    """
    for path in _candidates(directory):
        try:
            with _opened(path) as found:
                orphan = _is_orphaned(found, database)
        except (OSError, ValueError):
            continue
        if orphan:
            yield path


def _candidates(directory: str | None) -> Iterator[str]:
    for folder in folders(directory):
        try:
            names = sorted(os.listdir(folder))
        except OSError:  # it is not there
            continue
        for name in names:
            if name.startswith(PREFIX) and not name.endswith(_LOCK_SUFFIX):
                yield os.path.join(folder, name)


def _is_orphaned(found: _Found, database: bytes) -> bool:
    header = found.header
    ours = header.database == database != NOBODYS and found.user == os.geteuid()
    return ours and not lives(header.owner, header.start)


def _map(found: _Found) -> tuple[mmap, Layout]:
    layout = found.header.layout
    return mmap(found.descriptor, layout.file_bytes), layout


@contextmanager
def _opened(path: str) -> Iterator[_Found]:
    descriptor = os.open(path, _OPENING)
    try:
        status = os.fstat(descriptor)
        header = Header.unpacked(os.pread(descriptor, FILE_HEADER_BYTES, 0), status.st_size)
        yield _Found(descriptor, header, status.st_uid)
    finally:
        os.close(descriptor)


# The lock.


@contextmanager
def exclusive(path: str, timeout: float) -> Iterator[None]:
    """Keep all other processes from a slate. TimeoutError, an OSError, after so many seconds."""
    # A file of its own, opened for this only: no other descriptor of it is ever closed.
    descriptor = os.open(lock_path(path), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        deadline = time.monotonic() + timeout
        while not _locked(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB):
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{lock_path(path)} stayed locked for {timeout:g} s")
            time.sleep(0.002)
        yield
    finally:
        try:
            # Closing is not enough: a process forked meanwhile by another thread has it too.
            _locked(descriptor, fcntl.LOCK_UN)
        finally:
            os.close(descriptor)


def _locked(descriptor: int, operation: int) -> bool:
    try:
        fcntl.flock(descriptor, operation)
    except BlockingIOError:
        return False
    return True
