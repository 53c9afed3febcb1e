"""Connections that the user's own code opens, with credentials that change meanwhile."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from psycopg.rows import dict_row

from celery_awa.errors import SchemaError, StoreUnavailable
from celery_awa.model import JobState, Transition
from celery_awa.runtime.breaker import FIRST_PAUSE, LONGEST_PAUSE
from celery_awa.runtime.task_process import TaskProcess
from celery_awa.runtime.trouble import Trouble
from celery_awa.store.canonical import open_store
from celery_awa.store.connection import connect, connect_by
from tests.conftest import SCHEMA
from tests.runtime_parts import SOON, begin, claimed, settings
from tests.services.postgres import PASSWORD_ROLE, PrivatePostgres
from tests.waiting import eventually

from . import slate_children
from .jobs import Database, use_every_verb

pytest_plugins = ["tests.integration.stores", "tests.integration.runtime"]

Opened = psycopg.Connection[Any]


class Credentials:
    """The user's function, and what a test may do to it."""

    def __init__(self, url: str, password: str = "") -> None:
        self.url, self.password = url, password
        self.failure: BaseException | None = None
        #: The names of the threads that called, and when.
        self.callers: list[str] = []
        self.called_at: list[float] = []

    def __call__(self) -> Opened:
        self.callers.append(threading.current_thread().name)
        self.called_at.append(time.monotonic())
        if self.failure is not None:
            raise self.failure
        return psycopg.connect(self.url, password=self.password or None)


@pytest.fixture
def start(private_url: str) -> Iterator[Callable[..., TaskProcess]]:
    """Starts a process that executes tasks, over connections that are opened by a function.

    It is stopped before its database goes.
    """
    with ExitStack() as stack:

        def start(credentials: Callable[[], Opened], **changed: Any) -> TaskProcess:
            process = TaskProcess(
                settings(**changed),
                lambda: open_store(connect_by(credentials), SCHEMA),
                Trouble(),
            )
            stack.callback(process.database.stop, SOON)
            return process

        yield start


# How such a connection is set.


def differently(url: str) -> Opened:
    """A connection set in every way that would hurt us, in the midst of a transaction."""
    made = psycopg.connect(
        url,
        client_encoding="LATIN1",
        row_factory=dict_row,
        cursor_factory=psycopg.ClientCursor,
        prepare_threshold=0,
    )
    made.isolation_level = psycopg.IsolationLevel.SERIALIZABLE
    made.execute("SET application_name = 'of the user'")
    return made


def test_however_the_function_set_its_connection_every_verb_works(database: Database) -> None:
    with closing(open_store(connect_by(lambda: differently(database.url)), SCHEMA)) as store:
        use_every_verb(store)
        job = store.get_job("task")
        assert job is not None
        assert job.task_id == "task"


def test_it_is_set_as_one_of_our_own_and_what_the_function_did_to_the_session_stays(
    database: Database,
) -> None:
    def as_set(made: Opened) -> list[object]:
        assert made.info.transaction_status is psycopg.pq.TransactionStatus.IDLE
        shown = [
            made.execute(f"SHOW {name}").fetchone()  # type: ignore[arg-type]
            for name in ("client_encoding", "transaction_isolation", "transaction_read_only")
        ]
        return [made.autocommit, made.prepare_threshold, made.isolation_level, *shown]

    with connect(database.url) as ours, connect_by(lambda: differently(database.url)) as theirs:
        assert as_set(theirs) == as_set(ours)
        assert theirs.execute("SHOW application_name").fetchone() == ("of the user",)


def test_a_dead_connection_is_noticed_as_soon_as_one_of_our_own(
    private_postgres: PrivatePostgres,
) -> None:
    def noticed_after(made: Opened) -> list[int]:
        with closing(made), socket.socket(fileno=made.fileno()) as plug:
            found = [
                plug.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
                *(
                    plug.getsockopt(socket.IPPROTO_TCP, option)
                    for option in (
                        socket.TCP_KEEPIDLE,
                        socket.TCP_KEEPINTVL,
                        socket.TCP_KEEPCNT,
                        socket.TCP_USER_TIMEOUT,
                    )
                ),
            ]
            plug.detach()
            return found

    url = private_postgres.url()
    ours = noticed_after(connect(url))
    assert ours == [1, 10, 5, 3, 10_000]
    assert noticed_after(connect_by(lambda: psycopg.connect(url))) == ours
    own = connect_by(lambda: psycopg.connect(url, tcp_user_timeout=3_000, keepalives_idle=60))
    assert noticed_after(own) == [1, 60, 5, 3, 3_000]


def test_a_connection_over_a_socket_of_the_machine_is_taken(
    postgres_server: str, database: Database
) -> None:
    with connect_by(lambda: psycopg.connect(database.url)) as made:
        assert made.execute("SELECT 1").fetchone() == (1,)


def test_one_that_is_not_taken_is_closed(
    empty_database: Database, private_postgres: PrivatePostgres
) -> None:
    made = [psycopg.connect(empty_database.url) for _ in range(2)]
    with pytest.raises(SchemaError, match="migrate"):
        open_store(connect_by(lambda: made[0]), SCHEMA)
    assert made[0].closed
    with pytest.raises(StoreUnavailable, match="it returned a closed Connection"):
        connect_by(lambda: made[0])
    # One that died on the way: between the function's last word and our first.
    made[1].execute("SELECT 1")
    empty_database.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    with pytest.raises(StoreUnavailable):
        connect_by(lambda: made[1])
    assert made[1].closed


