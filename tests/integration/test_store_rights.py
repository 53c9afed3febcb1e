"""The database rights that a worker and a reader need, after an owner has migrated."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from celery_awa.errors import SchemaError
from celery_awa.model import JobState, Transition
from celery_awa.store.canonical import open_store
from celery_awa.store.migrations import migrate
from tests.conftest import SCHEMA

from .jobs import Database, StoreOn, attempt, use_every_verb

pytest_plugins = ["tests.integration.stores"]

#: As docs/deploy.md lists them.
WORKER = (
    "USAGE ON SCHEMA {schema}",
    "SELECT ON {schema}.awa_migrations, {schema}.jobs",
    "SELECT, INSERT, UPDATE, DELETE ON {schema}.jobs_hot, {schema}.scheduled_jobs",
    "USAGE ON SEQUENCE {schema}.jobs_id_seq",
)
READER = ("USAGE ON SCHEMA {schema}", "SELECT ON {schema}.awa_migrations, {schema}.jobs")


class Role:
    """A role that may log in, and nothing else but what is granted to it."""

    def __init__(self, database: Database) -> None:
        self.name = f"awa_test_{uuid.uuid4().hex[:12]}"
        self.url = make_conninfo(database.url, user=self.name, password="awa")
        self._database = database
        database.execute(f"CREATE ROLE {self.name} LOGIN PASSWORD 'awa'")

    def grant(self, *rights: str) -> None:
        for right in rights:
            self._database.execute(f"GRANT {right} TO {self.name}")

    def revoke(self, right: str) -> None:
        self._database.execute(f"REVOKE {right} FROM {self.name}")

    def drop(self) -> None:
        self._database.execute(f"DROP OWNED BY {self.name}")
        self._database.execute(f"DROP ROLE {self.name}")


@pytest.fixture
def role(own_database: Database) -> Iterator[Role]:
    """A role without rights in the test's own database."""
    made = Role(own_database)
    yield made
    made.drop()


def test_a_worker_that_may_not_create_tables_can_do_everything_else(
    role: Role, store_on: StoreOn
) -> None:
    role.grant(*WORKER)

    use_every_verb(store_on(role.url))

    assert migrate(role.url) == []
    with psycopg.connect(role.url) as connection, pytest.raises(psycopg.Error, match="denied"):
        connection.execute(f"CREATE TABLE {SCHEMA}.more (id int)")


@pytest.mark.parametrize("lacking", WORKER)
def test_a_lacking_right_is_told_with_where_the_rights_are_listed(
    own_database: Database, role: Role, store_on: StoreOn, lacking: str
) -> None:
    role.grant(*WORKER)
    role.revoke(lacking)

    with pytest.raises(SchemaError, match=r"permission denied for .*: docs/deploy\.md lists"):
        use_every_verb(store_on(role.url))


def test_a_reader_can_read_and_nothing_else(
    own_database: Database, role: Role, store_on: StoreOn
) -> None:
    store_on(own_database.url).end_unclaimed(attempt(), Transition(JobState.FAILED))
    role.grant(*READER)
    reader = store_on(role.url)

    assert reader.get_job("task") is not None
    assert len(reader.list_jobs()) == 1
    with pytest.raises(SchemaError, match="permission denied for table jobs_hot"):
        reader.claim(attempt("other", "other"))


def test_a_role_that_may_not_create_a_schema_cannot_migrate(role: Role) -> None:
    with pytest.raises(SchemaError, match="permission denied for database"):
        migrate(role.url, "missing")
    with pytest.raises(SchemaError, match="has no tables of celery-awa"):
        open_store(role.url, "missing")


def test_a_role_that_owns_nothing_but_its_schema_can_migrate(
    own_database: Database, role: Role
) -> None:
    own_database.execute(f"CREATE SCHEMA theirs AUTHORIZATION {role.name}")

    assert migrate(role.url, "theirs") != []
    assert migrate(role.url, "theirs") == []
