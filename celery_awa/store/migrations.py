"""Making the schema, and telling whether a schema is the one that this package needs."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import errors

from ..errors import SchemaError
from . import embedded, sql_files
from .connection import check_url, connect, translate

#: How long a migration waits for a table that running statements keep locked.
LOCK_TIMEOUT = "5s"

_HOW = "run `python -m celery_awa migrate` with a role that may create tables"
_OTHER_NAME = "name a schema of its own with --schema and the setting awa_schema"


def migrate(url: str, schema: str = "celery_awa") -> list[str]:
    """Bring the schema to this package's version; returns the names of what was applied.

    All that is missing is applied in one transaction under an advisory lock: any number of
    processes may run it at once, one does it and the others find it done. Raises SchemaError
    for a schema that is newer than this package or not ours, and where the role may not create
    tables; RowLocked where running statements keep a table locked for 5 seconds; SettingsError
    for a URL or a schema's name that is not allowed.
    """
    check_url(url)
    quoted = sql_files.quoted(schema)
    connection = connect(embedded.resolve(url))
    try:
        with translated_for(schema), connection.transaction():
            return _apply(connection, schema, quoted)
    finally:
        connection.close()


def _apply(connection: psycopg.Connection[Any], schema: str, quoted: str) -> list[str]:
    lock = zlib.crc32(f"celery-awa {schema}".encode())
    connection.execute(_text(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'"))
    # Waiting for the one that migrates is not limited by the line above: ask until it is free.
    while not _one(connection, "SELECT pg_try_advisory_xact_lock(%s)", lock):
        _one(connection, "SELECT pg_sleep(0.05)")
    if not _one(connection, "SELECT to_regnamespace(%s)", quoted):
        connection.execute(_text(f"CREATE SCHEMA {quoted}"))
    if not _one(connection, "SELECT to_regclass(%s)", f"{quoted}.awa_migrations"):
        _refuse_foreign(connection, schema)
        connection.execute(
            _text(
                f"CREATE TABLE {quoted}.awa_migrations (number integer PRIMARY KEY, "
                "name text NOT NULL, applied_at timestamptz NOT NULL DEFAULT now())"
            )
        )
    found = _one(connection, sql_files.query("schema_version", schema)) or 0
    ours = sql_files.migrations()
    _refuse_newer(schema, found, ours[-1][0])
    pending = [migration for migration in ours if migration[0] > found]
    for number, name, text in pending:
        connection.execute(_text(text.replace("{schema}", quoted)))
        connection.execute(
            _text(f"INSERT INTO {quoted}.awa_migrations (number, name) VALUES (%s, %s)"),
            (number, name),
        )
    return [name for _, name, _ in pending]


def check_schema(connection: psycopg.Connection[Any], schema: str) -> None:
    """Raise SchemaError, saying what to do, unless the schema is the one that we need."""
    with translated_for(schema):
        found = _one(connection, sql_files.query("schema_version", schema)) or 0
        isolation = _one(connection, "SHOW transaction_isolation")
    needed = sql_files.migrations()[-1][0]
    if found < needed:
        raise SchemaError(
            f"schema {schema} is at migration {found}, this celery-awa needs {needed}: {_HOW}"
        )
    _refuse_newer(schema, found, needed)
    if isolation != "read committed":
        # Statements of one function must see what was committed before each of them; see the
        # head of 0001_jobs.sql.
        raise SchemaError(
            f"the database's default_transaction_isolation is {isolation!r}, celery-awa needs "
            "'read committed': set it for its role (ALTER ROLE ... SET ...)"
        )


@contextmanager
def translated_for(schema: str) -> Iterator[None]:
    """Like ``translated``, with words for what goes wrong around a schema."""
    try:
        yield
    except (errors.UndefinedTable, errors.InvalidSchemaName) as exc:
        raise SchemaError(f"schema {schema} has no tables of celery-awa: {_HOW}") from exc
    except errors.UndefinedColumn as exc:
        raise SchemaError(
            f"schema {schema} holds a table awa_migrations that is not celery-awa's: {_OTHER_NAME}"
        ) from exc
    except psycopg.Error as exc:
        raise translate(exc) from exc


def _refuse_foreign(connection: psycopg.Connection[Any], schema: str) -> None:
    others = _one(
        connection,
        "SELECT string_agg(relname, ', ' ORDER BY relname) FROM pg_class "
        "WHERE relnamespace = to_regnamespace(%s) AND relkind IN ('r', 'p', 'v')",
        sql_files.quoted(schema),
    )
    if others:
        raise SchemaError(
            f"schema {schema} holds tables that are not celery-awa's ({others}): {_OTHER_NAME}"
        )


def _refuse_newer(schema: str, found: int, ours: int) -> None:
    if found > ours:
        raise SchemaError(
            f"schema {schema} is at migration {found}, newer than this celery-awa, which knows "
            f"{ours}: upgrade the package"
        )


def _one(connection: psycopg.Connection[Any], text: str, *parameters: object) -> Any:
    row = connection.execute(_text(text), parameters or None).fetchone()
    return row[0] if row else None


def _text(text: str) -> Any:
    # psycopg's types ask for literals; our text comes from files and checked identifiers.
    return text
