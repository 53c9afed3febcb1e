"""The records of a CSV file, with the exact byte where each ends."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Sequence
from typing import Any

from ...errors import CheckpointMismatch
from .base import Unreadable
from .binary_file import FileSource, OpenFile
from .csv_ends import RecordEnds
from .csv_records import Records

Row = Any  # a dict, or a list where there are no names

_LOOKED_AT = 64 * 1024


class CsvRows(FileSource[Row]):
    """The records of a CSV file: dicts by the names in its header, as csv.DictReader gives them.

    ``header``: whether the first record has the names; by default unless ``fieldnames`` are given,
    which are then used instead. With neither, records are lists. ``csv_options`` are those of
    csv.reader: ``delimiter``, ``quotechar``, ``dialect`` and so on. A record that is longer than
    the names has the rest as a list under the key None, a shorter one None for what it lacks.
    Quoted fields may hold line ends; outside of quotes lines end with ``\\n`` or ``\\r\\n``. Blank
    lines are passed over.

    A record that csv refuses or that cannot be decoded is an item error, and so is one whose quote
    is never closed, though csv would take all that follows it for a field; reading goes on after
    the record's end. The header must be readable. Everything else is as for :class:`Lines`, gzip
    too.

    Raises TypeError or csv.Error for options that csv does not have.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        encoding: str = "utf-8",
        header: bool | None = None,
        fieldnames: Sequence[str] | None = None,
        **csv_options: Any,
    ) -> None:
        super().__init__(path, encoding)
        if isinstance(fieldnames, str):
            raise TypeError("fieldnames must be a list of names, not a str")
        self._fieldnames = None if fieldnames is None else list(fieldnames)
        self._header = self._fieldnames is None if header is None else header
        self._options = csv_options
        self._ends = RecordEnds(csv.reader((), **csv_options).dialect)

    def _begin(self, opened: OpenFile, cursor: Any) -> Iterator[tuple[Row | Unreadable, Any]]:
        _check_line_ends(opened)
        names = self._fieldnames
        if self._header:
            found = self._read_header(opened)
            names = found if names is None else names
        after_header = opened.offset
        if cursor is not None:
            opened.go_to(cursor)
        if opened.offset < after_header:
            raise CheckpointMismatch(
                f"the checkpoint lies at byte {opened.offset} of {self.path}, within its header"
            )
        return self._rows(opened, names)

    def _read_header(self, opened: OpenFile) -> list[str]:
        records = self._records(opened)
        names = next((record for record in records if record), [])
        if isinstance(names, Unreadable):
            raise names.error
        opened.offset = records.offset
        return names

    def _records(self, opened: OpenFile) -> Records:
        return Records(opened, self._encoding, self._ends, self._options)

    def _rows(
        self, opened: OpenFile, names: list[str] | None
    ) -> Iterator[tuple[Row | Unreadable, Any]]:
        with opened:
            records = self._records(opened)
            width = len(names or ())
            item: Any
            for record in records:
                if not record:
                    continue
                if isinstance(record, Unreadable) or names is None:
                    item = record
                elif len(record) == width:
                    item = dict(zip(names, record))  # noqa: B905 - of one length; strict= is slower
                else:
                    item = _named(names, record)
                yield item, opened.cursor(records.offset)


def _named(names: list[str], record: list[Any]) -> dict[Any, Any]:
    """A record that is longer or shorter than the names."""
    row: dict[Any, Any] = dict(zip(names, record, strict=False))
    if len(record) > len(names):
        row[None] = record[len(names) :]
    elif len(record) < len(names):
        row.update(dict.fromkeys(names[len(record) :]))
    return row


def _check_line_ends(opened: OpenFile) -> None:
    beginning = opened.lines.read(_LOOKED_AT)
    opened.lines.seek(opened.offset)
    if b"\n" not in beginning and b"\r" in beginning[:-1]:
        raise ValueError(
            f"the lines of {opened.path} end with a lone \\r, and it can be read on from \\n only: "
            "convert it first, for instance with tr '\\r' '\\n'"
        )
