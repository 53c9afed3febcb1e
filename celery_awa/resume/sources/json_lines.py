"""The values of a file with one JSON value a line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import msgspec

from .base import Unreadable
from .binary_file import FileSource, OpenFile


class JsonLines(FileSource[Any]):
    """The values of a file with one JSON value a line (JSON Lines, NDJSON), in UTF-8.

    Blank lines are passed over. A line that is not JSON is an item error. Everything else is as for
    :class:`Lines`, gzip too.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)

    def _items(self, opened: OpenFile) -> Iterator[tuple[Any, Any]]:
        with opened:
            offset = opened.offset
            for line in opened.lines:
                offset += len(line)
                if not line.isspace():
                    yield _value(line), opened.cursor(offset)


def _value(line: bytes) -> Any:
    try:
        return msgspec.json.decode(line)
    except (ValueError, RecursionError) as error:
        return Unreadable(error)
