"""What may be stored as progress, and its one JSON form. Pure: nothing here keeps state.

Checked before it is written, because encoders turn NaN into null, sets into lists and equal keys
into one, all silently, and because PostgreSQL's jsonb refuses NUL characters, lone surrogates
and infinity only when it is too late to say so at the call.

| Python | JSON |
|---|---|
| None, bool, str | the same; subclasses become plain |
| int, or anything with ``__index__`` | number, from -2**63 to 2**64 - 1 |
| float | number, finite, never in a form that jsonb would turn into an integer |
| list, tuple, named tuple | array |
| mapping with string keys, dataclass instance | object |
| datetime, date, time | ISO 8601 text; a zone is kept as an offset, none is made up |
| UUID, Decimal | text, as ``str()`` gives it; a Decimal must be finite |
| Enum | as its value |

Everything else is refused with :class:`~celery_awa.errors.InvalidProgress`.
"""

from __future__ import annotations

import json
import operator
import reprlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from datetime import date, datetime, time
from decimal import Decimal
from enum import Enum
from json.encoder import encode_basestring as quote
from typing import Any, Final
from uuid import UUID

from .errors import InvalidProgress, ProgressTooLarge

#: The metadata object itself is level 1.
MAX_DEPTH: Final = 64
MIN_INTEGER: Final = -(2**63)
MAX_INTEGER: Final = 2**64 - 1

# How many times the limit is written before a value is given up: the error names its true size
# where it can, and a small value that refers to itself many times over cannot fill the memory.
_GIVE_UP_AT: Final = 16
_ALLOWED: Final = (
    "allowed are None, bool, int, float, str, lists, tuples, mappings with string keys, "
    "datetime, date, time, UUID, Decimal, Enum and dataclass instances"
)


