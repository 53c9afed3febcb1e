"""Runs in a prefork worker: which attempts got a verdict, noted where Celery gives it.

Noted on the worker's main thread or the pool's result thread, looked at by the database thread.
Each step on the dictionary is one of the interpreter's, so there is no lock.
"""

from __future__ import annotations

from ..model import Ended
from .errand import Errand


class Verdicts:
    """The ends that the worker was told of for attempts that are on a page, by their tokens."""

    def __init__(self) -> None:
        self._errands: dict[str, Errand[Ended | None]] = {}

    def __len__(self) -> int:
        return len(self._errands)

    def note(self, token: str, errand: Errand[Ended | None]) -> None:
        """The end is on its way; its answer is None if it gave way to the child's own."""
        self._errands[token] = errand

    def stands(self, token: str) -> bool:
        """Whether there is one. The first counts, but what gave way is as if it had not been."""
        errand = self._errands.get(token)
        return errand is not None and not _gave_way(errand)

    def written(self, token: str) -> bool:
        """Whether a verdict that stands was confirmed, or refused for good."""
        errand = self._errands.get(token)
        return errand is not None and errand.done and not _gave_way(errand)

    def done(self) -> list[str]:
        """The tokens of those of which nothing is to come any more."""
        return [token for token, errand in self._errands.copy().items() if errand.done]

    def forget(self, token: str) -> None:
        """No page needs it any more."""
        self._errands.pop(token, None)


def _gave_way(errand: Errand[Ended | None]) -> bool:
    return errand.done and errand.answer is None and errand.error is None
