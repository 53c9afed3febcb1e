"""Fixtures for tests with a real Postgres."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from celery_awa.store.canonical import CanonicalStore, open_store
from tests.conftest import SCHEMA, _database, with_database

from .jobs import Database

OpenStore = Callable[[], CanonicalStore]


@pytest.fixture(scope="session")
def jobs_database(postgres_server: str, template_database: str) -> Iterator[Database]:
    """One migrated database for all tests that only fill it with jobs: a clone takes a while."""
    with ExitStack() as stack:
        name = stack.enter_context(_database(postgres_server, template_database))
        yield stack.enter_context(closing(Database(with_database(postgres_server, name))))


@pytest.fixture
def database(jobs_database: Database) -> Database:
    """A look past the store into its database, which has no job when the test begins."""
    jobs_database.empty()
    return jobs_database


@pytest.fixture
def open_another(database: Database) -> Iterator[OpenStore]:
    """Opens a store on that database, over a connection of its own."""
    with ExitStack() as stack:

        def open_one() -> CanonicalStore:
            return stack.enter_context(closing(open_store(database.url, SCHEMA)))

        yield open_one


@pytest.fixture
def store(open_another: OpenStore) -> CanonicalStore:
    """A store on a database without jobs."""
    return open_another()


@pytest.fixture
def own_database(database_url: str) -> Iterator[Database]:
    """A database for a test that changes more in it than jobs."""
    with closing(Database(database_url)) as database:
        yield database
