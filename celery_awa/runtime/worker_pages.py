"""Runs in a prefork worker's own process: reads the pages of its children and speaks for them.

Its methods are called on the worker's main thread or the pool's result thread and only queue;
statements are sent by the database thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from ..model import Beat, NewAttempt, Transition
from ..settings import Settings
from ..store.protocol import Store
from .database_thread import DatabaseThread
from .ending import Ending, from_page, with_last_snapshot
from .heartbeat import Heartbeat
from .page import PageView
from .slate import Slate
from .trouble import Trouble

#: Says of an attempt, by its token (None: no page is known), all that its message says.
Describe = Callable[["str | None"], NewAttempt]


class WorkerPages:
    """The worker's side of the slate: heartbeat, the ends of lost children, the sweep."""

    def __init__(
        self,
        slate: Slate | None,
        settings: Settings,
        open_store: Callable[[], Store],
        trouble: Trouble,
    ) -> None:
        self._slate = slate
        self.database = DatabaseThread(open_store, trouble, name="celery-awa-heartbeat")
        self.heartbeat = Heartbeat(self._beating, settings, trouble, always=True)
        self._sweep = Sweep(self, settings)
        #: Attempts that the worker ends, by token: False while that is queued, True once written.
        self.settled: dict[str, bool] = {}
        self.database.add_service(self.heartbeat)
        self.database.add_service(self._sweep)

    def start(self) -> None:
        """From here on the thread beats. A first look at the database tells what is wrong."""
        self.database.post(lambda store: None)

    def stop(self, timeout: float) -> bool:
        """After the pool has drained: the last heartbeat, the last ends, and the slate goes."""
        self.database.post(lambda store: self.heartbeat.run_once(lambda: store, last=True))
        done = self.database.stop(timeout)
        if self._slate is not None:
            self._slate.close(unlink=True)
        return done

    def attempts(self) -> int:
        """How many attempts the children run, as far as their pages tell."""
        return len(self.pages())

    def pages(self) -> list[PageView]:
        """The pages that carry an attempt; none where there is no slate."""
        return list(self._slate.pages()) if self._slate is not None else []

    def end_lost(
        self, task_id: str, pid: int | None, transition: Transition, describe: Describe
    ) -> None:
        """Celery's verdict on an attempt that could not end itself. Queues, never waits."""
        page = self._page_of(task_id, pid)
        if page is None:
            described = describe(None)
            transition = replace(transition, uncounted=True)
            self._post(Ending(described.token, None, lambda: described, transition))
        elif page.token not in self.settled:
            self.settled[page.token] = False
            described = describe(page.token)
            transition = with_last_snapshot(transition, page.snapshot())
            self._post(Ending(page.token, page.lease, lambda: described, transition))

    def lease_of(self, task_id: str, pid: int | None) -> int | None:
        """The lease that the attempt of a lost child held, if it had claimed."""
        page = self._page_of(task_id, pid)
        return page.lease.run_lease if page is not None and page.lease is not None else None

    def _post(self, ending: Ending) -> None:
        def work(store: Store) -> None:
            ending.write(store)
            if ending.token in self.settled:
                self.settled[ending.token] = True

        self.database.post(work)

    def _page_of(self, task_id: str, pid: int | None) -> PageView | None:
        """The page of the process that ran the task; any page of the task if it is not known."""
        pages = [page for page in self.pages() if page.task_id == task_id]
        exact = [page for page in pages if page.pid == pid]
        return next(iter(exact or pages), None)

    def _beating(self) -> Iterator[PageView]:
        return (page for page in self.pages() if page.token not in self.settled)


class Sweep:
    """The service that frees the pages of dead children, once nothing on them is needed.

    A dead child's attempt goes on being heartbeaten until Celery's verdict comes, or, if none
    does, for twice ``awa_stale_after``: then what is on the page is written and the page freed.
    """

    def __init__(self, pages: WorkerPages, settings: Settings) -> None:
        self._pages = pages
        self._settings = settings
        self._dead_since: dict[str, float] = {}
        self._next = 0.0

    def due(self) -> float | None:
        return self._next

    def run_once(self, open_store: Callable[[], Store]) -> int:
        """One pass; returns how many pages were freed."""
        now = time.monotonic()
        self._next = now + self._settings.write_interval
        dead = [page for page in self._pages.pages() if not page.alive()]
        self._dead_since = {p.token: self._dead_since.get(p.token, now) for p in dead}
        freed = [page for page in dead if self._settle(page, now, open_store)]
        for page in freed:
            page.free()
            self._pages.settled.pop(page.token, None)
        return len(freed)

    def _settle(self, page: PageView, now: float, open_store: Callable[[], Store]) -> bool:
        """Whether the page can go."""
        written = self._pages.settled.get(page.token)
        if written is not None:
            return written
        own_end = page.end()
        if own_end is not None and page.lease is not None:
            transition = with_last_snapshot(from_page(own_end), page.snapshot())
            open_store().end(page.lease, page.token, transition)
            return True
        if page.lease is None and not page.generation():
            return True
        if now - self._dead_since[page.token] < 2 * self._settings.stale_after:
            return False
        if page.lease is not None:
            open_store().heartbeat_with_progress([Beat(page.lease, page.snapshot())])
        return True
