"""Migrating: once, by whoever comes first, whole or not at all; and schemas that are not ours."""

from __future__ import annotations

import multiprocessing
import zlib
from collections.abc import Callable
from contextlib import closing

import pytest

from celery_awa.errors import RowLocked, SchemaError, SettingsError, StoreRefused
from celery_awa.store import migrations, sql_files
from celery_awa.store.canonical import CanonicalStore, open_store
from celery_awa.store.migrations import migrate
from tests.conftest import SCHEMA
from tests.waiting import eventually

from .hammer import Hammer
from .jobs import Database, StoreOn, attempt, claimed, running, use_every_verb

pytest_plugins = ["tests.integration.stores"]

OURS = [name for _, name, _ in sql_files.migrations()]
NEWEST = len(OURS)

ADD_COLUMNS = """
ALTER TABLE {schema}.jobs_hot ADD COLUMN colour text;
ALTER TABLE {schema}.scheduled_jobs ADD COLUMN colour text;
"""

Upgrade = Callable[[str], None]


@pytest.fixture
def upgrade_with(monkeypatch: pytest.MonkeyPatch) -> Upgrade:
    """Lets the package have one migration more."""
    known = sql_files.migrations()

    def upgrade(text: str) -> None:
        more = (NEWEST + 1, f"{NEWEST + 1:04}_more", text)
        monkeypatch.setattr(sql_files, "migrations", lambda: [*known, more])

    return upgrade


def applied(database: Database, schema: str = SCHEMA) -> list[int]:
    """Numbers of the migrations that the schema has had."""
    found = database.execute(f"SELECT number FROM {schema}.awa_migrations ORDER BY number")
    return [row["number"] for row in found]


@pytest.mark.parametrize("isolation", ["read committed", "serializable"])
def test_eight_processes_at_once_migrate_once_whatever_the_default_isolation(
    empty_database: Database, isolation: str
) -> None:
    empty_database.set_default("default_transaction_isolation", isolation)
    lock = zlib.crc32(f"celery-awa {SCHEMA}".encode())
    with (
        multiprocessing.get_context("fork").Pool(8) as pool,
        empty_database.transaction() as holder,
    ):
        holder.execute("SELECT pg_advisory_xact_lock(%s)", lock)
        results = pool.map_async(migrate, [empty_database.url] * 8, chunksize=1)
        eventually(lambda: _waiting(empty_database) == 8, timeout=60)
        holder.execute("ROLLBACK")
        done = results.get(60)

    assert sorted(done) == [[]] * 7 + [OURS]
    assert applied(empty_database) == list(range(1, NEWEST + 1))


def _waiting(database: Database) -> int:
    found = database.execute(
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'celery-awa' "
        "AND datname = current_database() AND query LIKE '%pg_sleep%'"
    )
    return int(found[0]["count"])


def test_a_second_migration_finds_nothing_to_do(empty_database: Database) -> None:
    assert migrate(empty_database.url) == OURS
    assert migrate(empty_database.url) == []


def test_an_empty_schema_that_an_owner_made_is_filled(empty_database: Database) -> None:
    empty_database.execute("CREATE SCHEMA {schema}")

    assert migrate(empty_database.url) == OURS


def test_every_allowed_name_makes_a_schema_of_its_own(empty_database: Database) -> None:
    for schema in ("select", "_9", "a" * 63, "public"):
        assert migrate(empty_database.url, schema) == OURS
        with closing(open_store(empty_database.url, schema)) as store:
            assert store.list_jobs() == []
            use_every_verb(store)


@pytest.mark.parametrize("schema", ["", "Awa", "a-b", 'a"b', "9a", "pg_awa", "a" * 64, "größe"])
def test_a_name_that_is_not_allowed_is_refused_everywhere(database: Database, schema: str) -> None:
    for use in (migrate, open_store):
        with pytest.raises(SettingsError, match=r"schema name .* is not allowed"):
            use(database.url, schema)


def test_a_missing_schema_says_what_to_run(database: Database) -> None:
    with pytest.raises(SchemaError) as caught:
        open_store(database.url, "missing")

    assert str(caught.value) == (
        "schema missing has no tables of celery-awa: run `python -m celery_awa migrate` "
        "with a role that may create tables"
    )