# While tasks run.


@pytest.fixture
def rotating(private_postgres: PrivatePostgres, private_url: str) -> Credentials:
    """A function that logs in by the password which counted when the test began."""
    private_postgres.set_password("first")
    return Credentials(make_conninfo(private_url, user=PASSWORD_ROLE), "first")


def test_a_new_password_counts_from_the_next_connection_on(
    start: Callable[..., TaskProcess],
    rotating: Credentials,
    private_postgres: PrivatePostgres,
    our_warnings: Callable[[], list[str]],
) -> None:
    process = start(rotating)
    one = claimed(process)
    for number, password in enumerate(["second", "third"], 1):
        private_postgres.set_password(password)
        one.set_progress(number)
        assert one.flush_progress() is True  # what is open stays open
        rotating.password = password
        private_postgres.terminate_backends()
        one.set_progress(10 * number)
        assert one.flush_progress() is True
    assert rotating.callers == ["celery-awa"] * 3  # the database thread, never a task's
    assert our_warnings() == []


def test_a_password_that_is_late_costs_nothing_but_time(
    start: Callable[..., TaskProcess],
    rotating: Credentials,
    private_postgres: PrivatePostgres,
    private_url: str,
    our_warnings: Callable[[], list[str]],
) -> None:
    process = start(rotating, write_interval=0.05, heartbeat_interval=0.1)
    one, ending = claimed(process), claimed(process, "ending")
    private_postgres.set_password("second")
    private_postgres.terminate_backends()
    one.set_progress(50)
    with pytest.raises(StoreUnavailable, match=r"connect= failed: OperationalError.*password"):
        one.flush_progress(timeout=0.3)
    ending.set_progress(60)
    assert process.end(ending, Transition(JobState.FAILED, error="boom")) is None
    assert process.database.answering is False
    rotating.password = "second"
    eventually(lambda: not one.pending and process.attempts() == 1)
    with closing(Database(private_url)) as look:
        assert look.row()["progress"] == {"percent": 50}
        assert look.row("ending")["state"] == "failed"
        assert look.row("ending")["progress"] == {"percent": 60}
    assert len(our_warnings()) == 1
    assert not any("second" in line or "first" in line for line in our_warnings())


@pytest.mark.parametrize(
    "failure", [RuntimeError("the vault is sealed"), SystemExit("the vault is sealed")]
)
def test_a_function_that_fails_is_called_again_with_pauses_and_reaches_no_task(
    start: Callable[..., TaskProcess],
    private_url: str,
    failure: BaseException,
    our_warnings: Callable[[], list[str]],
) -> None:
    credentials = Credentials(private_url)
    credentials.failure = failure
    process = start(credentials, write_interval=0.01, heartbeat_interval=0.02)
    attempts = [begin(process, f"task {n}") for n in range(10)]
    for one in attempts:
        one.set_progress(30)
        with pytest.raises(StoreUnavailable, match=r"connect= failed.*the vault is sealed"):
            one.flush_progress(timeout=0.05)
    eventually(lambda: len(credentials.called_at) >= 5)
    # However much is asked for: one call a pause, and each pause twice the last.
    gaps = [later - earlier for earlier, later in itertools.pairwise(credentials.called_at)]
    least = [min(FIRST_PAUSE * 2**n, LONGEST_PAUSE) / 2 for n in range(len(gaps))]
    assert all(gap >= pause for gap, pause in zip(gaps, least, strict=True)), gaps
    credentials.failure = None
    eventually(lambda: not any(one.pending for one in attempts))
    assert our_warnings() == [
        "celery-awa cannot use its database, tasks go on without it: the function given as "
        f"connect= failed: {type(failure).__name__}: the vault is sealed"
    ]


def test_a_function_that_never_returns_holds_up_neither_tasks_nor_the_stop(
    start: Callable[..., TaskProcess], private_url: str
) -> None:
    go_on = threading.Event()
    credentials = Credentials(private_url)
    process = start(lambda: (go_on.wait(60), credentials())[1])
    one = begin(process, claim=True, retries=1)  # waits for its second, and goes
    one.set_progress(10)
    with pytest.raises(StoreUnavailable):
        one.flush_progress(timeout=0.1)
    process.end(begin(process, "ending"), Transition(JobState.FAILED))
    assert not process.stop(0.3)
    assert credentials.called_at == []
    go_on.set()


def test_a_forked_child_calls_for_a_connection_of_its_own(
    start: Callable[..., TaskProcess], private_url: str
) -> None:
    credentials = Credentials(private_url)
    process = start(credentials)
    one = claimed(process)

    def work_in_child() -> None:
        own = TaskProcess(
            settings(), lambda: open_store(connect_by(credentials), SCHEMA), Trouble()
        )
        second = claimed(own, "second")
        second.set_progress(2)
        assert second.flush_progress() is True
        assert own.stop(SOON)
        assert len(credentials.called_at) == 2

    slate_children.run(work_in_child)
    one.set_progress(1)
    assert one.flush_progress() is True
    assert len(credentials.called_at) == 1
