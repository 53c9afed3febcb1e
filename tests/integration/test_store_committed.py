"""What a task commits with its own work: both or neither, through whatever connection it has."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest
import sqlalchemy
from django.db import connections
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from celery_awa.errors import RowLocked, SchemaError, SettingsError
from celery_awa.model import Beat, Claim, JobState, Lease, Rescue, Snapshot, Transition, Verdict
from celery_awa.store.canonical import CanonicalStore
from celery_awa.store.through import checkpoint_through
from tests.conftest import SCHEMA
from tests.waiting import eventually

from .jobs import (
    HOUR,
    OLD,
    WHOLE,
    Database,
    attempt,
    claimed,
    lost_attempt,
    retried_job,
    running,
    snapshot,
    stored,
)
from .user_connections import (
    Open,
    by_django,
    by_psycopg,
    by_sqlalchemy,
    django_alias,
    django_database,
    each_way,
    engine_on,
)

pytest_plugins = ["tests.integration.stores"]


def write(
    connection: Any,
    lease: Lease,
    values: object,
    *,
    token: str = "first",
    version: int = 0,
    schema: str = SCHEMA,
) -> bool:
    return checkpoint_through(connection, schema, lease, token, version, json.dumps(values))


def commit(database: Database, lease: Lease, values: object, **how: Any) -> bool:
    """Write it in a transaction of its own."""
    with psycopg.connect(database.url) as connection:
        return write(connection, lease, values, **how)


@pytest.fixture
def orders(database: Database) -> Iterator[Callable[[], list[int]]]:
    """A table of the user's, and what is in it."""
    database.execute("CREATE TABLE orders (id int)")
    yield lambda: [row["id"] for row in database.execute("SELECT id FROM orders ORDER BY id")]
    database.execute("DROP TABLE orders")


# Both or neither.


@each_way
def test_a_commit_keeps_the_work_and_the_checkpoint_together(
    store: CanonicalStore, database: Database, orders: Callable[[], list[int]], opened: Open
) -> None:
    lease = running(store)
    with opened(database.url) as user:
        user.execute("INSERT INTO orders VALUES (7)")
        assert write(user.connection, lease, {"last_id": 7, "naïve": "%s %(id)s :id {}"}) is True
        assert (orders(), database.row()["committed"]) == ([], None)

        user.commit()

        assert orders() == [7]
        assert database.row()["committed"] == {"last_id": 7, "naïve": "%s %(id)s :id {}"}


@each_way
def test_a_rollback_leaves_no_trace_of_either(
    store: CanonicalStore, database: Database, orders: Callable[[], list[int]], opened: Open
) -> None:
    lease = running(store)
    before = database.row()
    with opened(database.url) as user:
        user.execute("INSERT INTO orders VALUES (7)")
        assert write(user.connection, lease, {"last_id": 7})

        user.rollback()

    assert (orders(), database.row()) == ([], before)


@each_way
def test_it_may_be_the_first_statement_and_there_may_be_several(
    store: CanonicalStore, database: Database, opened: Open
) -> None:
    lease = running(store)
    with opened(database.url) as user:
        assert write(user.connection, lease, {"a": 1, "b": 1})
        assert write(user.connection, lease, {"b": 2})
        user.execute("SELECT 1")
        user.commit()

    assert database.row()["committed"] == {"a": 1, "b": 2}


@each_way
def test_who_has_lost_the_job_is_told_and_his_transaction_goes_on(
    store: CanonicalStore, database: Database, orders: Callable[[], list[int]], opened: Open
) -> None:
    lease = running(store)
    claimed(store, attempt("second", redelivered=True))
    before = database.row()

    with opened(database.url) as user:
        assert write(user.connection, lease, {"last_id": 7}) is False
        user.execute("INSERT INTO orders VALUES (7)")
        user.commit()

    assert (orders(), database.row()) == ([7], before)


@pytest.mark.parametrize("state", [state for state in JobState if state is not JobState.RUNNING])
def test_an_attempt_that_ended_commits_nothing_more(
    store: CanonicalStore, database: Database, state: JobState
) -> None:
    lease = retried_job(store, "task", state)
    before = database.row()

    assert not commit(database, lease, {"last_id": 7}, token="second")
    assert database.row() == before


