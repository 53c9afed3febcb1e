"""CSV records one by one, as lists, and the byte offset after each."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from typing import Any

from .base import Unreadable
from .binary_file import OpenFile
from .csv_ends import RecordEnds


class Records:
    """Reads an open file from its offset. csv pulls just the lines that a record needs."""

    def __init__(
        self, opened: OpenFile, encoding: str, ends: RecordEnds, options: Mapping[str, Any]
    ) -> None:
        #: After the record that was read last.
        self.offset = opened.offset
        self._opened = opened
        self._encoding = encoding
        self._ends = ends
        self._lines = self._decoded()
        self._reader = csv.reader(self._lines, **options)
        #: The line that csv pulled last, and where it begins.
        self._line = ""
        self._line_begin = 0
        #: What makes the record that csv is reading unreadable, though it would take it.
        self._trouble: Exception | None = None

    def __iter__(self) -> Iterator[list[Any] | Unreadable]:
        """The records; [] for a blank line."""
        reader = self._reader
        while True:
            begin = self.offset
            try:
                record = next(reader)
            except StopIteration:
                return
            except (csv.Error, ValueError) as error:
                # ValueError: what should be a number by QUOTE_NONNUMERIC is none.
                self._skip_rest(begin)
                yield self._unreadable(error, begin)
                continue
            yield record if self._trouble is None else self._unreadable(self._trouble, begin)

    def _decoded(self) -> Iterator[str]:
        encoding = self._encoding
        for line in self._opened.lines:
            self._line_begin = self.offset
            self.offset += len(line)
            try:
                text = line.decode(encoding)
            except UnicodeDecodeError as error:
                # Where the record ends can be seen all the same.
                self._trouble = error
                text = line.decode(encoding, "replace")
            self._line = text
            yield text
        # Nobody hears of this unless a record is being read.
        self._trouble = csv.Error("a quote that is opened in it is never closed")

    def _skip_rest(self, begin: int) -> None:
        """Go to the end of the record that begins there and was refused at the last line."""
        place = self._ends.quoted if self._line_begin > begin else None
        place = self._ends.goes_on(self._line, place)
        while place is not None and (line := next(self._lines, None)) is not None:
            place = self._ends.goes_on(line, place)

    def _unreadable(self, error: Exception, begin: int) -> Unreadable:
        if isinstance(self._trouble, UnicodeDecodeError):
            error = self._trouble
        elif isinstance(error, csv.Error):
            error = csv.Error(f"{self._opened.path}, record at byte {begin}: {_reason(error)}")
        self._trouble = None
        return Unreadable(error)


def _reason(error: csv.Error) -> str:
    text = str(error)
    # csv's advice is for another way of reading.
    return "a lone \\r outside of quotes" if text.startswith("new-line character") else text
