"""Fixtures of the store's tests; a test module that wants them names this one as its plugin."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial

import pytest

from celery_awa.store.canonical import CanonicalStore, open_store
from tests.conftest import SCHEMA, _database, with_database

from .jobs import Database, OpenStore, StoreOn


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
def own_database(database_url: str) -> Iterator[Database]:
    """A migrated database for a test that changes more in it than jobs."""
    with closing(Database(database_url)) as database:
        yield database


@pytest.fixture
def empty_database(empty_database_url: str) -> Iterator[Database]:
    """A database of the test's own in which nothing was migrated."""
    with closing(Database(empty_database_url)) as database:
        yield database


@pytest.fixture
def store_on() -> Iterator[StoreOn]:
    """Opens a store at a URL, and closes it after the test."""
    with ExitStack() as stack:
        yield lambda url: stack.enter_context(closing(open_store(url, SCHEMA)))


@pytest.fixture
def open_another(database: Database, store_on: StoreOn) -> OpenStore:
    """Opens a store on the database of :func:`store`, over a connection of its own."""
    return partial(store_on, database.url)


@pytest.fixture
def store(open_another: OpenStore) -> CanonicalStore:
    """A store on a database without jobs."""
    return open_another()
