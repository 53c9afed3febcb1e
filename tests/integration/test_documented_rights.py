"""The statements of docs/deploy.md, run as they stand there, by the roles that it names."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import errors
from psycopg.conninfo import make_conninfo

from celery_awa import Client, migrate
from celery_awa.store.through import checkpoint_through
from tests.conftest import SCHEMA

from .jobs import running
from .stores import StoreOn
from .test_store_connection import use_every_verb

pytest_plugins = ["tests.integration.stores"]

DEPLOY = Path(__file__).resolve().parents[2] / "docs" / "deploy.md"

#: Of the roles' names in this run, for the one on the page: roles belong to the whole server.
PREFIX = f"awa_test_{uuid.uuid4().hex[:12]}_"

UrlOf = Callable[[str], str]


def documented(role: str) -> str:
    """The SQL that the page has that role run."""
    found = re.search(rf"<!-- test: {role} -->\n```sql\n(.*?)```", DEPLOY.read_text(), re.DOTALL)
    assert found, f"no SQL for {role}"
    return found[1].replace("shop_", PREFIX)


def run(url: str, text: str) -> None:
    with psycopg.connect(url) as connection:
        connection.execute(text)


@pytest.fixture
def url_of(empty_database_url: str) -> Iterator[UrlOf]:
    """The URL for each of the roles; migrated by the owner, who granted what the page says."""

    def url_of(role: str) -> str:
        return make_conninfo(empty_database_url, user=PREFIX + role, password="awa")

    roles = re.findall(r"CREATE ROLE (\w+)", documented("administrator"))
    run(empty_database_url, documented("administrator"))
    try:
        for role in roles:
            run(empty_database_url, f"ALTER ROLE {role} PASSWORD 'awa'")
        # A cautious administrator: nothing comes from PUBLIC.
        run(
            empty_database_url,
            f"ALTER DEFAULT PRIVILEGES FOR ROLE {PREFIX}owner "
            "REVOKE EXECUTE ON FUNCTIONS FROM PUBLIC",
        )
        migrate(url_of("owner"))
        run(url_of("owner"), documented("owner"))
        yield url_of
    finally:
        run(empty_database_url, f"DROP OWNED BY {', '.join(roles)} CASCADE")
        run(empty_database_url, f"DROP ROLE {', '.join(roles)}")


def test_a_worker_can_do_all_that_it_does(url_of: UrlOf, store_on: StoreOn) -> None:
    use_every_verb(store_on(url_of("worker")))
    run(url_of("worker"), documented("worker"))
    with pytest.raises(errors.InsufficientPrivilege):
        run(url_of("worker"), f"CREATE TABLE {SCHEMA}.another ()")


def test_a_connection_with_a_workers_rights_can_commit_a_checkpoint(
    url_of: UrlOf, store_on: StoreOn
) -> None:
    lease = running(store_on(url_of("worker")), "runs")
    with psycopg.connect(url_of("worker")) as connection:
        assert checkpoint_through(connection, SCHEMA, lease, "first", 0, '{"last_id": 7}')
    with Client(url_of("reader")) as client:
        job = client.get_job("runs")
        assert job
        assert job.committed == {"last_id": 7}
    reader = psycopg.connect(url_of("reader"))
    with reader, pytest.raises(errors.InsufficientPrivilege):
        checkpoint_through(reader, SCHEMA, lease, "first", 0, '{"last_id": 8}')


def test_a_reader_sees_jobs_but_no_envelopes(url_of: UrlOf, store_on: StoreOn) -> None:
    running(store_on(url_of("worker")), "runs")
    with Client(url_of("reader")) as client:
        job = client.get_job("runs")
        assert job
        assert client.list_jobs() == [job]
    with pytest.raises(errors.InsufficientPrivilege):
        run(url_of("reader"), f"SELECT envelope FROM {SCHEMA}.jobs_hot")
