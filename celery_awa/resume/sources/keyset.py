"""Paging by a key: each page begins after the last one's key, so no offset is counted through."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar

from ...errors import CheckpointMismatch
from ..checked import whole_number
from .base import SourceBase
from .key_values import from_json, to_json

T = TypeVar("T")

Key = tuple[Any, ...]
#: A number of rows, or that they are to be counted.
Total = int | Literal["count"] | None


class Keyed(NamedTuple):
    """A row with its key, and whether the row before it has the same."""

    row: Any
    key: Key
    repeats: bool


class KeysetSource(SourceBase[T]):
    """Rows in the ascending order of a unique key. A cursor is the key, by the columns' names.

    The subclass asks for the rows.
    """

    def __init__(self, names: Sequence[str], page_size: int, total: Total) -> None:
        self._names = tuple(names)
        self._page_size = whole_number("page_size", page_size)
        self._total = _checked_total(total)

    def total(self) -> int | None:
        """As given; counted once if it is "count"."""
        if self._total == "count":
            self._total = self._count()
        return self._total

    def read(self, cursor: Any | None) -> Iterator[tuple[T, dict[str, Any]]]:
        """Raises ValueError where a key is NULL or comes twice, before a row is lost by it."""
        return self._pages(None if cursor is None else self._key_in(cursor))

    def _page(self, after: Key | None, limit: int) -> list[Keyed]:
        """Up to so many rows after this key, in its order."""
        raise NotImplementedError

    def _lacks_key(self) -> bool:
        """Whether there is a row with NULL in its key."""
        raise NotImplementedError

    def _count(self) -> int:
        raise NotImplementedError

    def _pages(self, after: Key | None) -> Iterator[tuple[T, dict[str, Any]]]:
        more = True
        while more:
            # One row more shows whether there is another page, and whether it begins with the key
            # that this one ends with. All are checked first: once a row is done, the next attempt
            # would not see what has the same key.
            rows = self._page(after, self._page_size + 1)
            self._check(rows, after)
            more = len(rows) > self._page_size
            for row, key, _ in rows[: self._page_size]:
                yield row, self._cursor(key)
                after = key
        if self._lacks_key():
            self._refuse_null()

    def _check(self, rows: Sequence[Keyed], after: Key | None) -> None:
        if after is not None and rows and rows[0].key == after:
            raise ValueError(
                f"the key {self._shown(after)} came again after itself: what the database has is "
                "not exactly what it gives, so choose another key"
            )
        for _, key, repeats in rows:
            if None in key:
                self._refuse_null()
            if repeats:
                raise ValueError(
                    f"several rows have the key {self._shown(key)}, and one of them could be lost "
                    "between two pages: add columns to the key that make it unique"
                )

    def _refuse_null(self) -> NoReturn:
        raise ValueError(
            f"a row has NULL in its key ({self._shown_names()}), and would not be seen after "
            "others: leave such rows out of the query, or choose a key that is never NULL"
        )

    def _cursor(self, key: Key) -> dict[str, Any]:
        return {name: to_json(value) for name, value in zip(self._names, key, strict=True)}

    def _key_in(self, cursor: Any) -> Key:
        if not isinstance(cursor, dict) or set(cursor) != set(self._names):
            raise CheckpointMismatch(
                f"the checkpoint lies after {cursor!r}, which is no key of ({self._shown_names()})"
            )
        return tuple(from_json(cursor[name]) for name in self._names)

    def _shown_names(self) -> str:
        return ", ".join(self._names)

    def _shown(self, key: Key) -> str:
        pairs = zip(self._names, key, strict=True)
        return ", ".join(f"{name}={value!r}" for name, value in pairs)


def with_repeats(rows: Sequence[tuple[Any, Key]]) -> list[Keyed]:
    """Rows with whether each one's key equals that of the row before."""
    before: list[Key | None] = [None, *(key for _, key in rows)]
    pairs = zip(rows, before, strict=False)  # the last row is before none
    return [Keyed(row, key, key == last) for (row, key), last in pairs]


def _checked_total(total: Total) -> Total:
    is_number = isinstance(total, int) and not isinstance(total, bool) and total >= 0
    if total is None or total == "count" or is_number:
        return total
    raise ValueError(f'total is {total!r}; it must be None, a number of rows, or "count"')
