"""A server that becomes a read-only one and back: the open connection notices, nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import pytest
from psycopg.conninfo import make_conninfo

from celery_awa.errors import StoreUnavailable
from celery_awa.model import JobState, Transition
from celery_awa.runtime.task_process import TaskProcess
from tests.faults import Proxy
from tests.runtime_parts import SOON, StartProcess, begin, claimed
from tests.services.postgres import PrivatePostgres
from tests.waiting import eventually

from .jobs import Database, Row

pytest_plugins = ["tests.integration.stores", "tests.integration.runtime"]

#: How an attempt ends, and what the row says of it then.
ENDS = {
    "completed": Transition(JobState.COMPLETED),
    "failed": Transition(JobState.FAILED, error="ValueError: boom"),
    "retryable": Transition(JobState.RETRYABLE, error="OSError: again", run_in=60.0, unsent=True),
    "available": Transition(JobState.AVAILABLE, unsent=True),
    "cancelled": Transition(JobState.CANCELLED),
}


@pytest.fixture
def process(private_url: str, start_process: StartProcess) -> TaskProcess:
    return start_process(private_url, write_interval=0.05, heartbeat_interval=0.1)


def backend(process: TaskProcess) -> int:
    """The server's process behind the open connection."""
    # Every store here is the real one.
    return process.database.ask(lambda store: store._connection.info.backend_pid, SOON)  # type: ignore[attr-defined]


def test_everything_pending_is_delivered_after_the_way_there_and_back(
    process: TaskProcess,
    private_postgres: PrivatePostgres,
    private_url: str,
    our_warnings: Callable[[], list[str]],
) -> None:
    running = claimed(process, "running")
    ending = {f"{how} {n}": claimed(process, f"{how} {n}") for how in ENDS for n in range(3)}
    silent = {f"{how} silent": begin(process, f"{how} silent") for how in ENDS}
    for one in (*ending.values(), *silent.values()):
        one.set_progress(60)
    before = backend(process)

    private_postgres.set_read_only(True)
    # Over the connection that was open before: nobody told it, and the server did not close it.
    running.set_progress(50)
    with pytest.raises(StoreUnavailable, match="read-only"):
        running.flush_progress(timeout=1)
    for name, one in (ending | silent).items():
        process.end(one, ENDS[name.split()[0]])
    late = begin(process, "late", claim=True, retries=1)
    late.set_progress(5)
    running.update_metadata({"last_id": 7})
    assert late.lease is None
    assert running.pending

    private_postgres.set_read_only(False)
    eventually(lambda: process.attempts() == 2, timeout=20)
    eventually(lambda: not running.pending and not late.pending)
    assert backend(process) != before
    with closing(Database(private_url)) as look:
        for name in ending | silent:
            check(look.row(name), name.split()[0])
        assert look.row("running")["progress"] == {"percent": 50, "metadata": {"last_id": 7}}
        assert look.row("late")["progress"] == {"percent": 5}
        assert look.count() == len(ending | silent) + 2
    assert len(our_warnings()) == 1


def check(row: Row, how: str) -> None:
    """Ended in this way, once, and with what was reported last."""
    kept = None if how == "completed" else {"percent": 60}
    assert (row["state"], row["progress"]) == (how, kept)
    assert (row["run_lease"], len(row["errors"])) == (1, 1 if ENDS[how].error else 0)


def test_a_url_of_several_servers_leads_to_whichever_takes_writes(
    proxy_to: Callable[[str], Proxy],
    start_process: StartProcess,
    private_url: str,
    our_warnings: Callable[[], list[str]],
) -> None:
    first, second = proxy_to(private_url), proxy_to(private_url)
    second.refuse()
    process = start_process(
        make_conninfo(
            private_url,
            host="127.0.0.1,127.0.0.1",
            port=f"{first.port},{second.port}",
            target_session_attrs="read-write",
        )
    )
    one = claimed(process)
    for percent, (left, taken) in enumerate([(first, second), (second, first)], 1):
        taken.accept()
        left.refuse()
        one.set_progress(percent)
        assert one.flush_progress() is True
        assert (left.connections, taken.connections) == (0, 1)
    assert our_warnings() == []


def test_a_server_that_goes_there_and_back_again_and_again_is_told_of_once(
    process: TaskProcess,
    private_postgres: PrivatePostgres,
    private_url: str,
    our_warnings: Callable[[], list[str]],
) -> None:
    one = claimed(process)
    for percent in (10, 20, 30):
        private_postgres.set_read_only(True)
        one.set_progress(percent)
        with pytest.raises(StoreUnavailable, match="read-only"):
            one.flush_progress(timeout=0.5)
        private_postgres.set_read_only(False)
        eventually(lambda: not one.pending and process.database.answering)
    with closing(Database(private_url)) as look:
        assert look.row()["progress"] == {"percent": 30}
    assert len(our_warnings()) == 1
