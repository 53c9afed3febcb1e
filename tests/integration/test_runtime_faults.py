"""What a process does while its database is away, slow, full or cut off, and afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress

import psycopg
import pytest

from celery_awa.errors import StoreUnavailable
from celery_awa.model import Answer, Envelope, JobState, Transition
from tests.faults import Proxy
from tests.runtime_parts import SOON, StartProcess, begin, claimed
from tests.services.postgres import OBSERVER, PrivatePostgres
from tests.waiting import eventually

from .jobs import Database

pytest_plugins = ["tests.integration.stores", "tests.integration.runtime"]

COMPLETED = Transition(JobState.COMPLETED)
FAILED = Transition(
    JobState.FAILED, error="ValueError: boom", envelope=Envelope(b"whole", whole=True)
)
RETRYABLE = Transition(
    JobState.RETRYABLE, run_in=60.0, unsent=True, envelope=Envelope(b"whole", whole=True)
)
ENDS = pytest.mark.parametrize(
    "transition", [COMPLETED, FAILED, RETRYABLE], ids=["success", "failure", "retry"]
)

Proxied = tuple[Proxy, str]
Warnings = Callable[[], list[str]]


@pytest.fixture
def look(private_url: str) -> Iterator[Callable[[], Database]]:
    """Opens a look past the store into the private server's database."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(
            closing(Database(f"{private_url}&application_name={OBSERVER}"))
        )


@pytest.fixture
def took() -> Callable[[], float]:
    """Seconds since the last call."""
    last = time.monotonic()

    def since() -> float:
        nonlocal last
        before, last = last, time.monotonic()
        return last - before

    return since


# An answer that is lost.


@ENDS
def test_an_end_whose_connection_is_cut_after_it_was_sent_is_confirmed_once(
    start_process: StartProcess,
    proxied: Proxied,
    look: Callable[[], Database],
    transition: Transition,
    our_warnings: Warnings,
) -> None:
    proxy, url = proxied
    process = start_process(url)
    one = claimed(process)
    one.set_progress(60)
    proxy.cut_at("end_attempt")
    ended = process.end(one, transition)
    assert proxy.cuts == 1
    assert ended is not None
    assert ended.answer is Answer.REPEATED
    assert not one.lost
    row = look().row()
    assert row["state"] == str(transition.to)
    assert len(row["errors"]) == (1 if transition.error else 0)
    assert row["progress"] == (None if transition is COMPLETED else {"percent": 60})
    assert our_warnings() == []


@ENDS
def test_an_end_of_an_unclaimed_attempt_is_confirmed_once_after_a_cut(
    start_process: StartProcess,
    proxied: Proxied,
    look: Callable[[], Database],
    transition: Transition,
) -> None:
    proxy, url = proxied
    process = start_process(url)
    process.database.ask(lambda store: None, SOON)
    one = begin(process)
    one.set_progress(60)
    one.claim_sent = True
    proxy.cut_at("end_unclaimed")
    ended = process.end(one, transition)
    assert ended is not None
    assert (ended.answer, proxy.cuts) == (Answer.REPEATED, 1)
    row = look().row()
    assert (row["state"], row["run_lease"], row["attempt"]) == (str(transition.to), 1, 1)


@ENDS
def test_an_end_that_meets_a_claim_whose_answer_never_came_leaves_no_running_row(
    start_process: StartProcess,
    proxied: Proxied,
    look: Callable[[], Database],
    transition: Transition,
) -> None:
    proxy, url = proxied
    process = start_process(url)
    process.database.ask(lambda store: None, SOON)
    one = begin(process)
    one.set_progress(60)
    proxy.swallow()
    with pytest.raises(StoreUnavailable):
        process.learn(one, 0.05)
    assert (one.claim_sent, one.claim) == (True, None)
    assert process.end(one, transition) is None
    proxy.deliver()
    eventually(lambda: process.attempts() == 0)
    row = look().row()
    assert (row["state"], row["run_lease"]) == (str(transition.to), 1)


@pytest.mark.parametrize("text", ["heartbeat_with_progress", ".claim("])
def test_a_flush_whose_connection_is_cut_after_it_was_sent_is_confirmed(
    start_process: StartProcess,
    proxied: Proxied,
    look: Callable[[], Database],
    text: str,
    our_warnings: Warnings,
) -> None:
    proxy, url = proxied
    process = start_process(url)
    process.database.ask(lambda store: None, SOON)
    one = begin(process)
    one.set_progress(60)
    proxy.cut_at(text)
    assert one.flush_progress() is True
    assert proxy.cuts == 1
    assert look().row()["progress"] == {"percent": 60}
    assert look().row()["run_lease"] == 1
    assert our_warnings() == []


