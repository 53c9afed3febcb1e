"""Runs in the worker, which owns the slate, and in its pool children, which open it: any thread.

The slate is a file that all of them map, in which each running attempt of a child has a page.
What a child wrote there outlives its SIGKILL. The memory for all pages is taken at the start
(287 kB a page with records of 66,560 bytes): a full file system refuses then, and not in the
middle of a task's write.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from mmap import mmap

from ..errors import AwaError
from . import slate_files as files
from .page import Page, PageView, may_be_taken
from .page_values import Identity, Process
from .processes import UNKNOWN, lives, started
from .slate_layout import NOBODYS, STOPPING_AT, Layout
from .slate_record import Torn
from .trouble import logger

# Seconds that taking a page may wait for others who take theirs.
_LOCK_TIMEOUT = 1.0


class SlateUnavailable(AwaError):
    """There is no memory that the worker and its pool children could share."""


class Slate:
    """One process's mapping of a slate. Made by ``create``, ``open`` and ``adopt``."""

    def __init__(self, path: str, memory: mmap, layout: Layout, owned: bool) -> None:
        self.path = path
        #: Whether another worker may adopt it, should this one leave it behind.
        self.adoptable = False
        self._memory = memory
        self._records = [layout.page(memory, index) for index in range(layout.pages)]
        self._taken: list[Page] = []
        # An object inherited by a fork is of no use there, above all it must not remove the file.
        self._pid = os.getpid()
        self._owned = owned
        self._warned = False

    @classmethod
    def create(
        cls, directory: str | None, pages: int, record_bytes: int, database: bytes = NOBODYS
    ) -> Slate:
        """A new slate in that folder; None: in shared memory, else the temporary folder.

        ``record_bytes`` is the most that each of brief and metadata may take. ``database``, 16
        bytes, stands for the database whose jobs will be on it (``database_digest``); without,
        nobody adopts it after this process's death. Raises SlateUnavailable with the reason.
        """
        layout = Layout(pages, record_bytes)
        reasons = []
        for folder in files.folders(directory):
            try:
                path, memory = files.make(folder, layout, database)
            except (OSError, ValueError) as error:
                reasons.append(files.why_not(folder, layout, error))
            else:
                slate = cls(path, memory, layout, owned=True)
                slate.adoptable = database != NOBODYS
                return slate
        raise SlateUnavailable("; ".join(reasons) or "there is no temporary folder")

    @classmethod
    def open(cls, path: str) -> Slate:
        """The slate that this process's parent made; SlateUnavailable with the reason."""
        try:
            memory, layout = files.map_parents(path)
        except (OSError, ValueError) as error:
            raise SlateUnavailable(f"the slate {path} cannot be used: {error}") from error
        return cls(path, memory, layout, owned=False)

    @classmethod
    def adopt(cls, path: str, database: bytes) -> Slate | None:
        """The slate of a dead worker, from now on ours; None if it is none of that database.

        The caller keeps the others from it (``slate_files.exclusive``).
        """
        mapped = files.map_orphaned(path, database)
        return cls(path, *mapped, owned=True) if mapped is not None else None

    def take_page(self) -> Page | None:
        """A page for this process; None when all are taken, or others take theirs for too long.

        Only one process at a time does this. Safe in any thread.
        """
        pid = os.getpid()
        if pid != self._pid:
            return None
        process = Process(pid, started(pid) or UNKNOWN)
        try:
            with files.exclusive(self.path, _LOCK_TIMEOUT):
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

    def in_use(self) -> bool:
        """Whether a page carries an attempt, or belongs to a process that lives."""
        owners = [Process.owning(records) for records in self._records]
        if any(owner is not None and lives(owner.pid, owner.start) for owner in owners):
            return True
        return next(self.pages(), None) is not None

    def say_stopping(self) -> None:
        """Tell all children that their worker is stopping. One step, safe in a signal's handler."""
        try:
            self._memory[STOPPING_AT] = 1
        except ValueError:  # closed: there is nobody left to tell
            pass

    def is_stopping(self) -> bool:
        """Whether the worker said that it is stopping."""
        try:
            return self._memory[STOPPING_AT] != 0
        except ValueError:  # closed
            return False

    def close(self, *, unlink: bool = False) -> None:
        """Give the mapping back; ``unlink`` removes the files too, in the process that made them.

        Pages that were taken through it can still be called, and do nothing.
        """
        for page in self._taken:
            page.detach()
        self._records = []
        self._memory.close()
        if unlink and self._owned and os.getpid() == self._pid:
            files.remove(self.path)

    def _warn(self, error: OSError) -> None:
        # Every attempt asks for a page; the first answer says it all.
        if not self._warned:
            self._warned = True
            logger.warning("celery-awa: no page of the slate can be taken: %s", error)
