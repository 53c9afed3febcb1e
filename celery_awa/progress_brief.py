"""What one call of ``set_progress`` reports, checked and written as a JSON object. Pure."""

from __future__ import annotations

import operator
import reprlib
from enum import Enum
from typing import Final

from .errors import InvalidProgress
from .progress_values import MAX_INTEGER, Refused, encode_number, encode_text, kind_of


class Unset(Enum):
    """Tells a percent that was not given from one that is given as None (indeterminate)."""

    UNSET = "unset"


UNSET: Final = Unset.UNSET


def encode_brief(
    percent: int | float | Unset | None,
    message: str | None,
    current: float | None = None,
    total: float | None = None,
    rate: float | None = None,
) -> str:
    """The JSON object of what one call reports; see ``ProgressBuffer.set_progress``.

    Numbers are int, float, and whatever is an integer by ``__index__``. ``current``, ``total``
    and ``rate`` must be finite and not negative.
    """
    if type(percent) is int and current is None and total is None:
        numbers = _PERCENTS[percent if 0 <= percent <= 100 else 0 if percent < 0 else 100]
    else:
        numbers = _numbers(percent, message, current, total)
    if rate is not None:
        numbers += f',"rate":{encode_number(_count("rate", rate))}'
    if message is None:
        return f"{{{numbers}}}"
    separator = "," if numbers else ""
    return f'{{{numbers}{separator}"message":{_message(message)}}}'


_PERCENTS: Final = tuple(f'"percent":{percent}' for percent in range(101))


def _numbers(
    percent: int | float | Unset | None,
    message: str | None,
    current: float | None,
    total: float | None,
) -> str:
    counts = ""
    if current is not None:
        current = _count("current", current)
        counts = f',"current":{encode_number(current)}'
    if total is not None:
        total = _count("total", total)
        counts += f',"total":{encode_number(total)}'
    if percent is not UNSET:
        whole = None if percent is None else _whole_percent(percent)
    elif counts:
        whole = _share(current, total)
    elif message is None:
        raise InvalidProgress("progress", "nothing given: give percent, message, current or total")
    else:
        return ""
    return f'"percent":{"null" if whole is None else whole}{counts}'


def _whole_percent(value: object) -> int:
    return int(min(max(_plain_number("percent", value), 0), 100))


def _count(name: str, value: object) -> int | float:
    if type(value) is int and 0 <= value <= MAX_INTEGER:
        return value
    count = _plain_number(name, value)
    if count < 0:
        raise InvalidProgress(name, f"must not be negative, is {reprlib.repr(count)}")
    if type(count) is int and count > MAX_INTEGER:
        raise InvalidProgress(name, "must fit into 64 bits")
    return count


def _plain_number(name: str, value: object) -> int | float:
    """The value as an exact int or a finite exact float."""
    if issubclass(type(value), float):
        number = float.__float__(value)  # type: ignore[arg-type]  # just asked
        if number - number != 0:
            raise InvalidProgress(name, f"must be finite, is {number}")
        return number
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]  # a wrong type is the question
    except TypeError:
        raise InvalidProgress(
            name, f"must be an int, a float or None, not {kind_of(value)}"
        ) from None


def _share(current: float | None, total: float | None) -> int | None:
    """How many whole percent ``current`` is of ``total``; None where that cannot be said."""
    if current is None or not total:
        return None
    if current >= total:
        return 100
    if total > 1e300:  # a hundred times as much might be infinite
        current, total = current / 1000, total / 1000
    # Rounding up to 100 may not happen here: what is below the total is not all of it.
    return min(int(100 * current // total), 99)


def _message(value: object) -> str:
    if not issubclass(type(value), str):
        raise InvalidProgress("message", f"must be a string or None, not {kind_of(value)}")
    try:
        return encode_text(str.__str__(value))
    except Refused as refused:
        raise refused.at("message") from None
