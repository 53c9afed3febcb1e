"""Arguments of loops, steps and sources: checked at the call, named with what is allowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from ..runtime.ending import is_storable

_MOST_CHARACTERS = 100

#: What a loop says it does: a text, or a function of the item.
Message: TypeAlias = "str | Callable[[Any], str] | None"


def whole_number(name: str, value: Any) -> int:
    """The value; ValueError or TypeError unless it is a whole number, 1 or more."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; it must be a whole number, 1 or more")
    if value < 1:
        raise ValueError(f"{name} is {value!r}; it must be 1 or more")
    return value


def seconds(name: str, value: Any) -> float:
    """The value; ValueError or TypeError unless it is a number above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {value!r}; it must be a number of seconds above 0")
    if not 0 < value < 1e9:
        raise ValueError(f"{name} is {value!r}; it must be a number of seconds above 0")
    return value


def name_of(what: str, value: Any) -> str:
    """The value; ValueError or TypeError unless it can name a loop or a step."""
    if not isinstance(value, str):
        raise TypeError(f"the name of a {what} must be a text, not {type(value).__name__}")
    if not 0 < len(value) <= _MOST_CHARACTERS or "/" in value or not is_storable(value):
        raise ValueError(
            f"the name of a {what} is {value!r}; it must have 1 to {_MOST_CHARACTERS} characters "
            "and no slash"
        )
    return value


def total(value: Any) -> float | None:
    """The value; ValueError or TypeError unless it is None or a finite number, 0 or more."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"total is {value!r}; it must be a number, 0 or more, or None")
    if not 0 <= value < float("inf"):
        raise ValueError(f"total is {value!r}; it must be finite, and 0 or more")
    return value


def message(value: Any) -> Message:
    """The value; TypeError unless it is a text, a function or None."""
    if value is not None and not isinstance(value, str) and not callable(value):
        raise TypeError(f"message is {value!r}; it must be a text, a function of the item or None")
    told: Message = value
    return told