def test_lease_and_token_must_both_be_those_of_the_attempt(
    store: CanonicalStore, database: Database
) -> None:
    lease = running(store)
    before = database.row()

    assert not commit(database, lease, {"a": 1}, token="other")
    assert not commit(database, Lease(lease.job_id, 2), {"a": 1})
    assert not commit(database, Lease(0, 1), {"a": 1})
    assert database.row() == before


def test_a_process_that_is_killed_before_its_commit_has_committed_neither(
    store: CanonicalStore, database: Database, orders: Callable[[], list[int]]
) -> None:
    lease = running(store)
    context = multiprocessing.get_context("spawn")
    reached = context.Event()
    process = context.Process(target=_commit_never, args=(database.url, lease, reached))
    process.start()
    assert reached.wait(60)
    assert process.pid is not None

    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    claim = eventually(lambda: _claim_if_free(store))

    assert claim.committed is None
    assert orders() == []


def _commit_never(url: str, lease: Lease, reached: Any) -> None:
    with psycopg.connect(url) as connection:
        connection.execute("INSERT INTO orders VALUES (7)")
        assert write(connection, lease, {"last_id": 7})
        reached.set()
        signal.pause()


def _claim_if_free(store: CanonicalStore) -> Claim | None:
    try:
        return store.claim(attempt("second", retries=1))
    except RowLocked:
        return None


def test_an_attempt_that_takes_over_finds_what_the_other_has_committed_meanwhile(
    store: CanonicalStore, database: Database
) -> None:
    lease = running(store)
    with psycopg.connect(database.url) as connection:
        assert write(connection, lease, {"last_id": 7})
        with pytest.raises(RowLocked):
            store.claim(attempt("second", retries=1))

    assert claimed(store, attempt("second", retries=1))[0].committed == {"last_id": 7}


def test_an_attempt_whose_job_is_being_taken_waits_and_is_told_that_it_is_gone(
    store: CanonicalStore, database: Database
) -> None:
    lease = running(store)
    told: list[bool] = []
    thread = threading.Thread(target=lambda: told.append(commit(database, lease, {"a": 1})))

    with psycopg.connect(database.url) as taking:
        claimed(CanonicalStore(taking, SCHEMA), attempt("second", retries=1))
        thread.start()
        eventually(
            lambda: database.execute(
                "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock' "
                "AND datname = current_database()"
            )
        )
    thread.join()

    assert told == [False]
    assert database.row()["committed"] is None


def test_the_lock_of_an_open_transaction_keeps_no_other_job_from_its_heartbeat(
    store: CanonicalStore, database: Database
) -> None:
    leases = [running(store, f"{number}") for number in range(3)]
    beats = [Beat(lease, snapshot()) for lease in leases]
    with psycopg.connect(database.url) as connection:
        assert write(connection, leases[1], {"a": 1})

        assert set(store.heartbeat(leases, skip_locked=True)) == {leases[0], leases[2]}
        reported = store.heartbeat_with_progress(beats, skip_locked=True)
        assert set(reported) == {leases[0], leases[2]}
        assert store.held(leases) == set(leases)
        assert store.rescue(leases, OLD) == {}
        with pytest.raises(RowLocked):
            store.end(leases[1], "first", Transition(JobState.FAILED))

    assert set(store.heartbeat_with_progress(beats)) == set(leases)
    assert database.row("1")["committed"] == {"a": 1}