def test_rows_of_successes_are_written_once_though_the_answer_was_lost(
    start_process: StartProcess, proxied: Proxied, look: Callable[[], Database]
) -> None:
    proxy, url = proxied
    process = start_process(url)
    proxy.cut_at("record_completed")
    for n in range(5):
        one = begin(process, f"task {n}")
        one.set_progress(100)
        process.end(one, COMPLETED)
    assert process.stop(SOON)
    assert proxy.cuts == 1
    states = look().execute("SELECT state, run_lease FROM {schema}.jobs_hot")
    assert states == [{"state": "completed", "run_lease": 1}] * 5


# A network that swallows everything.


def test_while_the_network_swallows_everything_nobody_waits_beyond_his_bound(
    start_process: StartProcess,
    proxied: Proxied,
    look: Callable[[], Database],
    took: Callable[[], float],
) -> None:
    proxy, url = proxied
    process = start_process(url)
    one, second, third = (claimed(process, name) for name in ("one", "second", "third"))
    one.set_progress(10)
    proxy.swallow()
    took()
    with pytest.raises(StoreUnavailable):
        one.flush_progress(timeout=0.3)
    assert 0.3 <= took() < 2
    for number in range(10_000):
        one.set_progress(current=number, total=10_000)
        one.update_metadata({"last_id": number})
    assert took() < 5
    process.end(second, FAILED)  # the first courtesy finds out, and waits for its second
    assert took() < 3
    process.end(third, FAILED)
    late = begin(process, "late", claim=True, retries=1)
    assert process.owns(one)
    assert took() < 0.9
    with pytest.raises(StoreUnavailable):
        process.learn(late, 0.1)
    assert took() < 2
    proxy.deliver()
    assert one.flush_progress(timeout=SOON) is True
    eventually(lambda: process.database.answering and late.lease)
    rows = {row["task_id"]: row for row in look().execute("SELECT * FROM {schema}.jobs_hot")}
    assert rows["one"]["progress"]["current"] == 9_999
    assert rows["second"]["state"] == rows["third"]["state"] == "failed"


def test_a_stop_is_not_held_up_by_a_network_that_swallows_everything(
    start_process: StartProcess, proxied: Proxied, took: Callable[[], float]
) -> None:
    proxy, url = proxied
    process = start_process(url)
    one = claimed(process)
    one.set_progress(10)
    proxy.swallow()
    took()
    assert not process.stop(0.3)
    assert took() < 0.8
    proxy.deliver()


def test_a_network_that_comes_back_by_resetting_is_found_again(
    start_process: StartProcess, proxied: Proxied, look: Callable[[], Database]
) -> None:
    proxy, url = proxied
    process = start_process(url)
    one = claimed(process)
    one.set_progress(10)
    proxy.swallow()
    with pytest.raises(StoreUnavailable):
        one.flush_progress(timeout=0.1)
    proxy.reset()
    proxy.deliver()
    assert one.flush_progress(timeout=SOON) is True
    assert look().row()["progress"] == {"percent": 10}


# A server that goes and comes.


def test_terminated_backends_are_not_noticed(
    start_process: StartProcess,
    private_postgres: PrivatePostgres,
    private_url: str,
    look: Callable[[], Database],
    our_warnings: Warnings,
) -> None:
    process = start_process(private_url)
    one, second = claimed(process), claimed(process, "second")
    for percent in range(1, 6):
        one.set_progress(percent)
        assert private_postgres.terminate_backends() == 1
        assert one.flush_progress() is True
    private_postgres.terminate_backends()
    ended = process.end(one, COMPLETED)
    assert ended is not None
    assert ended.answer is Answer.DONE
    private_postgres.terminate_backends()
    second.set_progress(7)
    process.database.ask(lambda store: process.heartbeat.run_once(lambda: store), SOON)
    assert look().row("second")["progress"] == {"percent": 7}
    assert process.database.answering
    assert our_warnings() == []


