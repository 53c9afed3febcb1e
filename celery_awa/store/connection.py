"""Opening a connection, and turning the driver's errors into ours at this border only."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
from psycopg import conninfo, errors
from psycopg.rows import tuple_row

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

#: Seconds for the server to answer one statement; a connection that is silent for longer is given
#: up. Of a dead network the system tells by itself, as said above; of a server or pooler that
#: hangs, and of whoever swallows bytes in between and confirms them, it cannot tell.
ANSWER_WITHIN = 10.0

#: The socket options by which libpq does what these parameters say.
_SOCKET_OPTIONS = {
    "keepalives_idle": "TCP_KEEPIDLE",
    "keepalives_interval": "TCP_KEEPINTVL",
    "keepalives_count": "TCP_KEEPCNT",
    "tcp_user_timeout": "TCP_USER_TIMEOUT",
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


def connect_by(make: Callable[[], Any]) -> psycopg.Connection[tuple[object, ...]]:
    """A connection that the user's own code opens, set as :func:`connect` sets its own.

    Whatever goes wrong in that code is StoreUnavailable, so that it is tried again.
    """
    try:
        made = make()
    except (Exception, SystemExit) as exc:
        raise StoreUnavailable(f"the function given as connect= failed: {_why(exc)}") from exc
    if not isinstance(made, psycopg.Connection) or made.closed:
        shown = f"{'a closed' if getattr(made, 'closed', False) else 'a'} {type(made).__name__}"
        raise StoreUnavailable(
            "the function given as connect= must open a psycopg.Connection at each call and "
            f"return it; it returned {shown}"
        )
    try:
        with translated():
            _set(made)
    except BaseException:
        made.close()
        raise
    return made


def _why(exc: BaseException) -> str:
    if isinstance(exc, psycopg.ProgrammingError):
        return _why_unread("", exc)  # of what it cannot read libpq quotes parts
    return f"{type(exc).__name__}: {first_line(exc)}"


def _set(made: psycopg.Connection[Any]) -> None:
    if made.info.transaction_status is not psycopg.pq.TransactionStatus.IDLE:
        made.commit()  # it began with what the user's code set for the session
    made.autocommit = True
    made.prepare_threshold = None
    made.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
    made.read_only = made.deferrable = None
    made.row_factory, made.cursor_factory = tuple_row, psycopg.Cursor
    if made.info.encoding != "utf-8":
        made.execute("SET client_encoding TO 'UTF8'")
    _notice_silence(made)


def _notice_silence(made: psycopg.Connection[Any]) -> None:
    """What libpq does by our defaults, where the user's code did not say it itself.

    Without it a network that swallows everything would hold the connection up for a quarter of
    an hour, and with it the heartbeats of all attempts.
    """
    said = made.info.get_parameters()
    with socket.socket(fileno=os.dup(made.fileno())) as plug, suppress(OSError):
        if plug.family not in (socket.AF_INET, socket.AF_INET6):
            return
        for name, option in _SOCKET_OPTIONS.items():
            if name not in said and hasattr(socket, option):
                plug.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), int(_DEFAULTS[name]))


def bound_answers(connection: psycopg.Connection[Any]) -> None:
    """From here on raise OperationalError where a statement is not answered in time."""
    wait = connection.wait

    def wait_in_time(gen: Generator[Any, Any, Any], *args: Any, **kwargs: Any) -> Any:
        return wait(_in_time(gen, connection.fileno()), *args, **kwargs)

    connection.wait = wait_in_time  # type: ignore[method-assign]  # the one place to step in at


def _in_time(gen: Generator[Any, Any, Any], fileno: int) -> Generator[Any, Any, Any]:
    """The driver's steps of one statement, until it has waited for too long.

    While it waits the driver takes a step ten times a second, whether something came or not.
    """
    until = time.monotonic() + ANSWER_WITHIN
    try:
        wanted = next(gen)
        while True:
            came = yield wanted
            # Looked for at last: this thread may have been kept from looking until now.
            if time.monotonic() > until and not _readable(fileno):
                raise psycopg.OperationalError(f"no answer within {ANSWER_WITHIN:g} s")
            wanted = gen.send(came)
    except StopIteration as done:
        return done.value


def _readable(fileno: int) -> bool:
    looking = select.poll()
    looking.register(fileno, select.POLLIN)
    return bool(looking.poll(0))


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
