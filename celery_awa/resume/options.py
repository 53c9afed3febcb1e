"""The options of one loop, checked."""

from __future__ import annotations

from dataclasses import dataclass

from . import checked
from .item_errors import ItemErrors, RetryItem, SkipItems, check_item_errors


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """See ``AwaMixin.iterate``. Raises ValueError or TypeError for what is not allowed."""

    name: str = "items"
    batch_size: int | None = None
    checkpoint_every: int = 100
    checkpoint_interval: float = 0.1
    on_item_error: ItemErrors = "raise"
    kill_limit: int | None = None
    message: checked.Message = None

    def __post_init__(self) -> None:
        checked.name_of("loop", self.name)
        checked.whole_number("checkpoint_every", self.checkpoint_every)
        checked.seconds("checkpoint_interval", self.checkpoint_interval)
        for name in ("batch_size", "kill_limit"):
            if getattr(self, name) is not None:
                checked.whole_number(name, getattr(self, name))
        check_item_errors(self.on_item_error)
        checked.message(self.message)

    @property
    def plain(self) -> bool:
        """Whether every item is handed out once, alone, and nothing is noted of it before."""
        return self.batch_size is None and self.kill_limit is None and self.on_item_error == "raise"

    @property
    def times(self) -> int:
        """How often an item that failed is handed out again."""
        return self.on_item_error.times if isinstance(self.on_item_error, RetryItem) else 0

    def may_skip(self, count: int) -> bool:
        """Whether so many items of a run may be skipped for their errors."""
        return isinstance(self.on_item_error, SkipItems) and count <= self.on_item_error.limit

    def tells(self, item: object) -> str | None:
        """The message of an item."""
        return self.message(item) if callable(self.message) else self.message