def test_a_restart_in_the_middle_costs_nothing_but_time(
    start_process: StartProcess,
    private_postgres: PrivatePostgres,
    private_url: str,
    look: Callable[[], Database],
    our_warnings: Warnings,
    took: Callable[[], float],
) -> None:
    process = start_process(private_url, write_interval=0.05, heartbeat_interval=0.1)
    one, failing = claimed(process), claimed(process, "failing")
    reporting = begin(process, "reporting")
    reporting.set_progress(100)
    failing.set_progress(60)
    private_postgres.stop(immediate=True)
    one.set_progress(50)
    eventually(lambda: not process.database.answering)
    took()
    process.end(failing, FAILED)
    process.end(reporting, COMPLETED)
    for n in range(20):
        process.end(begin(process, f"silent {n}", claim=True, retries=1), RETRYABLE)
    assert took() < 1
    with pytest.raises(StoreUnavailable):
        one.flush_progress(timeout=0.1)
    one.set_progress(51)
    private_postgres.start()
    eventually(lambda: process.attempts() == 1 and not one.pending, timeout=20)
    eventually(lambda: look().count() == 23)
    database = look()
    assert database.row()["progress"] == {"percent": 51}
    assert database.row("failing")["progress"] == {"percent": 60}
    assert database.row("failing")["state"] == "failed"
    assert database.row("reporting")["state"] == "completed"
    assert process.database.answering
    assert len(our_warnings()) == 1


def test_an_idle_timeout_of_the_server_reaches_nobody(
    start_process: StartProcess, own_database: Database, our_warnings: Warnings
) -> None:
    for setting in ("idle_session_timeout", "idle_in_transaction_session_timeout"):
        set_default(own_database, setting, "100ms")
    process = start_process(own_database.url)
    one = claimed(process)
    for percent in (1, 2, 3):
        eventually(lambda: backends(own_database) == 0, interval=0.05)
        one.set_progress(percent)
        assert one.flush_progress() is True
    assert process.database.answering
    assert our_warnings() == []


def test_an_idle_process_holds_no_connection(
    start_process: StartProcess, own_database: Database, our_warnings: Warnings
) -> None:
    process = start_process(own_database.url, idle_after=0.1)
    one = claimed(process)
    for percent in (1, 2, 3):
        eventually(lambda: backends(own_database) == 0)
        one.set_progress(percent)
        assert one.flush_progress() is True
        assert backends(own_database) == 1
    assert our_warnings() == []


def set_default(database: Database, setting: str, value: str) -> None:
    """Set what new connections to that database begin with."""
    name = database.execute("SELECT current_database() AS name")[0]["name"]
    database.execute(f"ALTER DATABASE \"{name}\" SET {setting} = '{value}'")


def backends(database: Database) -> int:
    """How many connections of ours there are to that database."""
    found = database.execute(
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE datname = current_database() AND application_name = 'celery-awa'"
    )
    return int(found[0]["count"])


def test_a_server_that_takes_no_more_connections_is_asked_again(
    start_process: StartProcess, private_postgres: PrivatePostgres, private_url: str
) -> None:
    process = start_process(private_url)
    one = begin(process)
    one.set_progress(10)
    with ExitStack() as taken:
        with suppress(psycopg.OperationalError):
            while True:
                taken.enter_context(psycopg.connect(private_url, application_name=OBSERVER))
        with pytest.raises(StoreUnavailable, match=r"too many clients|remaining connection"):
            one.flush_progress(timeout=0.3)
    assert one.flush_progress() is True


def test_a_statement_timeout_is_tried_again(
    start_process: StartProcess, own_database: Database
) -> None:
    process = start_process(own_database.url, write_interval=0.05, heartbeat_interval=0.1)
    one = claimed(process)
    own_database.execute(
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN PERFORM pg_sleep(5); RETURN NEW; END $$"
    )
    set_default(own_database, "statement_timeout", "100ms")
    own_database.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND application_name = 'celery-awa'"
    )
    own_database.execute(
        "CREATE TRIGGER slow BEFORE UPDATE ON {schema}.jobs_hot "
        "FOR EACH ROW EXECUTE FUNCTION slow()"
    )
    one.set_progress(10)
    with pytest.raises(StoreUnavailable, match="statement timeout"):
        one.flush_progress(timeout=0.4)
    own_database.execute("DROP TRIGGER slow ON {schema}.jobs_hot")
    eventually(lambda: not one.pending)
    assert own_database.row()["progress"] == {"percent": 10}


def test_a_server_that_became_read_only_is_tried_again(
    start_process: StartProcess,
    private_postgres: PrivatePostgres,
    private_url: str,
    look: Callable[[], Database],
) -> None:
    process = start_process(private_url, write_interval=0.05, heartbeat_interval=0.1)
    one, ending = claimed(process), claimed(process, "ending")
    private_postgres.set_read_only(True)
    one.set_progress(10)
    with pytest.raises(StoreUnavailable, match="read-only"):
        one.flush_progress(timeout=0.3)
    assert process.end(ending, FAILED) is None
    private_postgres.set_read_only(False)
    eventually(lambda: not one.pending and process.attempts() == 1)
    assert look().row("ending")["state"] == "failed"
