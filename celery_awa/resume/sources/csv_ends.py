"""Where a CSV record ends that csv refused to read: it stops in the middle of a line."""

from __future__ import annotations

import csv
import re
from typing import Any

#: What a line can end in, in the midst of a record.
Place = re.Pattern[str]


class RecordEnds:
    """Follows quotes and escapes by one dialect, in records that are well-formed or not."""

    def __init__(self, dialect: Any) -> None:
        self._spaces = re.compile(" *" if dialect.skipinitialspace else "")
        self._quote = None if dialect.quoting == csv.QUOTE_NONE else dialect.quotechar
        self._escape, self._doubles = dialect.escapechar, dialect.doublequote
        self._plain = _run_until(dialect.delimiter + "\n", dialect.escapechar)
        # Without quotes a record goes on in the next line after an escaped line end only.
        self.quoted = self._plain
        if self._quote:
            doubled = re.escape(self._quote * 2) if dialect.doublequote else None
            self.quoted = _run_until(self._quote, dialect.escapechar, doubled)

    def goes_on(self, line: str, place: Place | None) -> Place | None:
        """In what the record goes on after this line; None if it ends with the line.

        ``place``: what an earlier call said of the line before, None at the record's beginning.
        """
        at = 0
        while True:
            if place is None:
                place, at = self._field(line, at)
            at = _end(place, line, at)
            if at >= len(line):
                return place
            if place is not self._plain:
                place = self._plain  # after the closing quote
                if self._taken_as_it_is(line, at + 1):
                    at += 1
            elif line[at] == "\n":
                return None
            else:
                place = None  # after the delimiter
            at += 1

    def _taken_as_it_is(self, line: str, at: int) -> bool:
        """Whether an escape stands there after a closing quote that might have been doubled."""
        return bool(self._doubles and self._escape and line.startswith(self._escape, at))

    def _field(self, line: str, at: int) -> tuple[Place, int]:
        """What the field that begins here is in, and from where on."""
        at = _end(self._spaces, line, at)
        if self._quote and line.startswith(self._quote, at):
            return self.quoted, at + 1
        return self._plain, at


def _end(pattern: Place, line: str, at: int) -> int:
    found = pattern.match(line, at)
    assert found is not None  # each of them matches nothing, too
    return found.end()


def _run_until(stops: str, escape: str | None, also: str | None = None) -> Place:
    """Whatever comes before one of these characters that is not escaped."""
    parts = [f"[^{re.escape(stops + (escape or ''))}]+"]
    if escape:
        parts.append(f"{re.escape(escape)}.")
    if also:
        parts.append(also)
    return re.compile(f"(?:{'|'.join(parts)})*", re.DOTALL)
