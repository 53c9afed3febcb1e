"""Opening a connection, and turning the driver's errors into ours at this border only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import conninfo, errors

from ..errors import AwaError, RowLocked, SchemaError, SettingsError, StoreRefused, StoreUnavailable
from . import embedded

#: Used where the user's URL says nothing of it. Milliseconds for tcp_user_timeout, else seconds.
_DEFAULTS = {
    "application_name": "celery-awa",
    "client_encoding": "UTF8",
    "connect_timeout": "5",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "10000",
}

_SCHEMES = ("postgresql://", "postgres://")
_LOCKED = (errors.LockNotAvailable, errors.DeadlockDetected, errors.SerializationFailure)
_REFUSED = (psycopg.DataError, psycopg.IntegrityError, errors.RaiseException)
_SCHEMA = (
    errors.UndefinedTable,
    errors.UndefinedColumn,
    errors.UndefinedFunction,
    errors.UndefinedObject,
    errors.InvalidSchemaName,
)
#: Classes of SQLSTATE that speak of the server or the connection, not of what was sent:
#: connection, transaction state, prepared statements, credentials, database, rollback, resources,
#: object state, operator, system, internal. An error without a code is the driver's own.
_AWAY = frozenset(["08", "25", "26", "28", "3D", "40", "53", "55", "57", "58", "F0", "XX"])
_RIGHTS = "docs/deploy.md lists the rights that a worker and a migration need"


def check_url(url: Any) -> None:
    """Raise SettingsError for what names no database: ours, or a URL for libpq. Connects nothing.

    An empty one is refused: libpq would take it for whichever server it finds by itself.
    """
    if not isinstance(url, str) or not url.strip():
        # The value itself is not shown: a URL given as bytes would tell its password.
        shown = "empty" if isinstance(url, str) else f"of type {type(url).__name__}"
        raise SettingsError(
            f"the database URL is {shown}; it must be a text: postgresql://…, key=value pairs, "
            "embedded: or embedded:PATH"
        )
    if not url.startswith(embedded.PREFIX):
        _parsed(url)


def _parsed(url: str) -> dict[str, Any]:
    try:
        return conninfo.conninfo_to_dict(url)
    except psycopg.ProgrammingError as exc:
        raise SettingsError(
            f"the database URL cannot be read ({_why_unread(url, exc)}); it looks like "
            "postgresql://user:password@host:5432/database"
        ) from None  # a traceback would show the cause, and with it the password


def _why_unread(url: str, exc: psycopg.ProgrammingError) -> str:
    # What libpq quotes is a part of the URL, and may hold the password: nothing from the first
    # such quote on.
    reason = first_line(exc).replace('"="', "=").partition('"')[0].rstrip(": ")
    foreign = "://" in url.partition("=")[0] and not url.startswith(_SCHEMES)
    if foreign or reason.startswith("missing ="):
        return "it is neither postgresql://… nor key=value pairs"
    return reason


def connect(url: str) -> psycopg.Connection[tuple[object, ...]]:
    """An autocommitting connection that asks nothing which PgBouncer's transaction mode forbids."""
    check_url(url)
    parameters = _DEFAULTS | _parsed(url)
    with translated():
        connection = psycopg.connect(
            conninfo.make_conninfo("", **parameters), autocommit=True, prepare_threshold=None
        )
    # For transactions only; a lone statement runs in the server's default, see check_schema.
    connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
    return connection


@contextmanager
def translated() -> Iterator[None]:
    """Driver errors become ours, with the driver's as their cause."""
    try:
        yield
    except UnicodeEncodeError as exc:
        raise StoreRefused(f"text that is no Unicode: {exc}") from exc
    except psycopg.Error as exc:
        raise translate(exc) from exc


def translate(exc: psycopg.Error) -> AwaError:
    """The error of ours that says what this one means to a caller."""
    message = first_line(exc)
    if isinstance(exc, _LOCKED):
        return RowLocked(message)
    if isinstance(exc, _REFUSED):
        return StoreRefused(message)
    if isinstance(exc, errors.InsufficientPrivilege):
        return SchemaError(f"{message}: {_RIGHTS}")
    if isinstance(exc, _SCHEMA):
        return SchemaError(message)
    if (exc.sqlstate or "08")[:2] in _AWAY:
        return StoreUnavailable(message)
    # Whatever else the server says, it says of this statement: a trigger may raise any code.
    return StoreRefused(message)


def first_line(exc: BaseException) -> str:
    """One line of an error that may have many."""
    return (str(exc).strip() or type(exc).__name__).splitlines()[0]
