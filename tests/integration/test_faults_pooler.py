"""PgBouncer in transaction mode: connections that are lent for one statement at a time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing

import psycopg
import pytest

from celery_awa.errors import StoreUnavailable
from celery_awa.model import JobState, Transition
from celery_awa.runtime.task_process import TaskProcess
from celery_awa.runtime.trouble import Trouble
from celery_awa.store.canonical import open_store
from celery_awa.store.migrations import migrate
from tests.conftest import SCHEMA
from tests.runtime_parts import SOON, StartProcess, claimed, settings
from tests.services.pgbouncer import PgBouncer
from tests.services.postgres import OBSERVER, PrivatePostgres
from tests.waiting import eventually

from . import slate_children
from .jobs import Database, use_every_verb

pytest_plugins = ["tests.integration.stores", "tests.integration.runtime"]
pytestmark = pytest.mark.pgbouncer

PROCESSES, FLUSHES = 8, 50

Warnings = Callable[[], list[str]]


@pytest.fixture
def url(pgbouncer: PgBouncer, private_url: str) -> str:
    """A migrated database behind the pooler."""
    return pgbouncer.through(private_url)


def flush_in_process(url: str, name: str, our_warnings: Warnings) -> None:
    """What a busy process does: two attempts, heartbeats beside the flushes, and both ends."""
    process = TaskProcess(
        settings(write_interval=0.02, heartbeat_interval=0.05),
        lambda: open_store(url, SCHEMA),
        Trouble(),
    )
    one, other = claimed(process, name), claimed(process, f"{name}, other")
    for number in range(FLUSHES):
        one.set_progress(current=number, total=FLUSHES)
        other.set_progress(current=number, total=FLUSHES)
        assert one.flush_progress(timeout=30) is True
    for ending, to in ((one, JobState.COMPLETED), (other, JobState.RETRYABLE)):
        process.end(ending, Transition(to))
    assert process.stop(30)
    assert not one.lost
    assert our_warnings() == []


def test_eight_processes_flush_beside_their_heartbeats_over_two_connections(
    url: str,
    private_url: str,
    pgbouncer: PgBouncer,
    private_postgres: PrivatePostgres,
    our_warnings: Warnings,
) -> None:
    logged = len(private_postgres.log())
    children = [
        slate_children.fork(lambda name=f"job {n}": flush_in_process(url, name, our_warnings))
        for n in range(PROCESSES)
    ]
    assert [slate_children.wait(child) for child in children] == [0] * PROCESSES
    assert len(private_postgres.connections()) <= pgbouncer.pool_size
    with closing(open_store(private_url, SCHEMA)) as jobs:
        found = {job.task_id: (job.state, job.progress, job.attempt) for job in jobs.list_jobs()}
    last = {"current": FLUSHES - 1, "total": FLUSHES, "percent": 98}
    assert found == {
        f"job {n}{other}": (state, progress, 1)
        for n in range(PROCESSES)
        for other, state, progress in (
            ("", JobState.COMPLETED, None),
            (", other", JobState.RETRYABLE, last),
        )
    }
    assert "ERROR" not in private_postgres.log()[logged:]
    assert "prepared statement" not in pgbouncer.log()


def test_every_verb_leaves_the_lent_connection_as_it_was(url: str, private_url: str) -> None:
    def session(connection: psycopg.Connection) -> list[object]:
        return [
            connection.execute(text).fetchall()
            for text in (
                "SELECT name, setting FROM pg_settings WHERE name <> 'application_name' ORDER BY 1",
                "SELECT name FROM pg_prepared_statements",
                "SELECT objid FROM pg_locks WHERE locktype = 'advisory'",
            )
        ]

    with psycopg.connect(url, autocommit=True, prepare_threshold=None) as look:
        look.execute("LOAD 'plpgsql'")
        before = session(look)
        with closing(open_store(url, SCHEMA)) as store:
            use_every_verb(store)
        assert session(look) == before


def test_a_schema_is_migrated_through_the_pooler_by_several_at_once(
    pgbouncer: PgBouncer, private_postgres: PrivatePostgres
) -> None:
    url = pgbouncer.through(private_postgres.url(private_postgres.create_database()))
    children = [slate_children.fork(lambda: migrate(url)) for _ in range(4)]
    assert [slate_children.wait(child) for child in children] == [0] * 4
    open_store(url, SCHEMA).close()


def test_a_pooler_that_lends_nothing_holds_nobody_up_and_is_waited_for(
    start_process: StartProcess, url: str, pgbouncer: PgBouncer
) -> None:
    process = start_process(url)
    one, ending = claimed(process), claimed(process, "ending")
    with ExitStack() as taken:
        for _ in range(pgbouncer.pool_size):
            taken.enter_context(psycopg.connect(url, application_name=OBSERVER)).execute("SELECT 1")
        one.set_progress(50)
        with pytest.raises(StoreUnavailable):
            one.flush_progress(timeout=0.2)
        assert process.end(ending, Transition(JobState.FAILED)) is None
        assert not process.database.answering
    assert one.flush_progress(timeout=SOON) is True
    eventually(lambda: process.attempts() == 1)


def test_a_pooler_that_is_restarted_in_the_middle_costs_nothing_but_time(
    start_process: StartProcess, url: str, pgbouncer: PgBouncer, private_url: str
) -> None:
    process = start_process(url, write_interval=0.05, heartbeat_interval=0.1)
    one, ending = claimed(process), claimed(process, "ending")
    pgbouncer.stop()
    one.set_progress(50)
    with pytest.raises(StoreUnavailable):
        one.flush_progress(timeout=0.2)
    assert process.end(ending, Transition(JobState.FAILED)) is None
    pgbouncer.start()
    eventually(lambda: not one.pending and process.attempts() == 1)
    with closing(Database(private_url)) as look:
        assert look.row()["progress"] == {"percent": 50}
        assert look.row("ending")["state"] == "failed"


def test_a_server_that_is_restarted_behind_the_pooler_costs_nothing_but_time(
    start_process: StartProcess, url: str, private_postgres: PrivatePostgres, private_url: str
) -> None:
    process = start_process(url, write_interval=0.05, heartbeat_interval=0.1)
    one, ending = claimed(process), claimed(process, "ending")
    private_postgres.stop(immediate=True)
    one.set_progress(50)
    with pytest.raises(StoreUnavailable):
        one.flush_progress(timeout=0.2)
    assert process.end(ending, Transition(JobState.FAILED)) is None
    private_postgres.start()
    eventually(lambda: not one.pending and process.attempts() == 1, timeout=20)
    with closing(Database(private_url)) as look:
        assert look.row()["progress"] == {"percent": 50}
        assert look.row("ending")["state"] == "failed"
