"""What a loop does about an item whose work fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, TypeAlias

from ..errors import CheckpointMismatch, LeaseLost, StoreUnavailable, TooManyItemErrors
from .checked import whole_number

#: No fault of an item, under any policy.
_NEVER_AN_ITEMS = (LeaseLost, StoreUnavailable, CheckpointMismatch, TooManyItemErrors)


@dataclass(frozen=True, slots=True)
class SkipItems:
    """Record an item that fails and go on with the next; above ``limit`` of them, fail."""

    limit: int = 100

    def __post_init__(self) -> None:
        whole_number("limit", self.limit)


@dataclass(frozen=True, slots=True)
class RetryItem:
    """Try an item that fails again at once, up to ``times`` more; then its error is raised."""

    times: int = 3

    def __post_init__(self) -> None:
        whole_number("times", self.times)


ItemErrors: TypeAlias = Literal["raise"] | SkipItems | RetryItem


def check_item_errors(value: object) -> None:
    """Raise unless it is a policy."""
    if value != "raise" and not isinstance(value, (SkipItems, RetryItem)):
        raise TypeError(
            f"on_item_error is {value!r}; it must be 'raise', SkipItems(limit=…) or "
            "RetryItem(times=…)"
        )


class ItemGuard:
    """What ``rows.item()`` gives: a context manager around the work on one item."""

    __slots__ = ("_failed", "_let_pass")

    def __init__(
        self,
        failed: Callable[[Exception], bool],
        let_pass: tuple[type[BaseException], ...] = (),
    ) -> None:
        self._failed = failed
        self._let_pass = let_pass

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if not isinstance(exc, Exception) or isinstance(exc, (*_NEVER_AN_ITEMS, *self._let_pass)):
            return False
        return self._failed(exc)
