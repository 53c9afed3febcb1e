"""A sequence that the task has in memory, or makes anew the same way in each attempt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from ...errors import CheckpointMismatch
from .base import SourceBase

T = TypeVar("T")


class SequenceSource(SourceBase[T]):
    """The items of a sequence, by their index; what ``iterate`` makes of a list or a range.

    It must hold the same items in the same order in each attempt. One that became shorter than
    what is done is refused with CheckpointMismatch; other changes cannot be seen.
    """

    def __init__(self, items: Sequence[T]) -> None:
        self._items = items

    def total(self) -> int:
        return len(self._items)

    def read(self, cursor: Any | None) -> Iterator[tuple[T, int]]:
        """A cursor is the index of the item."""
        first = 0 if cursor is None else self._after(cursor)
        return self._from(first)

    def position(self, cursor: Any, done: int) -> int:
        return int(cursor) + 1

    def _after(self, cursor: Any) -> int:
        if not isinstance(cursor, int) or not 0 <= cursor < len(self._items):
            raise CheckpointMismatch(
                f"the checkpoint lies after index {cursor!r} of a sequence that has "
                f"{len(self._items)} items now"
            )
        return cursor + 1

    def _from(self, index: int) -> Iterator[tuple[T, int]]:
        # By index: whatever loads its items when they are asked for does not load those before.
        # The length each time: a list may change in the loop, as in any other.
        while index < len(self._items):
            yield self._items[index], index
            index += 1
