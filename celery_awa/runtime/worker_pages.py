"""Runs in a prefork worker's own process: reads the pages of its children and speaks for them.

Its methods are called on the worker's main thread or the pool's result thread, where they only
queue; statements are sent by the database thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from ..errors import RowLocked
from ..model import Answer, Ended, NewAttempt, Transition
from ..settings import Settings
from ..store.protocol import Store
from .adoption import Adoption
from .database_thread import DatabaseThread
from .ending import Ending, with_last_snapshot
from .heartbeat import Heartbeat
from .last_words import write_last
from .page import PageView
from .slate import Slate
from .sweep import Sweep
from .trouble import Trouble
from .verdicts import Verdicts

#: Says of an attempt, by its token (None: no page is known), all that its message says.
Describe = Callable[["str | None"], NewAttempt]


class WorkerPages:
    """The worker's side of the slate: heartbeat, the ends of lost children, the sweep.

    ``adoption`` looks after what workers left that were killed before.
    """

    def __init__(
        self,
        slate: Slate | None,
        settings: Settings,
        open_store: Callable[[], Store],
        trouble: Trouble,
        *,
        adoption: Adoption | None = None,
    ) -> None:
        self._slate = slate
        self._trouble = trouble
        self._verdicts = Verdicts()
        #: Tokens of attempts whose lease was given up, since this worker is dying.
        self._forsaken: set[str] = set()
        self.database = DatabaseThread(open_store, trouble, name="celery-awa-heartbeat")
        self.heartbeat = Heartbeat(self._beating, settings, trouble, always=True)
        self._sweep = Sweep(self.pages, self._verdicts, settings, trouble)
        self.database.add_service(self.heartbeat)
        self.database.add_service(self._sweep)
        if adoption is not None:
            self.database.add_service(adoption)

    def start(self) -> None:
        """From here on the thread beats. A first look at the database tells what is wrong."""
        self.database.look()

    def worker_stopping(self) -> None:
        """Ask all attempts of the children to stop, those to come too. Safe in a signal's handler.

        A child that has no slate cannot hear of it.
        """
        if self._slate is not None:
            self._slate.say_stopping()

    def stop(self, timeout: float, *, dying: bool = False) -> bool:
        """The last heartbeat, the last ends, and the slate goes; True if all was confirmed.

        After the pool has drained; or, ``dying``, while its children are being killed: then
        nobody will speak for what they run, so its leases are given up. What the database did
        not confirm stays on the slate, and that for the next worker to adopt.
        """
        if self.pages():
            self.database.post(self._write_all if dying else self._write_rest)
        done = self.database.stop(timeout)
        if self._slate is not None:
            left = not done and self._slate.adoptable and self.pages()
            self._slate.close(unlink=not left)
        return done

    def attempts(self) -> int:
        """How many attempts the children run, as far as their pages tell."""
        return len(self.pages())

    def pages(self) -> list[PageView]:
        """The pages that carry an attempt; none where there is no slate."""
        return list(self._slate.pages()) if self._slate is not None else []

    def end_lost(
        self,
        task_id: str,
        pid: int | None,
        transition: Transition,
        describe: Describe,
        *,
        token: str | None = None,
    ) -> None:
        """Celery's verdict on an attempt that could not end itself. Never waits, never raises.

        ``token``: the attempt's, where it is known without a page.
        """
        try:
            page = self._page_of(task_id, pid)
            if page is None:
                # By its token its row is known to be its own, and counted; else what claimed it
                # before counted it.
                transition = replace(transition, uncounted=token is None)
                self._end_unseen(transition, describe(token))
            elif not self._verdicts.stands(page.token):
                self._end_seen(page, transition, describe(page.token), yielding=False)
        except Exception as exc:  # of a foreign repr, a serializer
            self._trouble.warn("bug", "celery-awa: a verdict is not recorded", exc_info=exc)

    def end_cancelled(
        self, task_id: str, pid: int | None, transition: Transition, describe: Describe
    ) -> None:
        """What the worker's stop makes of an attempt, unless the child ends it itself.

        Celery announces a retry, and publishes none, for whatever its children seem to run when
        it stops cold or soft, or cancels them since the broker's connection is lost. Some of
        that has ended by then, or does so before its child dies. Never waits, never raises.
        """
        try:
            page = self._page_of(task_id, pid)
            if page is None or self._verdicts.stands(page.token):
                return
            self._end_seen(page, transition, describe(page.token), yielding=True)
        except Exception as exc:
            self._trouble.warn("bug", "celery-awa: a verdict is not recorded", exc_info=exc)

    def end_unstarted(self, described: NewAttempt, transition: Transition) -> None:
        """End the run of a message that is not executed (revoked, expired). Does not wait."""
        self._end_unseen(replace(transition, uncounted=True), described)

    def lease_of(self, task_id: str, pid: int | None) -> int | None:
        """The lease that the attempt of a lost child held, if it had claimed."""
        page = self._page_of(task_id, pid)
        return page.lease.run_lease if page is not None and page.lease is not None else None

    def _end_unseen(self, transition: Transition, described: NewAttempt) -> None:
        """End an attempt by what its message says."""
        ending = Ending(described.token, None, described, transition)
        self.database.post(ending.write)

    def _end_seen(
        self, page: PageView, transition: Transition, described: NewAttempt, *, yielding: bool
    ) -> None:
        # As it is now: the child may still live, and take the page to its next attempt.
        transition = with_last_snapshot(transition, page.snapshot())

        def write(store: Store) -> Ended | None:
            if yielding and (page.end() is not None or not page.carried()):
                return None
            # As it is then: a child that is being terminated goes on reporting to the last.
            latest = with_last_snapshot(transition, page.snapshot())
            ended = Ending(page.token, page.lease, described, latest).write(store)
            if yielding and ended.answer is Answer.DONE:
                self._tell_lost(page)
            return ended

        self._verdicts.note(page.token, self.database.post(write))

    def _tell_lost(self, page: PageView) -> None:
        """Let a child that still lives find its lease gone, before it publishes a result.

        Between Celery's storing of a success and the child's own end there is a gap. If our end
        falls into it, the database refuses the child's (the first one wins) and the job waits to
        be sent again though its result is there. Whoever sends it asks the result backend first.
        """
        page.answer(acknowledged=page.acknowledged(), confirmed_at=0.0, lost=True)

    def _write_rest(self, store: Store) -> None:
        self.heartbeat.run_once(lambda: store, last=True)
        self._sweep.run_once(lambda: store)

    def _write_all(self, store: Store) -> None:
        self._write_rest(store)
        pages = list(self._beating())
        written = write_last(pages, store, self._trouble)
        # No heartbeat may take that back.
        self._forsaken.update(page.token for page in written)
        if len(written) < len(pages):
            raise RowLocked  # again, as long as there is time

    def _page_of(self, task_id: str, pid: int | None) -> PageView | None:
        """The page on which that process runs the task; without a process, any of the task's.

        Rather one without an end: an attempt whose end is not confirmed keeps its page, and the
        same child may run the next attempt of the task beside it.
        """
        pages = [p for p in self.pages() if p.task_id == task_id and pid in (None, p.pid)]
        return min(pages, key=lambda page: page.end() is not None, default=None)

    def _beating(self) -> Iterator[PageView]:
        return (
            page
            for page in self.pages()
            if page.token not in self._forsaken and not self._verdicts.stands(page.token)
        )
