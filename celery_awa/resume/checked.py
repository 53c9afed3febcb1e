"""Arguments of loops and steps, checked at the call."""

from __future__ import annotations

from typing import Any

_MOST_CHARACTERS = 100


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
    if not 0 < len(value) <= _MOST_CHARACTERS or "/" in value or "\0" in value:
        raise ValueError(
            f"the name of a {what} is {value!r}; it must have 1 to {_MOST_CHARACTERS} characters "
            "and no slash"
        )
    return value