class Refused(Exception):
    """Why a value was refused; its path is gathered on the way out, innermost key first."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.path: list[Any] = []

    def at(self, field: str) -> InvalidProgress:
        """The error for the user; ``field`` is where the path begins."""
        steps = [f"[{reprlib.repr(key)}]" for key in reversed(self.path)]
        if len(steps) > 10:
            steps[5:-3] = ["…"]
        return InvalidProgress(field + "".join(steps), self.reason)


def encode_pairs(values: Mapping[str, Any], limit: int) -> dict[str, str]:
    """For each key of the metadata its ``"key":value`` in JSON.

    Raises InvalidProgress with the path of what is refused, and ProgressTooLarge if it is
    hopeless to go on writing; a size just above the limit is for the caller to find.
    """
    if type(values) is not dict and not isinstance(values, Mapping):
        raise InvalidProgress(
            "metadata", f"must be a mapping with string keys, not {kind_of(values)}"
        )
    try:
        return _pairs(values, 1, limit)
    except Refused as refused:
        raise refused.at("metadata") from None


def encode_kept(values: Mapping[str, Any]) -> dict[str, str]:
    """Pairs of what the database held. It is kept as it is, allowed or not."""
    pairs: dict[str, str] = {}
    for key, value in values.items():
        try:
            pairs.update(encode_pairs({key: value}, sys.maxsize))
        except InvalidProgress:
            # Somebody edited the row, or a later version allows more.
            text = json.dumps({key: value}, ensure_ascii=False, separators=(",", ":"))
            pairs[key] = text[1:-1]
    return pairs


def _pairs(values: Mapping[str, Any], depth: int, limit: int) -> dict[str, str]:
    if depth > MAX_DEPTH:
        raise _too_deep()
    pairs: dict[str, str] = {}
    size = 0
    try:
        for key, value in values.items():
            name = key if type(key) is str else _plain_key(key)
            if name in pairs:
                raise Refused("another key is the same string")
            writer = _BY_TYPE.get(type(value)) or _writer_of(type(value))
            pairs[name] = pair = f"{encode_text(name)}:{writer(value, depth + 1, limit)}"
            size += len(pair) + 1
            if size > limit * _GIVE_UP_AT:
                raise ProgressTooLarge(size, limit)
    except Refused as refused:
        refused.path.append(key)
        raise
    return pairs


def _mapping(value: Mapping[str, Any], depth: int, limit: int) -> str:
    return f"{{{','.join(_pairs(value, depth, limit).values())}}}"


def _dataclass(value: Any, depth: int, limit: int) -> str:
    return _mapping({f.name: getattr(value, f.name) for f in fields(value)}, depth, limit)


def _sequence(values: list[Any] | tuple[Any, ...], depth: int, limit: int) -> str:
    if depth > MAX_DEPTH:
        raise _too_deep()
    items: list[str] = []
    size = 0
    try:
        for value in values:
            writer = _BY_TYPE.get(type(value)) or _writer_of(type(value))
            item = writer(value, depth + 1, limit)
            items.append(item)
            size += len(item) + 1
            if size > limit * _GIVE_UP_AT:
                raise ProgressTooLarge(size, limit)
    except Refused as refused:
        refused.path.append(len(items))
        raise
    return f"[{','.join(items)}]"


def _too_deep() -> Refused:
    return Refused(f"nested deeper than {MAX_DEPTH} levels, or it contains itself")


def _plain_key(key: object) -> str:
    if isinstance(key, str):
        return str.__str__(key)
    raise Refused(f"keys must be strings, not {kind_of(key)}")


def encode_text(value: str, depth: int = 0, limit: int = 0) -> str:
    if "\x00" in value:
        raise Refused("a NUL character cannot be stored")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise Refused("a lone surrogate is not text") from None
    return quote(value)


def encode_number(value: float, depth: int = 0, limit: int = 0) -> str:
    if type(value) is int:
        if not MIN_INTEGER <= value <= MAX_INTEGER:
            raise Refused("an integer must fit into 64 bits")
        return int.__repr__(value)
    if -1e16 < value < 1e16:
        return float.__repr__(value)
    if value - value != 0:
        raise Refused(f"a number must be finite, not {value}")
    # jsonb would give 1e+16 back as an integer; the digits in full, with ".0", stay a float.
    return format(value, ".1f")


def _decimal(value: Decimal, depth: int, limit: int) -> str:
    if not value.is_finite():
        raise Refused(f"a number must be finite, not {value}")
    return encode_text(str(value))


def _datetime(value: datetime, depth: int, limit: int) -> str:
    if value != value:  # pandas' "not a time" passes for a datetime otherwise
        raise Refused("this is not a time")
    return encode_text(datetime.isoformat(value))


def _enum(value: Enum, depth: int, limit: int) -> str:
    if depth > MAX_DEPTH:
        raise _too_deep()
    inner = value.value
    return (_BY_TYPE.get(type(inner)) or _writer_of(type(inner)))(inner, depth + 1, limit)


def _integer_like(value: Any, depth: int, limit: int) -> str:
    try:
        return encode_number(operator.index(value))
    except TypeError:  # arrays of numbers say so only when asked
        return _refuse(value, depth, limit)


def _refuse(value: object, depth: int, limit: int) -> str:
    raise Refused(f"{kind_of(value)} cannot be stored; {_ALLOWED}")


def kind_of(value: object) -> str:
    return f"type {type(value).__qualname__}"


_Writer = Callable[[Any, int, int], str]

_BY_TYPE: Final[dict[type, _Writer]] = {
    str: encode_text,
    int: encode_number,
    float: encode_number,
    bool: lambda value, depth, limit: "true" if value else "false",
    type(None): lambda value, depth, limit: "null",
    dict: _mapping,
    list: _sequence,
    tuple: _sequence,
}

# The order counts: an Enum may be a str, a datetime is a date.
_BY_BASE: Final[tuple[tuple[type | tuple[type, ...], _Writer], ...]] = (
    (Enum, _enum),
    (str, lambda value, depth, limit: encode_text(str.__str__(value))),
    (float, lambda value, depth, limit: encode_number(float.__float__(value))),
    (Mapping, _mapping),
    ((list, tuple), _sequence),
    (datetime, _datetime),
    (date, lambda value, depth, limit: encode_text(date.isoformat(value))),
    (time, lambda value, depth, limit: encode_text(time.isoformat(value))),
    (UUID, lambda value, depth, limit: encode_text(str(value))),
    (Decimal, _decimal),
)


def _writer_of(kind: type) -> _Writer:
    # By type, not isinstance: a proxy claims to be what it stands for, and is not.
    for base, writer in _BY_BASE:
        if issubclass(kind, base):
            return writer
    if is_dataclass(kind):
        return _dataclass
    return _integer_like if hasattr(kind, "__index__") else _refuse
