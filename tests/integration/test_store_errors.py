"""What the store raises when the server is away, slow, read-only or refuses."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

import psycopg
import pytest

from celery_awa.errors import RowLocked, SchemaError, SettingsError, StoreRefused, StoreUnavailable
from celery_awa.model import Beat, JobState, Lease, Transition
from celery_awa.store.canonical import CanonicalStore, open_store

from .jobs import Database, OpenStore, StoreOn, attempt, claimed, retried_job, running, snapshot

pytest_plugins = ["tests.integration.stores"]

Verb = Callable[[CanonicalStore, Lease], object]

WRITES: dict[str, Verb] = {
    "claim": lambda store, lease: store.claim(attempt("second", retries=1)),
    "end": lambda store, lease: store.end(lease, "first", Transition(JobState.FAILED)),
    "end_unclaimed": lambda store, lease: store.end_unclaimed(
        attempt("second", retries=1), Transition(JobState.FAILED)
    ),
    "heartbeat": lambda store, lease: store.heartbeat([lease]),
    "heartbeat_with_progress": lambda store, lease: store.heartbeat_with_progress(
        [Beat(lease, snapshot())]
    ),
    "record_completed": lambda store, lease: store.record_completed([attempt("first")]),
}
READS: dict[str, Verb] = {
    "knows": lambda store, lease: store.knows("task"),
    "owns": lambda store, lease: store.owns(lease),
    "held": lambda store, lease: store.held([lease]),
    "get_job": lambda store, lease: store.get_job("task"),
    "list_jobs": lambda store, lease: store.list_jobs(),
}
each_write = pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
VERBS = WRITES | READS
each_verb = pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)


def test_a_url_that_cannot_be_read_is_a_setting_that_is_wrong() -> None:
    with pytest.raises(SettingsError, match="postgresql://user:password@host:5432/database"):
        open_store("mysql://user:secret@host/database", "celery_awa")


def test_a_server_that_does_not_listen_is_away() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        with pytest.raises(StoreUnavailable, match=r"connection|refused"):
            open_store(f"postgresql://postgres@127.0.0.1:{port}/postgres", "celery_awa")


def test_a_database_that_is_not_there_is_named(database: Database) -> None:
    url = psycopg.conninfo.make_conninfo(database.url, dbname="awa_not_there")

    with pytest.raises(StoreUnavailable, match='database "awa_not_there" does not exist'):
        open_store(url, "celery_awa")


@each_verb
def test_a_connection_that_the_server_ended_makes_the_store_unavailable(
    open_another: OpenStore, database: Database, verb: Verb
) -> None:
    store = open_another()
    lease = running(store)
    database.execute(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )

    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            verb(store, lease)


@each_write
def test_a_locked_row_is_waited_for_half_a_second(
    store: CanonicalStore, database: Database, write: Verb
) -> None:
    lease = running(store)
    before = database.row()

    with database.locked():
        began = time.monotonic()
        with pytest.raises(RowLocked):
            write(store, lease)
        took = time.monotonic() - began

    assert 0.4 < took < 5
    assert database.row() == before


@pytest.mark.parametrize("state", [JobState.RETRYABLE, JobState.AVAILABLE])
def test_a_locked_row_that_waits_is_waited_for_no_longer(
    store: CanonicalStore, database: Database, state: JobState
) -> None:
    lease = retried_job(store, "task", state)

    with database.locked():
        with pytest.raises(RowLocked):
            store.sent(lease)
        with pytest.raises(RowLocked):
            store.claim(attempt("third", retries=2))

    assert database.row()["state"] == state.value


def test_no_read_waits_for_a_locked_row(store: CanonicalStore, database: Database) -> None:
    lease = running(store)

    with database.locked():
        assert all(read(store, lease) for read in READS.values())


def test_a_read_only_server_is_as_good_as_none(own_database: Database, store_on: StoreOn) -> None:
    lease = running(store_on(own_database.url))
    own_database.set_default("default_transaction_read_only", "on")
    store = store_on(own_database.url)

    for write in WRITES.values():
        with pytest.raises(StoreUnavailable, match="read-only"):
            write(store, lease)
    assert all(read(store, lease) for read in READS.values())


def test_a_statement_timeout_makes_the_store_unavailable(
    own_database: Database, store_on: StoreOn
) -> None:
    running(store_on(own_database.url))
    own_database.set_default("statement_timeout", "50ms")
    store = store_on(own_database.url)

    with own_database.locked(), pytest.raises(StoreUnavailable, match="statement timeout"):
        store.claim(attempt("second"))


def test_a_value_out_of_range_is_refused(store: CanonicalStore, database: Database) -> None:
    _, lease = claimed(store, attempt())

    with pytest.raises(StoreRefused, match="out of range"):
        store.end(lease, "first", Transition(JobState.RETRYABLE, run_in=-1e300))
    assert database.row()["state"] == "running"


@pytest.mark.parametrize("task_id", ["nul \0", "surrogate \ud800"])
def test_an_id_that_is_no_text_for_postgres_is_refused(store: CanonicalStore, task_id: str) -> None:
    for read in (store.get_job, store.knows):
        with pytest.raises(StoreRefused):
            read(task_id)


def test_a_schema_that_lost_its_tables_is_told(own_database: Database, store_on: StoreOn) -> None:
    store = store_on(own_database.url)
    own_database.execute("DROP VIEW {schema}.jobs")
    own_database.execute("DROP TABLE {schema}.jobs_hot CASCADE")

    for verb in VERBS.values():
        with pytest.raises(SchemaError, match="jobs"):
            verb(store, Lease(1, 1))


def test_a_default_isolation_under_which_claims_would_not_be_safe_is_refused(
    own_database: Database, store_on: StoreOn
) -> None:
    own_database.set_default("default_transaction_isolation", "repeatable read")

    with pytest.raises(SchemaError, match=r"'repeatable read'.*needs 'read committed'"):
        store_on(own_database.url)
