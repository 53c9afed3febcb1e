"""One connection: what it asks of a pooler, and how a forked child lets go of it."""

from __future__ import annotations

import gc
import os
import signal
import stat
from collections.abc import Callable

import psycopg

from celery_awa.store.canonical import CanonicalStore
from celery_awa.store.connection import connect
from tests.waiting import eventually

from .jobs import Database, OpenStore, StoreOn, running, use_every_verb

pytest_plugins = ["tests.integration.stores"]


def test_nothing_that_a_transaction_pooler_forbids_is_asked_for(database: Database) -> None:
    with connect(database.url) as connection:
        assert connection.autocommit
        assert connection.prepare_threshold is None


def test_no_verb_leaves_a_trace_in_the_session(database: Database) -> None:
    with connect(database.url) as connection:
        connection.execute("LOAD 'plpgsql'")  # it brings settings of its own
        before = _session(connection)

        use_every_verb(CanonicalStore(connection, "celery_awa"))

        assert connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        assert _session(connection) == before


def _session(connection: psycopg.Connection[tuple[object, ...]]) -> list[object]:
    """Everything that a session may keep from one statement to the next."""
    return [
        connection.execute(text).fetchall()
        for text in (
            "SELECT name, setting FROM pg_settings ORDER BY name",
            "SELECT name FROM pg_prepared_statements",
            "SELECT name FROM pg_cursors",
            "SELECT * FROM pg_listening_channels()",
            "SELECT objid FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()",
            "SELECT relname FROM pg_class WHERE relpersistence = 't'",
        )
    ]


def test_what_the_url_says_goes_before_our_defaults(database: Database) -> None:
    named = psycopg.conninfo.make_conninfo(database.url, application_name="billing")

    for url, name in ((database.url, "celery-awa"), (named, "billing")):
        with connect(url) as connection:
            assert connection.execute("SHOW application_name").fetchone() == (name,)
            assert connection.execute("SHOW client_encoding").fetchone() == ("UTF8",)


def test_an_ended_connection_is_closed_without_an_error(
    open_another: OpenStore, database: Database
) -> None:
    store = open_another()
    database.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )

    store.close()
    store.close()
    store.abandon()


def test_a_forked_child_lets_go_and_the_parents_connection_goes_on(
    store: CanonicalStore, open_another: OpenStore
) -> None:
    lease = running(store)

    def let_go_and_work() -> None:
        nonlocal store
        store.abandon()
        store.abandon()
        assert store.heartbeat is not None
        del store
        gc.collect()
        another = open_another()
        assert another.owns(lease)
        another.close()

    for _ in range(3):
        assert in_child(let_go_and_work) == 0
        assert store.owns(lease)


def test_no_byte_of_an_abandoned_connection_reaches_the_server(store: CanonicalStore) -> None:
    lease = running(store)

    def close_abandoned() -> None:
        store.abandon()
        assert not stat.S_ISSOCK(os.fstat(store._connection.fileno()).st_mode)
        # Says goodbye over the descriptor, as the driver may when it frees the connection.
        store._connection.pgconn.finish()

    assert in_child(close_abandoned) == 0
    assert store.owns(lease)


def test_a_child_that_let_go_does_not_keep_its_parents_connection_open(
    store_on: StoreOn, own_database: Database
) -> None:
    """Else the server would not see that a killed parent is gone while a child lives on."""
    store = store_on(own_database.url)

    with a_living_child(store.abandon):
        assert _connections(own_database) == 1
        store.abandon()
        eventually(lambda: _connections(own_database) == 0)


def _connections(database: Database) -> int:
    found = database.execute(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
        "AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
    )
    return int(found[0]["count"])


def in_child(act: Callable[[], None]) -> int:
    """Act in a forked child, which leaves as a pool's child does; returns its exit status."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            act()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class a_living_child:
    """A forked child that acted and lives until the block ends."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    def __enter__(self) -> None:
        acted, tell = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                self._act()
                os.write(tell, b"x")
                signal.pause()
            finally:
                os._exit(1)
        os.close(tell)
        assert os.read(acted, 1) == b"x"
        os.close(acted)

    def __exit__(self, *_: object) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
