"""What may be given to loops and steps; each error names the argument and what is allowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

MOST_CHARACTERS = 100
#: Seconds; the bound of every duration.
_LONGEST = 1e9

#: What a loop says it does: a text, or a function of the item.
Message: TypeAlias = "str | Callable[[Any], str] | None"


def check_name(value: object) -> None:
    """Raise unless it can name a loop or a step."""
    allowed = f"a text of 1 to {MOST_CHARACTERS} characters, without '/'"
    if not isinstance(value, str):
        raise TypeError(f"name is {value!r}; it must be {allowed}")
    if not 0 < len(value) <= MOST_CHARACTERS or "/" in value or not _storable(value):
        raise ValueError(f"name is {value!r}; it must be {allowed}")


def check_count(name: str, value: object) -> None:
    """Raise unless it is an int of 1 or more."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; it must be an int, 1 or more")
    if value < 1:
        raise ValueError(f"{name} is {value!r}; it must be 1 or more")


def check_seconds(name: str, value: object) -> None:
    """Raise unless it is a number of seconds above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {value!r}; it must be a number of seconds above 0")
    if not 0 < value < _LONGEST:
        raise ValueError(f"{name} is {value!r}; it must be a number of seconds above 0")


def check_total(value: object) -> None:
    """Raise unless it is None or a finite number, 0 or more."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"total is {value!r}; it must be a number, 0 or more, or None")
    if not 0 <= value < float("inf"):
        raise ValueError(f"total is {value!r}; it must be finite, and 0 or more")


def check_message(value: object) -> None:
    """Raise unless it is a text, a function or None."""
    if value is not None and not isinstance(value, str) and not callable(value):
        raise TypeError(f"message is {value!r}; it must be a text, a function of the item or None")


def _storable(text: str) -> bool:
    """Whether Postgres takes it: without NUL characters and lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text
