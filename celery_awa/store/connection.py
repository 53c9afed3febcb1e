"""Opening a connection, and turning the driver's errors into ours at this border only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from psycopg import conninfo, errors

from ..errors import AwaError, RowLocked, SchemaError, SettingsError, StoreRefused, StoreUnavailable

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

_LOCKED = (errors.LockNotAvailable, errors.DeadlockDetected, errors.SerializationFailure)
_REFUSED = (psycopg.DataError, psycopg.IntegrityError, errors.RaiseException)
_SCHEMA = (
    errors.UndefinedTable,
    errors.UndefinedColumn,
    errors.UndefinedFunction,
    errors.UndefinedObject,
    errors.InvalidSchemaName,
)
_RIGHTS = "docs/deploy.md lists the rights that a worker and a migration need"


def check_url(url: str) -> None:
    """Raise SettingsError where libpq cannot parse the URL. Nothing is connected."""
    try:
        conninfo.conninfo_to_dict(url)
    except psycopg.ProgrammingError as exc:
        # What libpq quotes is a part of the URL, and may hold the password: nothing from the
        # first such quote on, and no cause that a traceback would show.
        reason = first_line(exc).replace('"="', "=").partition('"')[0].strip()
        raise SettingsError(
            f"the database URL cannot be read ({reason}); it looks like "
            "postgresql://user:password@host:5432/database"
        ) from None


def connect(url: str) -> psycopg.Connection[tuple[object, ...]]:
    """An autocommitting connection that asks nothing which PgBouncer's transaction mode forbids."""
    check_url(url)
    parameters = _DEFAULTS | conninfo.conninfo_to_dict(url)
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
    return StoreUnavailable(message)


def first_line(exc: BaseException) -> str:
    """One line of an error that may have many."""
    return (str(exc).strip() or type(exc).__name__).splitlines()[0]
