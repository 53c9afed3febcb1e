"""The lines of a text file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .base import Unreadable
from .binary_file import FileSource, OpenFile


class Lines(FileSource[str]):
    """The lines of a text file, without their ends, which are ``\\n`` or ``\\r\\n``.

    ``path``: the file's name; one compressed by gzip is recognised and decompressed, and has to be
    read up to the cursor when it is gone on with. A byte order mark at the start is dropped, a last
    line needs no end, and a file that has grown meanwhile is read on. A line that cannot be decoded
    is an item error. A line is held in memory whole, however long.

    Raises ValueError for an encoding in which lines cannot be found, such as UTF-16; when the loop
    begins, the OSError of a file that cannot be opened, ValueError for one that is compressed by
    something else, and CheckpointMismatch for one that is not the one of the cursor; in between
    EOFError for a gzip that is cut off.
    """

    def _items(self, opened: OpenFile) -> Iterator[tuple[str | Unreadable, Any]]:
        with opened:
            offset = opened.offset
            for line in opened.lines:
                offset += len(line)
                yield self._text(line), opened.cursor(offset)

    def _text(self, line: bytes) -> str | Unreadable:
        if line.endswith(b"\n"):
            line = line[:-2] if line.endswith(b"\r\n") else line[:-1]
        try:
            return line.decode(self._encoding)
        except UnicodeDecodeError as error:
            return Unreadable(error)
