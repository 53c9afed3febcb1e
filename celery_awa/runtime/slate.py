"""Runs in the worker, which owns the slate, and in its pool children, which open it: any thread.

The slate is a file that all of them map, in which each running attempt of a child has a page.
What a child wrote there outlives its SIGKILL. The memory for all pages is taken at the start
(287 kB a page with records of 66,560 bytes): a full file system refuses then, and not in the
middle of a task's write.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from mmap import mmap

from ..errors import AwaError
from .page import Page, PageView, may_be_taken
from .page_values import Identity, Process
from .processes import UNKNOWN, lives, started
from .slate_layout import FILE_HEADER_BYTES, Layout, Unfit, pack_header, unpack_header
from .slate_record import Torn

logger = logging.getLogger(__name__)

_SHARED_MEMORY = "/dev/shm"
_PREFIX = "celery-awa-"

# Seconds that taking a page may wait for others who take theirs.
_LOCK_TIMEOUT = 1.0

# What posix_fallocate says on a file system that cannot do it.
_NOT_SUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENODEV)

# What says that there is too little room, and not that the folder is of no use.
_FULL = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG)


class SlateUnavailable(AwaError):
    """There is no memory that the worker and its pool children could share."""


class Slate:
    """One process's mapping of a slate. Made by ``create`` and ``open``."""

    def __init__(self, path: str, memory: mmap, layout: Layout, owned: bool) -> None:
        self.path = path
        self._memory = memory
        self._records = [layout.page(memory, index) for index in range(layout.pages)]
        self._taken: list[Page] = []
        # An object inherited by a fork is of no use there, above all it must not remove the file.
        self._pid = os.getpid()
        self._owned = owned
        self._warned = False

    @classmethod
    def create(cls, directory: str | None, pages: int, record_bytes: int) -> Slate:
        """A new slate in that folder; None: in shared memory, else the temporary folder.

        ``record_bytes`` is the most that each of brief and metadata may take. Raises
        SlateUnavailable with the reason.
        """
        layout = Layout(pages, record_bytes)
        reasons = []
        for folder in _folders(directory):
            try:
                path, memory = _make(folder, layout)
            except (OSError, ValueError) as error:
                reasons.append(_why_not(folder, layout, error))
            else:
                return cls(path, memory, layout, owned=True)
        raise SlateUnavailable("; ".join(reasons) or "there is no temporary folder")

    @classmethod
    def open(cls, path: str) -> Slate:
        """The slate that this process's parent made; SlateUnavailable with the reason."""
        try:
            memory, layout = _map_existing(path)
        except (OSError, ValueError) as error:
            raise SlateUnavailable(f"the slate {path} cannot be used: {error}") from error
        return cls(path, memory, layout, owned=False)

    def take_page(self) -> Page | None:
        """A page for this process; None when all are taken, or others take theirs for too long.

        Only one process at a time does this. Safe in any thread.
        """
        pid = os.getpid()
        if pid != self._pid:
            return None
        process = Process(pid, started(pid) or UNKNOWN)
        try:
            with _exclusive(_lock_path(self.path)):
                records = next(filter(may_be_taken, self._records), None)
                page = Page(records, process) if records is not None else None
        except OSError as error:
            self._warn(error)
            return None
        if page is not None:
            self._taken.append(page)
        return page

    def pages(self) -> Iterator[PageView]:
        """Every page that carries an attempt, whether its process lives or not."""
        for index, records in enumerate(self._records):
            try:
                identity = Identity.carried(records)
            except Torn:  # it begins the next attempt just now
                continue
            if identity is not None:
                yield PageView(index, records, identity)

    def close(self, *, unlink: bool = False) -> None:
        """Give the mapping back; ``unlink`` removes the files too, in the process that made them.

        Pages that were taken through it can still be called, and do nothing.
        """
        for page in self._taken:
            page.detach()
        self._records = []
        self._memory.close()
        if unlink and self._owned and os.getpid() == self._pid:
            _remove(self.path)

    def _warn(self, error: OSError) -> None:
        # Every attempt asks for a page; the first answer says it all.
        if not self._warned:
            self._warned = True
            logger.warning("celery-awa: no page of the slate can be taken: %s", error)


def _folders(directory: str | None) -> Iterator[str]:
    if directory is not None:
        yield directory
        return
    if os.path.isdir(_SHARED_MEMORY):
        yield _SHARED_MEMORY
    try:
        yield tempfile.gettempdir()
    except OSError:  # there is none that can be written to
        return


def _why_not(folder: str, layout: Layout, error: OSError | ValueError) -> str:
    number = error.errno if isinstance(error, OSError) else None
    reason = os.strerror(number) if number is not None else str(error)
    if number in _FULL:
        return f"no room for {layout.file_bytes:,} bytes of shared memory in {folder}: {reason}"
    return f"cannot make the slate in {folder}: {reason}"


def _make(folder: str, layout: Layout) -> tuple[str, mmap]:
    path = os.path.join(folder, f"{_PREFIX}{secrets.token_hex(8)}")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        os.close(os.open(_lock_path(path), flags, 0o600))
        descriptor = os.open(path, flags, 0o600)
        try:
            _allocate(descriptor, layout.file_bytes)
            os.pwrite(descriptor, _header(layout), 0)
            return path, mmap(descriptor, layout.file_bytes)
        finally:
            # The mapping has a duplicate of its own.
            os.close(descriptor)
    except BaseException:
        _remove(path)
        raise


def _header(layout: Layout) -> bytes:
    return pack_header(layout, os.getpid(), started(os.getpid()) or UNKNOWN)


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


def _map_existing(path: str) -> tuple[mmap, Layout]:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        size = os.fstat(descriptor).st_size
        layout, owner, start = unpack_header(os.pread(descriptor, FILE_HEADER_BYTES, 0), size)
        if owner != os.getppid() or not lives(owner, start):
            raise Unfit(f"it belongs to process {owner}, which is not the parent of this one")
        return mmap(descriptor, size), layout
    finally:
        os.close(descriptor)


def _lock_path(path: str) -> str:
    return f"{path}.lock"


def _remove(path: str) -> None:
    for name in (path, _lock_path(path)):
        try:
            os.unlink(name)
        except OSError:  # never made, or removed by somebody else
            continue


@contextmanager
def _exclusive(path: str) -> Iterator[None]:
    """Keep all other processes out. TimeoutError, an OSError, after one second."""
    # A file of its own, opened for this only: no other descriptor of it is ever closed.
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        deadline = time.monotonic() + _LOCK_TIMEOUT
        while not _locked(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{path} stayed locked for {_LOCK_TIMEOUT:g} s")
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
