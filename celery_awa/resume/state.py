"""What loops and steps keep: values, their JSON forms, and how a row's are read. Pure.

What is in a row was perhaps edited by hand: what does not have the form is as if it were not there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..runtime.ending import error_text

#: Of the skipped items the last ones are told, with so many characters of their errors.
_MOST_TOLD, _MOST_CHARACTERS = 20, 500


@dataclass(frozen=True, slots=True)
class Skipped:
    """Which items of a loop were given up; a batch that failed counts as one."""

    count: int = 0
    last: tuple[Any, ...] = ()

    def plus(self, first: int, last: int, error: BaseException | str) -> Skipped:
        """And those of these numbers, counted from 1."""
        told = {"item": first, "error": error_text(error)[:_MOST_CHARACTERS]}
        if last != first:
            told["last_item"] = last
        return Skipped(self.count + 1, (*self.last, told)[-_MOST_TOLD:])

    def as_json(self) -> dict[str, Any]:
        return {"count": self.count, "last": list(self.last)}


NONE_SKIPPED = Skipped()

#: How far a loop is: items done, the cursor of the last of them, those skipped. A plain tuple, so
#: that one is made and stored in nanoseconds, and whatever strikes in between finds a whole one.
At: TypeAlias = "tuple[int, Any, Skipped]"


def loop_state(at: At, *, finished: bool = False) -> dict[str, Any]:
    """The JSON form of how far a loop is; {} where it has not begun."""
    done, cursor, skipped = at
    state: dict[str, Any] = {"finished": True} if finished else {"cursor": cursor}
    if not finished and not done:
        return {}
    state["done"] = done
    if skipped.count:
        state["skipped"] = skipped.as_json()
    return state


@dataclass(frozen=True, slots=True)
class FoundLoop:
    """What earlier attempts left of a loop.

    ``trying``: the number of the item that was worked on last, and how often a worker had begun it.
    ``commits``: its cursor is committed in the task's own transactions.
    """

    at: At = (0, None, NONE_SKIPPED)
    finished: bool = False
    trying: tuple[int, int] | None = None
    commits: bool = False


def found_loop(kept: object, committed: object) -> FoundLoop:
    """Of what was kept and what was committed, whichever is further."""
    kept, committed = _object(kept), _object(committed)
    further = committed if _count(committed.get("done")) > _count(kept.get("done")) else kept
    done = _count(further.get("done"))
    skipped, trying = _object(further.get("skipped")), _object(kept.get("trying"))
    item, tries = _count(trying.get("item")), _count(trying.get("tries"))
    return FoundLoop(
        at=(
            done,
            further.get("cursor"),
            Skipped(_count(skipped.get("count")), tuple(_list(skipped.get("last")))),
        ),
        finished=further.get("finished") is True,
        trying=(item, tries) if tries else None,
        commits=bool(committed),
    )


@dataclass(frozen=True, slots=True)
class StepsState:
    """The steps that are known, in order; how many of them are finished; the next one's cursor."""

    names: tuple[str, ...] = ()
    finished: int = 0
    cursor: Any = None

    def as_json(self) -> dict[str, Any]:
        state: dict[str, Any] = {"names": list(self.names), "finished": self.finished}
        if self.cursor is not None:
            state["cursor"] = self.cursor
        return state


def found_steps(kept: object) -> StepsState:
    """The steps that earlier attempts met."""
    kept = _object(kept)
    names = _list(kept.get("names"))
    if not all(isinstance(name, str) for name in names):
        return StepsState()
    return StepsState(
        tuple(names), min(_count(kept.get("finished")), len(names)), kept.get("cursor")
    )


def found_loops(kept: object) -> dict[str, dict[str, Any]]:
    """The loops of earlier attempts, by name."""
    return {name: dict(state) for name, state in _object(kept).items() if isinstance(state, dict)}


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
