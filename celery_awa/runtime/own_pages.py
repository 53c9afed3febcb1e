"""Runs in a pool child: the pages of the slate that this process took, one for each attempt.

An attempt has its page from its begin (the task's thread) until its end is confirmed (the
database thread), so an attempt whose end is not confirmed yet keeps it while the next runs.
"""

from __future__ import annotations

from .attempt import Attempt
from .in_flight import InFlight
from .page import Page
from .slate import Slate


class OwnPages:
    """Gives pages to attempts and takes them back; there are none without a slate."""

    def __init__(self, slate: Slate | None, in_flight: InFlight) -> None:
        self._slate = slate
        self._in_flight = in_flight
        self._pages: list[Page] = []

    def give(self, attempt: Attempt) -> None:
        """Let a page carry the attempt, if there is one to be had. Called by one thread."""
        attempt.page = page = self._idle()
        if page is None:
            return
        try:
            page.begin(attempt.token, attempt.task_id)
        except ValueError:  # an id that is too long for the database as well
            attempt.page = None
        else:
            attempt.buffer.attach(page)

    def take_back(self, attempt: Attempt) -> None:
        """The attempt is over: its page is idle. Nothing happens where it has none."""
        page = attempt.page
        if page is None:
            return
        # This waits for a thread which is reporting just now: what it writes after the page went
        # to the next attempt would read as that one's.
        attempt.buffer.attach(_NOWHERE)
        page.clear(token=attempt.token)
        attempt.page = None

    def _idle(self) -> Page | None:
        # Told by who has them, not by a list of its own: an exception that strikes in the midst
        # of a begin costs no page.
        used = {id(attempt.page) for attempt in self._in_flight.all()}
        idle = [page for page in self._pages if id(page) not in used]
        if idle or self._slate is None:
            return idle[0] if idle else None
        page = self._slate.take_page()
        if page is not None:
            self._pages.append(page)
        return page


class _Nowhere:
    """A page that nobody reads."""

    def write_brief(self, generation: int, data: bytes) -> None:
        return

    def write_metadata(self, generation: int, data: bytes) -> None:
        return


_NOWHERE = _Nowhere()
