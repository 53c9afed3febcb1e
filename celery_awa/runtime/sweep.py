"""Runs on the worker's database thread: frees the pages of dead children, once they are written.

A dead child's attempt goes on being heartbeaten until Celery's verdict comes, or, if none does,
for twice ``awa_stale_after``: then what is on the page is written and the page freed.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ..errors import RowLocked, StoreRefused
from ..model import Beat, Ended, Transition
from ..settings import Settings
from ..store.protocol import Store
from .beats import send_with_progress
from .ending import Ending, from_page, with_last_snapshot
from .errand import Errand
from .page import PageView
from .trouble import Trouble


class Sweep:
    """The service that looks after the pages whose process is dead.

    ``verdicts`` are the ends that the worker was told of, by token; the sweep removes those that
    are done and that no page needs any more.
    """

    def __init__(
        self,
        pages: Callable[[], list[PageView]],
        verdicts: dict[str, Errand[Ended]],
        settings: Settings,
        trouble: Trouble,
    ) -> None:
        self._pages = pages
        self._verdicts = verdicts
        self._settings = settings
        self._trouble = trouble
        self._dead_since: dict[str, float] = {}
        self._next = 0.0

    def due(self) -> float | None:
        return self._next

    def run_once(self, open_store: Callable[[], Store]) -> int:
        """One pass; returns how many pages were freed."""
        now = time.monotonic()
        self._next = now + self._settings.write_interval
        # The verdicts first: one that comes after this look cannot be taken for a page's that
        # is gone.
        done = [token for token, errand in self._verdicts.copy().items() if errand.done]
        pages = self._pages()
        dead = [page for page in pages if not page.alive()]
        self._dead_since = {p.token: self._dead_since.get(p.token, now) for p in dead}
        freed = [page for page in dead if self._is_settled(page, now, open_store)]
        for page in freed:
            page.free()
        carried = {page.token for page in pages} - {page.token for page in freed}
        for token in done:
            if token not in carried:
                del self._verdicts[token]
        return len(freed)

    def _is_settled(self, page: PageView, now: float, open_store: Callable[[], Store]) -> bool:
        """Whether the page can go."""
        verdict = self._verdicts.get(page.token)
        if verdict is not None:
            return verdict.done
        own_end = self._own_end(page)
        if own_end is not None:
            return self._write_end(page, own_end, open_store())
        if now - self._dead_since[page.token] < 2 * self._settings.stale_after:
            return False
        return page.lease is None or self._write_last(page, open_store())

    def _own_end(self, page: PageView) -> Transition | None:
        """The end that the child left; a lease is needed to write it."""
        data = page.end() if page.lease is not None else None
        try:
            return from_page(data) if data else None
        except ValueError as exc:  # not ours, or of another version
            self._trouble.warn("bug", "celery-awa: an end cannot be read", exc_info=exc)
            return None

    def _write_end(self, page: PageView, own_end: Transition, store: Store) -> bool:
        transition = with_last_snapshot(own_end, page.snapshot())
        ending = Ending(page.token, page.lease, None, transition)
        try:
            ending.write(store)
        except RowLocked:
            return False
        except StoreRefused as exc:
            self._trouble.warn("refused", "celery-awa: the database refused an end: %s", exc)
        return True

    def _write_last(self, page: PageView, store: Store) -> bool:
        if page.lease is None:
            return True
        sent = send_with_progress(store, [Beat(page.lease, page.snapshot())])
        return page.lease not in sent.skipped
