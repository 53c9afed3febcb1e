"""What a loop asks of what it loops over: items, each with a cursor to go on after it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Unreadable:
    """In place of an item that cannot be read; the loop treats ``error`` as that of the item."""

    error: Exception


@runtime_checkable
class Source(Protocol[T_co]):
    """Items in an order that stays the same, each with a cursor from which to go on after it.

    Deriving from :class:`SourceBase` leaves only :meth:`read` to be written.
    """

    def read(self, cursor: Any | None) -> Iterator[tuple[T_co | Unreadable, Any]]:
        """Items after that of ``cursor``, each with its own cursor; None: from the first on.

        Cursors are JSON values, and never None. Raises CheckpointMismatch for a cursor that does
        not fit.
        """
        ...

    def total(self) -> float | None:
        """How much there is in all, in the unit of :meth:`position`; None where unknown.

        Asked once an attempt; may take its time.
        """
        ...

    def position(self, cursor: Any, done: int) -> float | None:
        """How far it is at this cursor, after ``done`` items; None: so many items."""
        ...

    def close(self) -> None:
        """The loop is over; give back what :meth:`read` opened, whether read to the end or not."""
        ...


class SourceBase(Generic[T_co]):
    """What most sources have in common: no total, positions in items, nothing to close."""

    def read(self, cursor: Any | None) -> Iterator[tuple[T_co | Unreadable, Any]]:
        """For the subclass: see :meth:`Source.read`."""
        raise NotImplementedError(f"{type(self).__qualname__} must define read(cursor)")

    def total(self) -> float | None:
        """Unknown."""
        return None

    def position(self, cursor: Any, done: int) -> float | None:
        """In items."""
        return None

    def close(self) -> None:
        """Nothing to close."""
