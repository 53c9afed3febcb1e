"""What must be true at the end, found out anew from the files and the tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from . import table
from .sources import read_source
from .table import Beginning, Database


def faults_found(database: Database, root: Path, files: Sequence[str]) -> Iterator[str]:
    """One line for each thing that is not as it should be; none if all is well."""
    yield from _in_index(database, root, files)
    begun = table.beginnings(database)
    yield from _in_attempts(begun, len(files))
    # Each interruption may strike between a row and its checkpoint.
    again = table.written_again(database)
    if again > len(begun) - 1:
        yield f"{again} files were done again, after {len(begun) - 1} interruptions"


def _in_index(database: Database, root: Path, files: Sequence[str]) -> Iterator[str]:
    indexed = table.sources(database)
    expected = [read_source(root, path) for path in files]
    if len(indexed) != len(expected):
        yield f"{len(indexed)} rows for {len(expected)} files"
    for name in ("size", "lines"):
        stored, true = (sum(getattr(one, name) for one in many) for many in (indexed, expected))
        if stored != true:
            yield f"the total of {name} is {stored:,} in the table, {true:,} in the files"
    for source in sorted({*indexed} ^ {*expected}, key=lambda source: source.path):
        yield f"{source.path}: the row and the file differ"


def _in_attempts(begun: Sequence[Beginning], files: int) -> Iterator[str]:
    numbers = [attempt.number for attempt in begun]
    if numbers != [1, 2, 3, 4]:
        yield f"there were the attempts {numbers}, not 1, 2, 3 and 4"
    for attempt in begun:
        if not attempt.rows - 1 <= attempt.done <= attempt.rows:
            yield (
                f"attempt {attempt.number} found {attempt.rows} rows, "
                f"and a checkpoint that says {attempt.done}"
            )
    for attempt in begun[1:]:
        if not 0 < attempt.done < files:
            yield f"attempt {attempt.number} began at file {attempt.done + 1} of {files}"
