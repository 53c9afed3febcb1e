"""Connections as users' tasks have them: of drivers and libraries that are not the store's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import django
import psycopg
import pytest
import sqlalchemy
from django.conf import settings
from django.db import connections, transaction
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import dict_row
from sqlalchemy.orm import Session, scoped_session, sessionmaker

ALIAS = "awa_test"


@dataclass
class User:
    """A connection, with a transaction that is open from its first statement to its end."""

    connection: Any
    execute: Callable[[str], object]
    commit: Callable[[], object]
    rollback: Callable[[], object]


Open = Callable[[str], Any]


@contextmanager
def by_psycopg(url: str, **options: Any) -> Iterator[User]:
    with closing(psycopg.connect(url, **options)) as connection:
        yield User(connection, connection.execute, connection.commit, connection.rollback)


@contextmanager
def by_psycopg_with_factories(url: str) -> Iterator[User]:
    options = {"row_factory": dict_row, "cursor_factory": psycopg.RawCursor}
    with by_psycopg(url, **options) as user:
        yield user


@contextmanager
def by_psycopg2(url: str) -> Iterator[User]:
    psycopg2 = pytest.importorskip("psycopg2", reason="psycopg2 is not installed")
    extras = pytest.importorskip("psycopg2.extras")
    with closing(psycopg2.connect(url, cursor_factory=extras.RealDictCursor)) as connection:
        cursor = connection.cursor()
        yield User(connection, cursor.execute, connection.commit, connection.rollback)


@contextmanager
def django_alias(url: str) -> Iterator[str]:
    """A PostgreSQL database of Django's, until the block ends."""
    known = conninfo_to_dict(url)
    names = {"NAME": "dbname", "HOST": "host", "PORT": "port", "USER": "user"}
    names["PASSWORD"] = "password"
    described = {theirs: known.pop(ours, "") for theirs, ours in names.items()}
    described |= {"ENGINE": "django.db.backends.postgresql", "OPTIONS": known}
    with django_database(described):
        yield ALIAS


@contextmanager
def django_database(described: dict[str, Any]) -> Iterator[Any]:
    """Django's connection to a database that its settings describe so."""
    if not settings.configured:
        settings.configure(LOGGING_CONFIG=None)
        django.setup()
    whole = connections.configure_settings({"default": {}, ALIAS: described})
    connections.settings[ALIAS] = whole[ALIAS]
    try:
        yield connections[ALIAS]
    finally:
        connections[ALIAS].close()
        del connections[ALIAS], connections.settings[ALIAS]


@contextmanager
def by_django(url: str) -> Iterator[User]:
    with django_alias(url) as alias:
        connection = connections[alias]
        atomic = transaction.atomic(using=alias)
        atomic.__enter__()

        def end(*, rolls_back: bool) -> None:
            transaction.set_rollback(rolls_back, using=alias)
            atomic.__exit__(None, None, None)

        yield User(
            connection,
            lambda text: connection.cursor().execute(text),
            lambda: end(rolls_back=False),
            lambda: end(rolls_back=True),
        )
        if connection.in_atomic_block:
            end(rolls_back=True)


def engine_on(url: str, driver: str = "psycopg", **options: Any) -> sqlalchemy.Engine:
    known = {name: str(value) for name, value in conninfo_to_dict(url).items()}
    return sqlalchemy.create_engine(f"postgresql+{driver}://", connect_args=known, **options)


@contextmanager
def by_sqlalchemy(url: str) -> Iterator[User]:
    engine = engine_on(url)
    with engine.connect() as connection:
        yield User(connection, connection.exec_driver_sql, connection.commit, connection.rollback)
    engine.dispose()


@contextmanager
def by_session(url: str, driver: str = "psycopg") -> Iterator[User]:
    engine = engine_on(url, driver)
    with Session(engine) as session:
        yield User(
            session,
            lambda text: session.execute(sqlalchemy.text(text)),
            session.commit,
            session.rollback,
        )
    engine.dispose()


@contextmanager
def by_scoped_session(url: str) -> Iterator[User]:
    engine = engine_on(url)
    session = scoped_session(sessionmaker(engine))
    yield User(
        session,
        lambda text: session.execute(sqlalchemy.text(text)),
        session.commit,
        session.rollback,
    )
    session.remove()
    engine.dispose()


@contextmanager
def by_session_of_psycopg2(url: str) -> Iterator[User]:
    pytest.importorskip("psycopg2", reason="psycopg2 is not installed")
    with by_session(url, "psycopg2") as user:
        yield user


WAYS: list[Open] = [
    by_psycopg,
    by_psycopg_with_factories,
    by_psycopg2,
    by_django,
    by_sqlalchemy,
    by_session,
    by_scoped_session,
    by_session_of_psycopg2,
]
each_way = pytest.mark.parametrize("opened", WAYS, ids=lambda way: way.__name__)