def test_who_waits_for_the_lock_waits_as_long_as_his_own_settings_say(
    store: CanonicalStore, database: Database
) -> None:
    lease = running(store)
    with psycopg.connect(database.url) as connection, database.locked():
        connection.execute("SET LOCAL lock_timeout = '50ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            write(connection, lease, {"a": 1})


def test_a_snapshot_that_a_heartbeat_has_passed_by_is_the_drivers_error(
    store: CanonicalStore, database: Database
) -> None:
    lease = running(store)
    with by_psycopg(database.url) as user:
        user.connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        user.execute("SELECT 1")
        store.heartbeat([lease])

        with pytest.raises(psycopg.errors.SerializationFailure):
            write(user.connection, lease, {"a": 1})


# What is merged with what.


@pytest.mark.parametrize(
    ("kept", "version", "values", "left"),
    [
        (None, 0, {"a": 1}, {"a": 1}),
        ({"a": {"x": 1}, "b": 2}, 0, {"a": {"y": 1}}, {"a": {"y": 1}, "b": 2}),
        ({"a": 1}, 0, {"a": None}, {"a": None}),
        ({"a": 1}, 0, {}, {"a": 1}),
        ({"a": 1}, 2, {"b": 1, "awa_version": 2}, {"b": 1, "awa_version": 2}),
        ({"a": 1, "awa_version": 2}, 2, {"b": 1}, {"a": 1, "b": 1, "awa_version": 2}),
        ({"a": 1, "awa_version": 2}, 3, {"b": 1, "awa_version": 3}, {"b": 1, "awa_version": 3}),
        ({"a": 1, "awa_version": 2}, 0, {"b": 1}, {"b": 1}),
        ({"a": 1, "awa_version": 0}, 0, {"b": 1}, {"a": 1, "b": 1, "awa_version": 0}),
        ({"a": 1, "awa_version": "2"}, 2, {"b": 1}, {"b": 1}),
        (
            {"awa_committed": {"items": {"cursor": 1, "done": 1}, "lines": 1}},
            0,
            {"awa_committed": {"items": {"cursor": 2}}},
            {"awa_committed": {"items": {"cursor": 2}, "lines": 1}},
        ),
        ({"awa_committed": {"a": 1}}, 0, {"b": 1}, {"awa_committed": {"a": 1}, "b": 1}),
        ({"b": 1}, 0, {"awa_committed": {"a": 1}}, {"awa_committed": {"a": 1}, "b": 1}),
        (
            {"awa_committed": {"a": 1}, "awa_version": 1},
            2,
            {"awa_committed": {"b": 1}, "awa_version": 2},
            {"awa_committed": {"b": 1}, "awa_version": 2},
        ),
        ({"awa_committed": 7}, 0, {"awa_committed": {"a": 1}}, {"awa_committed": {"a": 1}}),
        ([7], 0, {"a": 1}, {"a": 1}),
    ],
)
def test_values_are_merged_key_by_key_loops_name_by_name_and_versions_not_at_all(
    store: CanonicalStore,
    database: Database,
    kept: object,
    version: int,
    values: dict[str, Any],
    left: dict[str, Any],
) -> None:
    lease = running(store)
    if kept is not None:
        database.execute("UPDATE {schema}.jobs_hot SET committed = %s", json.dumps(kept))

    assert commit(database, lease, values, version=version)

    assert database.row()["committed"] == left


def test_no_heartbeat_and_no_end_touches_what_was_committed(
    store: CanonicalStore, database: Database
) -> None:
    lease = running(store)
    commit(database, lease, {"last_id": 7})

    store.heartbeat([lease])
    store.heartbeat_with_progress([Beat(lease, Snapshot(3, '{"metadata": {"last_id": 3}}'))])
    store.end(lease, "first", Transition(JobState.RETRYABLE, Snapshot(2, '{"metadata": {}}')))

    job = store.get_job("task")
    assert job is not None
    assert job.committed == {"last_id": 7}
    assert job.progress == {"metadata": {"last_id": 3}}
    assert job.metadata == {"last_id": 7}
    claim, _ = claimed(store, attempt("second", retries=1))
    assert (claim.committed, claim.progress) == ({"last_id": 7}, {"metadata": {"last_id": 3}})


@pytest.mark.parametrize("state", [state for state in JobState if state is not JobState.RUNNING])
@pytest.mark.parametrize("settled", [False, True])
def test_it_is_kept_by_every_end_but_a_success(
    store: CanonicalStore, database: Database, state: JobState, settled: bool
) -> None:
    lease = running(store)
    commit(database, lease, {"last_id": 7})

    if settled and state.finished:
        assert store.settle(lease, state)
    else:
        store.end(lease, "first", Transition(state, snapshot()))

    done = state is JobState.COMPLETED
    assert database.row()["committed"] == (None if done else {"last_id": 7})


def test_a_rescue_keeps_it_and_a_fresh_run_discards_it(
    store: CanonicalStore, database: Database
) -> None:
    _, lease = claimed(store, lost_attempt())
    commit(database, lease, {"last_id": 7})
    store.forsake([lease])
    store.rescue([lease], OLD)
    assert claimed(store, lost_attempt("second", from_lease=1))[0].committed == {"last_id": 7}

    assert claimed(store, lost_attempt("again", run_token="run 2"))[0].committed is None


@pytest.mark.parametrize("keep", [True, False])
def test_an_operators_retry_keeps_it_and_a_restart_or_an_edit_discards_it(
    store: CanonicalStore, database: Database, keep: bool
) -> None:
    _, lease = claimed(store, attempt(envelope=WHOLE))
    commit(database, lease, {"last_id": 7})
    store.end(lease, "first", Transition(JobState.FAILED, snapshot(), envelope=WHOLE))

    store.resend("task", keep_progress=keep)
    assert database.row()["committed"] == ({"last_id": 7} if keep else None)

    store.edit_checkpoint("task", '{"last_id": 3}')
    job = store.get_job("task")
    assert job is not None
    assert (job.committed, job.metadata) == (None, {"last_id": 3})


def test_what_is_committed_is_an_advance_for_the_limit_of_rescues(
    store: CanonicalStore, database: Database
) -> None:
    told = []
    for number in range(10):
        _, lease = claimed(store, lost_attempt(f"{number}", from_lease=number or None))
        commit(database, lease, {"row": min(number, 8) // 3}, token=f"{number}")
        store.forsake([lease])
        told.append(store.rescue([lease], OLD)[lease])

    assert told == [*[Rescue.REQUEUED] * 9, Rescue.FAILED]
    assert database.row()["committed"] == {"row": 2}


def test_a_commit_is_proof_of_life_and_a_report_however_long_its_transaction_took(
    store: CanonicalStore, database: Database
) -> None:
    _, lease = claimed(store, lost_attempt(stall_after=60, stall_policy="stop"))
    store.heartbeat_with_progress([Beat(lease, snapshot())])
    database.execute(
        "UPDATE {schema}.jobs_hot SET heartbeat_at = now() - interval '1 day', "
        "progress_at = now() - interval '1 day', attempted_at = now() - interval '1 day'"
    )
    with psycopg.connect(database.url) as connection:
        assert write(connection, lease, {"last_id": 6})
        assert write(connection, lease, {"last_id": 7})
        assert [job.lease for job in store.lost(OLD)] == [lease]
        assert store.rescue([lease], OLD) == {}
        late = database.execute("SELECT clock_timestamp() AS now")[0]["now"]

    assert store.rescue([lease], OLD) == {}
    job = database.row()
    assert (job["state"], job["progress"]) == ("running", stored())
    assert job["heartbeat_at"] > late
    assert job["progress_at"] > late


def test_a_rollback_is_no_proof_of_life(store: CanonicalStore, database: Database) -> None:
    lease = running(store)
    database.silence(7200)
    with psycopg.connect(database.url) as connection:
        assert write(connection, lease, {"last_id": 7})
        connection.rollback()

    assert [job.lease for job in store.lost(OLD)] == [lease]


# Connections that cannot be used.


@pytest.fixture
def refuses(store: CanonicalStore, database: Database) -> Callable[..., None]:
    """Checks that what is written through a connection is refused, and changes nothing."""
    lease = running(store)
    before = database.row()

    def check(connection: Any, error: type[Exception], match: str) -> None:
        with pytest.raises(error, match=match):
            write(connection, lease, {"a": 1})
        assert database.row() == before

    return check


def test_a_connection_that_commits_by_itself_is_refused(
    database: Database, refuses: Callable[..., None]
) -> None:
    needed = "needs an open transaction, to be committed with your own work: "
    with closing(psycopg.connect(database.url, autocommit=True)) as connection:
        refuses(connection, SettingsError, f"{needed}.*connection.transaction")
    with django_alias(database.url) as alias:
        refuses(connections[alias], SettingsError, f"{needed}.*transaction.atomic")
    engine = engine_on(database.url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection, Session(engine) as session:
        for theirs in (connection, session):
            refuses(theirs, SettingsError, f"{needed}.*AUTOCOMMIT")
    engine.dispose()


def test_a_psycopg2_connection_that_commits_by_itself_is_refused(
    database: Database, refuses: Callable[..., None]
) -> None:
    psycopg2 = pytest.importorskip("psycopg2", reason="psycopg2 is not installed")
    with closing(psycopg2.connect(database.url)) as connection:
        connection.autocommit = True
        refuses(connection, SettingsError, "needs an open transaction.*autocommit to False")
    with closing(psycopg2.connect(database.url, async_=True)) as connection:
        refuses(connection, TypeError, "not an asynchronous psycopg2")


def test_a_transaction_that_was_begun_by_hand_counts_though_autocommit_is_on(
    store: CanonicalStore, database: Database
) -> None:
    lease = running(store)
    with by_psycopg(database.url, autocommit=True) as user:
        with user.connection.transaction():
            assert write(user.connection, lease, {"a": 1})
            assert database.row()["committed"] is None
        assert database.row()["committed"] == {"a": 1}
        user.execute("BEGIN")
        assert write(user.connection, lease, {"a": 2})
        user.execute("COMMIT")
    with django_alias(database.url) as alias:
        connections[alias].set_autocommit(False)
        assert write(connections[alias], lease, {"b": 2})
        connections[alias].commit()

    assert database.row()["committed"] == {"a": 2, "b": 2}


def test_what_is_no_connection_of_these_is_refused(
    database: Database, refuses: Callable[..., None]
) -> None:
    engine = engine_on(database.url)
    sqlite = sqlalchemy.create_engine("sqlite://")
    needs = "checkpoint_in needs a connection of psycopg or of Django, or a Connection or Session"
    with closing(sqlite3.connect(":memory:")) as of_sqlite3:
        for wrong, name in (
            (None, "NoneType"),
            (database.url, "str"),
            (7, "int"),
            (of_sqlite3, "sqlite3.Connection"),
            (database.connection.cursor(), "Cursor"),
            (psycopg.AsyncConnection.__new__(psycopg.AsyncConnection), "AsyncConnection"),
            (engine, "Engine"),
            (AsyncSession.__new__(AsyncSession), "AsyncSession"),
        ):
            refuses(wrong, TypeError, f"^{needs} .*, not .*{name}$")
    other = "needs a connection to the database of celery-awa, "
    with sqlite.connect() as connection, Session(sqlite) as session:
        for theirs in (connection, session):
            refuses(theirs, TypeError, f"{other}by postgresql.psycopg .*, not by sqlite.pysqlite")


def test_another_kind_of_database_of_djangos_is_refused(refuses: Callable[..., None]) -> None:
    described = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
    with django_database(described) as connection:
        refuses(connection, TypeError, "database of celery-awa, not to one of sqlite")


@each_way
def test_a_database_without_the_tables_is_told(empty_database: Database, opened: Open) -> None:
    with opened(empty_database.url) as user:
        with pytest.raises(SchemaError) as caught:
            write(user.connection, Lease(1, 1), {"a": 1})
        user.rollback()

    assert str(caught.value) == (
        "checkpoint_in needs a connection to the database of celery-awa: "
        f"this one has no schema {SCHEMA} of it, or an older one"
    )
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("opened", [by_psycopg, by_django, by_sqlalchemy])
def test_any_other_error_is_the_connections_own(
    store: CanonicalStore, database: Database, opened: Open
) -> None:
    lease = running(store)
    with opened(database.url) as user:
        with pytest.raises(Exception, match="invalid input syntax for type json") as caught:
            checkpoint_through(user.connection, SCHEMA, lease, "first", 0, "no json")
        user.rollback()

    library = {by_psycopg: "psycopg", by_django: "django", by_sqlalchemy: "sqlalchemy"}[opened]
    assert type(caught.value).__module__.startswith(library)


def test_a_job_with_a_commit_on_its_way_is_not_sent_again(
    store: CanonicalStore, database: Database
) -> None:
    """Its message is due while the row is locked; afterwards it runs, or has ended."""
    lease = running(store)
    with psycopg.connect(database.url) as connection:
        write(connection, lease, {"a": 1})
        assert store.unsent(resend_after=HOUR) == []
        assert store.lost(OLD) == []
    assert store.claim(attempt()).verdict is Verdict.YOURS
