"""Runs on the worker's database thread: frees the pages of dead children, once they are written.

A dead child's attempt goes on being heartbeaten until Celery's verdict comes, or, if none does,
for twice ``awa_stale_after`` and longer than Celery needs: then what is on the page is written, its
lease is given up, and the page freed.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ..settings import Settings
from ..store.protocol import Store
from .last_words import own_end, write_last
from .page import PageView
from .trouble import Trouble
from .verdicts import Verdicts

#: Seconds within which Celery gives its verdict on a lost child: it looks after its pool every
#: 5 s, and waits 10 s (``worker_lost_wait``) for a result that may still come.
VERDICT_WITHIN = 20.0


class Sweep:
    """The service that looks after the pages whose process is dead.

    It forgets verdicts that are done and that no page needs any more.
    """

    def __init__(
        self,
        pages: Callable[[], list[PageView]],
        verdicts: Verdicts,
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
        done = self._verdicts.done()
        pages = self._pages()
        dead = [page for page in pages if not page.alive()]
        self._dead_since = {p.token: self._dead_since.get(p.token, now) for p in dead}
        freed = self._settled(dead, now, open_store)
        for page in freed:
            page.free()
        carried = {page.token for page in pages} - {page.token for page in freed}
        for token in done:
            if token not in carried:
                self._verdicts.forget(token)
        return len(freed)

    def _settled(
        self, dead: list[PageView], now: float, open_store: Callable[[], Store]
    ) -> list[PageView]:
        """The pages that can go."""
        settled = [page for page in dead if self._verdicts.written(page.token)]
        left = [
            page
            for page in dead
            if not self._verdicts.stands(page.token) and self._is_due(page, now)
        ]
        return settled + (write_last(left, open_store(), self._trouble) if left else [])

    def _is_due(self, page: PageView, now: float) -> bool:
        """Whether no verdict is to be waited for: the child has ended it, or none came for long."""
        if own_end(page, self._trouble) is not None:
            return True
        patience = max(2 * self._settings.stale_after, VERDICT_WITHIN)
        return now - self._dead_since[page.token] >= patience
