"""Runs on the task's own thread: one statement of ours through a connection of the task's.

The user's driver or library is told by what the connection can do, and never imported for it.
Nothing is committed or rolled back here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from ..errors import SchemaError, SettingsError
from ..model import Lease
from .sql_files import query

_NEEDED = (
    "checkpoint_in needs a connection of psycopg or of Django, or a Connection or Session of "
    "SQLAlchemy, to the database of celery-awa"
)
_OTHER_DATABASE = "checkpoint_in needs a connection to the database of celery-awa"
#: SQLSTATE of a table, a function or a schema that is not there.
_NOT_THERE = ("42P01", "42883", "3F000")
_SQLALCHEMY_DRIVERS = ("psycopg", "psycopg2")

#: Executes a statement and returns the one value of its one row.
Ask = Callable[[str, Mapping[str, Any]], Any]


def checkpoint_through(
    connection: Any, schema: str, lease: Lease, token: str, version: int, values_json: str
) -> bool:
    """Write values (a JSON object as text) into the checkpoint, in the caller's open transaction.

    ``connection``: of psycopg, 3 or 2; Django's; or a Connection or Session of SQLAlchemy. False
    if the attempt has its lease no more: then the caller is to roll back. The job's row is locked
    until he ends the transaction, and a statement that must wait for it waits as long as his
    settings say; under REPEATABLE READ it fails where a heartbeat came since he began.

    Raises TypeError for any other connection, SettingsError where it commits each statement by
    itself, SchemaError where the tables are not, and whatever the connection raises.
    """
    ask = _way_through(connection)
    parameters = {
        "id": lease.job_id,
        "run_lease": lease.run_lease,
        "token": token,
        "version": version,
        "values": values_json,
    }
    try:
        return bool(ask(query("checkpoint_in", schema), parameters))
    except Exception as exc:
        if _sqlstate(exc) in _NOT_THERE:
            raise SchemaError(
                f"{_OTHER_DATABASE}: this one has no schema {schema} of it, or an older one"
            ) from exc
        raise


def _way_through(connection: Any) -> Ask:
    """How to ask through it; raises for what cannot be used."""
    module = _library(connection)
    if isinstance(connection, psycopg.Connection):
        return _by_psycopg(connection)
    if module == "psycopg2":
        return _by_psycopg2(connection)
    if hasattr(connection, "in_atomic_block"):
        return _by_django(connection)
    if module == "sqlalchemy" and not _is_async(connection):
        if hasattr(connection, "exec_driver_sql"):
            return _by_sqlalchemy(connection)
        if hasattr(connection, "get_bind"):
            return _by_sqlalchemy(connection.connection())
    raise TypeError(f"{_NEEDED}, not {_name(connection)}")


def _by_psycopg(connection: psycopg.Connection[Any]) -> Ask:
    if connection.autocommit and connection.info.transaction_status is TransactionStatus.IDLE:
        raise _no_transaction("begin one with connection.transaction(), or leave autocommit off")

    def ask(text: Any, parameters: Mapping[str, Any]) -> Any:
        # Not connection.cursor(): the user's factories may make anything of it and its rows.
        with psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
            return _value(cursor.execute(text, parameters).fetchone())

    return ask


def _by_psycopg2(connection: Any) -> Ask:
    if getattr(connection, "async_", 0):
        raise TypeError(f"{_NEEDED}, not an asynchronous {_name(connection)}")
    if _is_idle(connection):
        raise _no_transaction("set connection.autocommit to False")
    plain = sys.modules["psycopg2.extensions"].cursor

    def ask(text: str, parameters: Mapping[str, Any]) -> Any:
        with connection.cursor(cursor_factory=plain) as cursor:
            cursor.execute(text, parameters)
            return _value(cursor.fetchone())

    return ask


def _by_django(connection: Any) -> Ask:
    if connection.vendor != "postgresql":
        raise TypeError(f"{_OTHER_DATABASE}, not to one of {connection.vendor}")
    if connection.get_autocommit() and not connection.in_atomic_block:
        raise _no_transaction("begin one with transaction.atomic()")

    def ask(text: str, parameters: Mapping[str, Any]) -> Any:
        with connection.cursor() as cursor:
            cursor.execute(text, parameters)
            return _value(cursor.fetchone())

    return ask


def _by_sqlalchemy(connection: Any) -> Ask:
    dialect = connection.dialect
    if dialect.driver not in _SQLALCHEMY_DRIVERS or dialect.is_async:
        raise TypeError(
            f"{_OTHER_DATABASE}, by postgresql+psycopg or postgresql+psycopg2, not by "
            f"{dialect.name}+{dialect.driver}{', asynchronous' if dialect.is_async else ''}"
        )
    if _is_idle(connection.connection.dbapi_connection):
        raise _no_transaction("use another isolation level than AUTOCOMMIT")

    def ask(text: str, parameters: Mapping[str, Any]) -> Any:
        with closing(connection.exec_driver_sql(text, dict(parameters))) as result:
            return _value(result.fetchone())

    return ask


def _is_idle(connection: Any) -> bool:
    """Whether a connection of psycopg, 3 or 2, would commit a statement by itself."""
    return bool(connection.autocommit) and not connection.info.transaction_status


def _value(row: Any) -> Any:
    return row[0]


def _no_transaction(what: str) -> SettingsError:
    return SettingsError(
        f"checkpoint_in needs an open transaction, to be committed with your own work: {what}"
    )


def _sqlstate(exc: BaseException) -> str | None:
    """Of the driver's error, which Django has as the cause of its own, and SQLAlchemy beside it."""
    for error in (exc, exc.__cause__, getattr(exc, "orig", None)):
        code = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
        if code is not None:
            return str(code)
    return None


def _library(connection: Any) -> str:
    """The library whose class it is, or is derived from."""
    for base in type(connection).__mro__:
        package = base.__module__.partition(".")[0]
        if package in ("psycopg2", "sqlalchemy"):
            return package
    return ""


def _is_async(connection: Any) -> bool:
    modules = (base.__module__ for base in type(connection).__mro__)
    return any(module.startswith("sqlalchemy.ext.asyncio") for module in modules)


def _name(connection: Any) -> str:
    kind = type(connection)
    return f"{kind.__module__}.{kind.__qualname__}"
