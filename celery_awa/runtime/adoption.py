"""Runs on the worker's database thread: adopts the slates of workers that were killed as a whole.

A killed worker leaves its slate, and on its pages the last that its children reported. Each
worker on the same machine looks for such slates when it starts and from time to time. It writes
what is on them, gives up the leases, so that the rescue need not wait for them to grow stale, and
removes the files.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack

from ..model import Lease
from ..settings import Settings
from ..store.protocol import Store
from .last_words import write_last
from .page import PageView
from .slate import Slate
from .slate_files import exclusive, orphaned
from .trouble import Trouble, logger


class Adoption:
    """The service that looks for them.

    ``database`` is the :func:`database_digest` that the slates must bear. ``adopted`` is called
    after leases were given up: there is something to rescue.
    """

    def __init__(
        self,
        database: bytes,
        settings: Settings,
        trouble: Trouble,
        adopted: Callable[[], None] = lambda: None,
    ) -> None:
        self._database = database
        self._settings = settings
        self._trouble = trouble
        self._adopted = adopted
        self._next = 0.0

    def due(self) -> float | None:
        return self._next

    def run_once(self, open_store: Callable[[], Store]) -> int:
        """Adopt what is there; returns how many attempts were written.

        If the database fails it is due again at once: nothing that was not confirmed is removed.
        """
        written = 0
        try:
            for path in orphaned(self._settings.slate_dir, self._database):
                written += self._adopt(path, open_store)
        finally:
            if written:
                logger.info("celery-awa adopted what an earlier worker left: %d attempts", written)
                self._adopted()
        self._next = time.monotonic() + self._settings.rescue_interval
        return written

    def _adopt(self, path: str, open_store: Callable[[], Store]) -> int:
        with ExitStack() as alone:
            try:
                alone.enter_context(exclusive(path, timeout=0.0))
            except OSError:  # another adopts it, or a child that still lives takes a page
                return 0
            slate = Slate.adopt(path, self._database)
            return self._empty(slate, open_store) if slate is not None else 0

    def _empty(self, slate: Slate, open_store: Callable[[], Store]) -> int:
        """Write what dead processes left on the pages; the files go once no page is in use."""
        unlink = False
        try:
            # A child may outlive its worker for a moment, and goes on writing.
            dead = [page for page in slate.pages() if not page.alive()]
            written = self._write(dead, open_store()) if dead else []
            for page in written:
                page.free()
            unlink = not slate.in_use()
        finally:
            slate.close(unlink=unlink)
        return len(written)

    def _write(self, pages: list[PageView], store: Store) -> list[PageView]:
        ours = [page for page in pages if _has_its_row(store, page)]
        strangers = [page for page in pages if page not in ours]
        return strangers + write_last(ours, store, self._trouble)


def _has_its_row(store: Store, page: PageView) -> bool:
    """Whether the attempt has a row, and the row is its still.

    A database that was made anew under the same name counts its ids from 1 again; by the task's
    id its jobs are told from those that the slate speaks of.
    """
    job = store.get_job(page.task_id) if page.lease is not None else None
    return job is not None and Lease(job.id, job.run_lease) == page.lease
