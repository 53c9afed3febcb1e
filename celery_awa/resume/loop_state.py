"""How far a loop is, as it is kept: JSON values only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

#: Left-out items that are kept with their error, and the characters of each.
_LAST, _MOST_CHARACTERS = 20, 500


@dataclass(frozen=True, slots=True)
class LoopState:
    """``done``: finished items, those that were left out among them; ``cursor``: of the last.

    ``skipped``: how many were left out, and the last of them with number and error.
    """

    done: int = 0
    cursor: Any = None
    finished: bool = False
    skipped: int = 0
    last_skipped: tuple[dict[str, Any], ...] = ()

    def advanced(self, items: int, cursor: Any, skipped: list[dict[str, Any]]) -> LoopState:
        """After so many more items, some of which were left out."""
        left_out = sum(entry.get("to", entry["item"]) - entry["item"] + 1 for entry in skipped)
        return LoopState(
            self.done + items,
            cursor,
            False,
            self.skipped + left_out,
            (*self.last_skipped, *skipped)[-_LAST:],
        )

    def ended(self) -> LoopState:
        """With nothing left to do, and so without a cursor."""
        return replace(self, cursor=None, finished=True)

    def kept(self) -> dict[str, Any]:
        """As it is kept."""
        kept: dict[str, Any] = {"done": self.done}
        if self.finished:
            kept["finished"] = True
        else:
            kept["cursor"] = self.cursor
        if self.skipped:
            kept["skipped"] = {"count": self.skipped, "last": list(self.last_skipped)}
        return kept


def from_kept(kept: dict[str, Any]) -> LoopState:
    """What was kept."""
    skipped = kept.get("skipped") or {}
    return LoopState(
        kept.get("done", 0),
        kept.get("cursor"),
        bool(kept.get("finished")),
        skipped.get("count", 0),
        tuple(skipped.get("last", ())),
    )


def newest(reported: LoopState, committed: LoopState) -> LoopState:
    """Of what was kept and what was committed in transactions, the one that is further."""
    if reported.finished:
        return reported
    return committed if committed.done >= reported.done else reported


def skipped_item(first: int, last: int, error: str) -> dict[str, Any]:
    """An item that is left out, or a batch of them, by number from 1."""
    entry: dict[str, Any] = {"item": first, "error": error[:_MOST_CHARACTERS]}
    return entry if first == last else {**entry, "to": last}
