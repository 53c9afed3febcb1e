"""Runs in a prefork worker's own process: reads the pages of its children and speaks for them.

Its methods are called on the worker's main thread or the pool's result thread, where they only
queue; statements are sent by the database thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from ..model import Ended, NewAttempt, Transition
from ..settings import Settings
from ..store.protocol import Store
from .database_thread import DatabaseThread
from .ending import Ending, with_last_snapshot
from .errand import Errand
from .heartbeat import Heartbeat
from .page import PageView
from .slate import Slate
from .sweep import Sweep
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
        self._trouble = trouble
        #: What the worker was told of attempts that are on a page, by token.
        self._verdicts: dict[str, Errand[Ended]] = {}
        self.database = DatabaseThread(open_store, trouble, name="celery-awa-heartbeat")
        self.heartbeat = Heartbeat(self._beating, settings, trouble, always=True)
        self._sweep = Sweep(self.pages, self._verdicts, settings, trouble)
        self.database.add_service(self.heartbeat)
        self.database.add_service(self._sweep)

    def start(self) -> None:
        """From here on the thread beats. A first look at the database tells what is wrong."""
        self.database.look()

    def stop(self, timeout: float) -> bool:
        """After the pool has drained: the last heartbeat, the last ends, and the slate goes."""
        if self.pages():
            self.database.post(self._write_rest)
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
        """Celery's verdict on an attempt that could not end itself. Never waits, never raises."""
        try:
            page = self._page_of(task_id, pid)
            if page is None:
                self._end_unseen(transition, describe(None))
            elif page.token not in self._verdicts:
                self._end_seen(page, transition, describe(page.token))
        except Exception as exc:  # of a foreign repr, a serializer
            self._trouble.warn("bug", "celery-awa: a verdict is not recorded", exc_info=exc)

    def end_unstarted(self, described: NewAttempt, transition: Transition) -> None:
        """End the run of a message that is not executed (revoked, expired). Does not wait."""
        self._end_unseen(transition, described)

    def lease_of(self, task_id: str, pid: int | None) -> int | None:
        """The lease that the attempt of a lost child held, if it had claimed."""
        page = self._page_of(task_id, pid)
        return page.lease.run_lease if page is not None and page.lease is not None else None

    def _end_unseen(self, transition: Transition, described: NewAttempt) -> None:
        """End an attempt by its task's id alone: what claimed it before counted it."""
        described = replace(described, envelope=None)  # the transition has the one that is kept
        ending = Ending(described.token, None, described, replace(transition, uncounted=True))
        self.database.post(ending.write)

    def _end_seen(self, page: PageView, transition: Transition, described: NewAttempt) -> None:
        described = replace(described, envelope=None)
        # As it is now: the child may still live, and take the page to its next attempt.
        transition = with_last_snapshot(transition, page.snapshot())

        def write(store: Store) -> Ended:
            # As it is then: a child that is being terminated goes on reporting to the last.
            latest = with_last_snapshot(transition, page.snapshot())
            return Ending(page.token, page.lease, described, latest).write(store)

        self._verdicts[page.token] = self.database.post(write)

    def _write_rest(self, store: Store) -> None:
        self.heartbeat.run_once(lambda: store, last=True)
        self._sweep.run_once(lambda: store)

    def _page_of(self, task_id: str, pid: int | None) -> PageView | None:
        """The page on which that process runs the task; without a process, any of the task's."""
        pages = [page for page in self.pages() if page.task_id == task_id]
        return next((page for page in pages if pid in (None, page.pid)), None)

    def _beating(self) -> Iterator[PageView]:
        return (page for page in self.pages() if page.token not in self._verdicts)
