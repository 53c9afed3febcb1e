"""What a loop hands out one at a time: an item, or a batch of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .sources.base import Unreadable
from .state import At, Skipped

Records = Iterator[tuple[Any, Any]]


@dataclass(slots=True)
class Piece:
    """Records from number ``first`` to ``last``; ``cursor`` is the last one's.

    ``items``: those of them that could be read; ``unreadable``: numbers and errors of the others.
    """

    first: int
    last: int = 0
    cursor: Any = None
    items: list[Any] = field(default_factory=list)
    unreadable: list[tuple[int, Exception]] = field(default_factory=list)

    def after(self, skipped: Skipped) -> At:
        """How far the loop is once it is finished, beside what was skipped before."""
        for number, error in self.unreadable:
            skipped = skipped.plus(number, number, error)
        return (self.last, self.cursor, skipped)

    def given_up(self, skipped: Skipped, error: BaseException | str) -> At:
        """How far the loop is once this was skipped as a whole, as one of the skipped."""
        return (self.last, self.cursor, skipped.plus(self.first, self.last, error))


def read_pieces(
    records: Records, done: int, size: int, refuse: Callable[[int, int, Exception], None]
) -> Iterator[Piece]:
    """Pieces of up to ``size`` items. What cannot be read at the front is a piece without items.

    ``refuse`` raises if, of the present piece, so many records (the second argument) may not be
    skipped for being unreadable. What was read before such a record is handed out first.
    """
    piece = Piece(done + 1)
    for item, cursor in records:
        number = done = done + 1
        if not isinstance(item, Unreadable):
            piece.items.append(item)
        else:
            count = len(piece.unreadable) + 1
            try:
                refuse(number, count, item.error)
            except Exception:
                if not piece.items:
                    raise
                yield piece
                refuse(number, 1, item.error)
                piece = Piece(number)
            piece.unreadable.append((number, item.error))
        piece.last, piece.cursor = number, cursor
        if len(piece.items) == size or not piece.items:
            yield piece
            piece = Piece(number + 1)
    if piece.last:
        yield piece