def test_an_older_schema_says_what_to_run_and_is_brought_up_to_date(
    own_database: Database, upgrade_with: Upgrade
) -> None:
    upgrade_with(ADD_COLUMNS)

    with pytest.raises(SchemaError) as caught:
        open_store(own_database.url, SCHEMA)
    assert f"is at migration {NEWEST}, this celery-awa needs {NEWEST + 1}" in str(caught.value)
    assert "python -m celery_awa migrate" in str(caught.value)

    assert migrate(own_database.url) == [f"{NEWEST + 1:04}_more"]
    open_store(own_database.url, SCHEMA).close()


def test_a_newer_schema_asks_for_a_newer_package(own_database: Database) -> None:
    own_database.execute("INSERT INTO {schema}.awa_migrations (number, name) VALUES (99, 'later')")

    for use in (lambda: migrate(own_database.url), lambda: open_store(own_database.url, SCHEMA)):
        with pytest.raises(SchemaError, match=r"at migration 99, newer .*: upgrade the package"):
            use()


@pytest.mark.parametrize(
    "made",
    ["TABLE {schema}.orders (id int)", "VIEW {schema}.orders AS SELECT 1 AS id"],
    ids=["table", "view"],
)
def test_a_schema_of_another_product_is_left_alone(empty_database: Database, made: str) -> None:
    empty_database.execute("CREATE SCHEMA {schema}")
    empty_database.execute(f"CREATE {made}")

    with pytest.raises(SchemaError, match=r"not celery-awa's \(orders\): name a schema of its own"):
        migrate(empty_database.url)
    with pytest.raises(SchemaError, match="has no tables of celery-awa"):
        open_store(empty_database.url, SCHEMA)
    assert _tables(empty_database) == ["orders"]


def test_a_table_of_migrations_that_is_anothers_is_told(empty_database: Database) -> None:
    empty_database.execute("CREATE SCHEMA {schema}")
    empty_database.execute("CREATE TABLE {schema}.awa_migrations (version text)")

    for use in (
        lambda: migrate(empty_database.url),
        lambda: open_store(empty_database.url, SCHEMA),
    ):
        with pytest.raises(SchemaError, match=r"awa_migrations that is not .* a schema of its own"):
            use()
    assert _tables(empty_database) == ["awa_migrations"]


def _tables(database: Database) -> list[str]:
    found = database.execute(
        "SELECT relname FROM pg_class WHERE relnamespace = to_regnamespace(%s) "
        "AND relkind IN ('r', 'v') ORDER BY relname",
        SCHEMA,
    )
    return [row["relname"] for row in found]


def test_a_migration_that_fails_leaves_nothing_behind(
    empty_database: Database, upgrade_with: Upgrade
) -> None:
    upgrade_with(ADD_COLUMNS + "SELECT 1 / 0;")

    with pytest.raises(StoreRefused, match="division by zero"):
        migrate(empty_database.url)

    found = empty_database.execute("SELECT to_regnamespace(%s) AS found", SCHEMA)
    assert found == [{"found": None}]


def test_a_migration_goes_on_beside_workers_that_write(
    own_database: Database, upgrade_with: Upgrade
) -> None:
    hammer = Hammer(own_database.url, ["task"], threads=4)
    done: list[list[str]] = []

    def migrate_once(_: CanonicalStore) -> None:
        if hammer.claims > 50 and not done:
            upgrade_with(ADD_COLUMNS)
            done.append(migrate(own_database.url))

    assert hammer.strike(2, migrate_once) == []
    assert done == [[f"{NEWEST + 1:04}_more"]]


def test_a_migration_that_finds_a_table_locked_changes_nothing_and_holds_nobody_up(
    own_database: Database,
    store_on: StoreOn,
    upgrade_with: Upgrade,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(migrations, "LOCK_TIMEOUT", "100ms")
    store = store_on(own_database.url)
    lease = running(store)
    upgrade_with(ADD_COLUMNS)

    with own_database.locked():
        with pytest.raises(RowLocked, match="lock timeout"):
            migrate(own_database.url)
        claimed(store, attempt("other", "other"))

    assert applied(own_database) == list(range(1, NEWEST + 1))
    assert "colour" not in own_database.row()
    assert store.owns(lease)
