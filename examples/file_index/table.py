"""The demo's own two tables: what was indexed, and where each attempt began."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.rows import class_row

from .sources import Source

#: How the task's own connection is called in ``pg_stat_activity``.
INDEXER = "file_index"

Database = psycopg.Connection[Any]


@dataclass(frozen=True)
class Beginning:
    """An attempt as it began: files done by its checkpoint, rows that it found in the table."""

    number: int
    pid: int
    done: int
    rows: int


def connect(url: str, name: str) -> Database:
    """A connection in which every statement is a transaction of its own."""
    return psycopg.connect(url, autocommit=True, application_name=name)


def create(database: Database) -> None:
    database.execute(
        "CREATE TABLE source_files (path text PRIMARY KEY, size bigint NOT NULL,"
        " lines integer NOT NULL, sha256 text NOT NULL, writes integer NOT NULL DEFAULT 1)"
    )
    database.execute(
        "CREATE TABLE beginnings (id serial PRIMARY KEY, number integer NOT NULL,"
        " pid integer NOT NULL, done integer NOT NULL, rows integer NOT NULL)"
    )


def put(database: Database, source: Source) -> None:
    """Enter a file; entered again it is still one row, and ``writes`` tells."""
    database.execute(
        "INSERT INTO source_files (path, size, lines, sha256)"
        " VALUES (%(path)s, %(size)s, %(lines)s, %(sha256)s)"
        " ON CONFLICT (path) DO UPDATE SET size = excluded.size, lines = excluded.lines,"
        " sha256 = excluded.sha256, writes = source_files.writes + 1",
        vars(source),
    )


def note_beginning(database: Database, number: int, pid: int, done: int) -> None:
    database.execute(
        "INSERT INTO beginnings (number, pid, done, rows)"
        " SELECT %s, %s, %s, count(*) FROM source_files",
        (number, pid, done),
    )


def beginnings(database: Database) -> list[Beginning]:
    """In the order in which the attempts began."""
    with database.cursor(row_factory=class_row(Beginning)) as cursor:
        return cursor.execute(
            "SELECT number, pid, done, rows FROM beginnings ORDER BY id"
        ).fetchall()


def sources(database: Database) -> list[Source]:
    with database.cursor(row_factory=class_row(Source)) as cursor:
        return cursor.execute("SELECT path, size, lines, sha256 FROM source_files").fetchall()


def count(database: Database) -> int:
    """The rows in the index."""
    return _number(database, "SELECT count(*) FROM source_files")


def written_again(database: Database) -> int:
    """How often a file was entered that was there already."""
    return _number(database, "SELECT coalesce(sum(writes - 1), 0) FROM source_files")


def _number(database: Database, query: Any) -> int:
    row = database.execute(query).fetchone()
    assert row is not None
    return int(row[0])
