"""Values of keys as JSON and back, so that a database compares what it gave.

No floats: what a database has as a short one is not equal to what it gave, so it would come again.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any, Final
from uuid import UUID

from ...errors import CheckpointMismatch

# By exact type, since a datetime is a date: the name in JSON, and the ways there and back.
_BY_TYPE: Final[dict[type, tuple[str, Callable[[Any], str]]]] = {
    UUID: ("uuid", str),
    datetime: ("datetime", datetime.isoformat),
    date: ("date", date.isoformat),
    time: ("time", time.isoformat),
    Decimal: ("decimal", str),
    bytes: ("bytes", bytes.hex),
}
_BACK: Final[dict[str, Callable[[str], Any]]] = {
    "uuid": UUID,
    "datetime": datetime.fromisoformat,
    "date": date.fromisoformat,
    "time": time.fromisoformat,
    "decimal": Decimal,
    "bytes": bytes.fromhex,
}


def to_json(value: Any) -> Any:
    """The JSON value; TypeError for a type whose values cannot be kept."""
    if isinstance(value, (str, int)):
        return value
    try:
        name, write = _BY_TYPE[type(value)]
    except KeyError:
        allowed = ", ".join(["str", "int", *(kind.__name__ for kind in _BY_TYPE)])
        raise TypeError(
            f"a key of type {type(value).__qualname__} cannot be kept; allowed are {allowed}"
        ) from None
    return {name: write(value)}


def from_json(kept: Any) -> Any:
    """The value that :func:`to_json` wrote; CheckpointMismatch if it wrote none."""
    if not isinstance(kept, dict):
        return kept
    try:
        [(name, text)] = kept.items()
        return _BACK[name](text)
    except (KeyError, TypeError, ValueError):
        raise CheckpointMismatch(
            f"the checkpoint has a key {kept!r}, which cannot be read"
        ) from None
