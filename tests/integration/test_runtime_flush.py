"""Claims, flushes and heartbeats of one process over a real database."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from celery_awa.errors import LeaseLost, StoreUnavailable
from celery_awa.model import JobState, Transition
from celery_awa.runtime.task_process import TaskProcess
from celery_awa.store.canonical import open_store
from tests.conftest import SCHEMA
from tests.runtime_parts import SOON, StartProcess, begin, claimed, described
from tests.waiting import eventually

from .jobs import Database

pytest_plugins = ["tests.integration.stores", "tests.integration.runtime"]

WRITES = ("heartbeat", "heartbeat_with_progress")
FAILED = Transition(JobState.FAILED, error="ValueError: boom")


@pytest.fixture
def process(start_process: StartProcess, database_url: str) -> TaskProcess:
    """A process in which nothing happens by itself."""
    return start_process(database_url)


def writes(sent_statements: list[str]) -> int:
    return sum(name in WRITES for name in sent_statements)


def test_the_last_of_many_reports_is_in_the_row_after_a_flush(
    process: TaskProcess, own_database: Database
) -> None:
    one = begin(process)
    for percent in range(50):
        one.set_progress(percent, "at work")
        one.update_metadata({"last_id": percent, "text": "ü 😀 \\u0000"})
    assert one.flush_progress() is True
    assert own_database.row()["progress"] == {
        "percent": 49,
        "message": "at work",
        "metadata": {"last_id": 49, "text": "ü 😀 \\u0000"},
    }
    assert own_database.row()["progress_generation"] == 100


def test_nothing_pending_is_no_statement_at_all(
    process: TaskProcess, sent_statements: list[str]
) -> None:
    one = begin(process)
    assert one.flush_progress() is True
    assert sent_statements == []
    one.set_progress(1)
    assert one.flush_progress() is True
    assert sent_statements == ["claim", "heartbeat_with_progress"]
    for _ in range(10):
        assert one.flush_progress() is True
    assert sent_statements == ["claim", "heartbeat_with_progress"]


def test_a_flush_of_a_lost_lease_says_false_and_changes_nothing(
    process: TaskProcess, own_database: Database, sent_statements: list[str]
) -> None:
    old = claimed(process)
    old.set_progress(10)
    assert old.flush_progress() is True
    new = claimed(process, retries=1)
    old.set_progress(99)
    assert old.flush_progress() is False
    assert own_database.row()["progress"] == {"percent": 10}
    before = len(sent_statements)
    assert old.flush_progress() is False
    assert len(sent_statements) == before
    assert new.progress == {"percent": 10}


def test_two_attempts_of_one_task_in_one_process_have_two_leases(
    process: TaskProcess, own_database: Database
) -> None:
    first, second = claimed(process), claimed(process, redelivered=True)
    assert first.lease is not None
    assert second.lease is not None
    assert (first.lease.run_lease, second.lease.run_lease) == (1, 2)
    second.set_progress(2)
    assert second.flush_progress() is True
    first.set_progress(1)
    assert first.flush_progress() is False
    process.end(first, FAILED)
    assert own_database.row()["state"] == "running"
    assert own_database.row()["progress"] == {"percent": 2}


def test_kept_progress_is_laid_under_what_was_reported(
    process: TaskProcess, own_database: Database
) -> None:
    earlier = claimed(process)
    earlier.set_progress(30, "old")
    earlier.update_metadata({"kept": 1, "both": {"a": 1}})
    process.end(earlier, Transition(JobState.RETRYABLE, run_in=0.0, unsent=True))
    one = begin(process, retries=1, from_lease=1)
    one.update_metadata({"both": {"b": 2}})
    assert one.flush_progress() is True
    assert own_database.row()["progress"] == {
        "percent": 30,
        "message": "old",
        "metadata": {"kept": 1, "both": {"b": 2}},
    }
    assert dict(one.checkpoint) == {"kept": 1, "both": {"a": 1}}
    assert own_database.row()["attempt"] == 2


@pytest.mark.parametrize("progress", ["[1]", '"x"', "7", '{"metadata": [1]}'])
def test_progress_that_was_edited_by_hand_does_not_break_the_next_attempt(
    process: TaskProcess, own_database: Database, progress: str
) -> None:
    process.end(claimed(process), Transition(JobState.RETRYABLE, run_in=0.0))
    own_database.execute("UPDATE {schema}.scheduled_jobs SET progress = %s::jsonb", progress)
    one = claimed(process, retries=1, from_lease=1)
    assert dict(one.checkpoint) == {}
    one.update_metadata({"last_id": 1})
    assert one.flush_progress() is True
    assert own_database.row()["progress"]["metadata"] == {"last_id": 1}


def test_reading_in_a_run_that_is_over_says_that_the_lease_is_lost(process: TaskProcess) -> None:
    process.end(claimed(process), FAILED)
    late = begin(process)
    late.set_progress(1)
    with pytest.raises(LeaseLost):
        late.checkpoint  # noqa: B018
    assert late.flush_progress() is False
    assert process.owns(late) is False


def test_two_threads_of_a_task_flush_at_once(process: TaskProcess, own_database: Database) -> None:
    one = begin(process)
    answers: list[bool] = []

    def report(name: str) -> None:
        for number in range(100):
            one.update_metadata({name: number})
            answers.append(one.flush_progress())

    threads = [threading.Thread(target=report, args=(name,)) for name in ("a", "b", "c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert answers == [True] * 300
    assert own_database.row()["progress"] == {"metadata": {"a": 99, "b": 99, "c": 99}}


def test_many_attempts_are_claimed_after_a_while_and_beaten_for_in_two_statements(
    start_process: StartProcess, own_database: Database, sent_statements: list[str]
) -> None:
    process = start_process(own_database.url, claim_after=0.05)
    many = [begin(process, f"task {n}") for n in range(600)]
    eventually(lambda: all(one.lease for one in many), timeout=30)
    for one in many[::2]:
        one.set_progress(50)
    process.database.ask(lambda store: process.heartbeat.run_once(lambda: store), SOON)
    sent_statements.clear()
    for one in many[::2]:
        one.set_progress(60)
    process.database.ask(lambda store: process.heartbeat.run_once(lambda: store, last=True), SOON)
    assert sent_statements == ["heartbeat_with_progress", "heartbeat"]
    counted = own_database.execute(
        "SELECT count(*) FILTER (WHERE progress = '{\"percent\": 60}') AS reported, "
        "count(*) FILTER (WHERE heartbeat_at > attempted_at) AS beaten FROM {schema}.jobs_hot"
    )
    assert counted == [{"reported": 300, "beaten": 600}]
    assert not any(one.lost or one.pending for one in many)


def test_a_hundred_thousand_reports_are_no_more_statements_than_cycles(
    start_process: StartProcess, own_database: Database, sent_statements: list[str]
) -> None:
    process = start_process(own_database.url, write_interval=0.1, heartbeat_interval=0.2)
    one = claimed(process)
    sent_statements.clear()
    began = one.started_at
    for number in range(100_000):
        one.set_progress(current=number, total=100_000)
    eventually(lambda: not one.pending)
    process.stop(SOON)
    cycles = (time.monotonic() - began) / 0.1
    assert 0 < writes(sent_statements) <= cycles + 2
    assert own_database.row()["progress"]["current"] == 99_999


def test_a_success_that_reported_leaves_its_row_through_a_stop(
    process: TaskProcess, own_database: Database, sent_statements: list[str]
) -> None:
    for n in range(40):
        one = begin(process, f"task {n}")
        one.set_progress(100)
        process.end(one, Transition(JobState.COMPLETED))
        process.end(begin(process, f"silent {n}"), Transition(JobState.COMPLETED))
    assert process.stop(SOON)
    states = own_database.execute("SELECT state, progress, envelope FROM {schema}.jobs_hot")
    assert states == [{"state": "completed", "progress": None, "envelope": None}] * 40
    assert len(sent_statements) < 20


def test_a_refused_snapshot_costs_the_nine_others_nothing(
    process: TaskProcess,
    own_database: Database,
    refuse_progress_of: Callable[[str], None],
    our_warnings: Callable[[], list[str]],
) -> None:
    many = [claimed(process, f"task {n}") for n in range(10)]
    refuse_progress_of("task 3")
    own_database.execute("UPDATE {schema}.jobs_hot SET heartbeat_at = now() - interval '1 hour'")
    for one in many:
        one.set_progress(70)
    process.database.ask(lambda store: process.heartbeat.run_once(lambda: store), SOON)
    rows = own_database.execute(
        "SELECT progress, heartbeat_at > now() - interval '1 minute' AS beaten "
        "FROM {schema}.jobs_hot ORDER BY task_id"
    )
    assert [row["beaten"] for row in rows] == [True] * 10
    assert [row["progress"] for row in rows] == [
        None if n == 3 else {"percent": 70} for n in range(10)
    ]
    assert [one.pending for one in many] == [n == 3 for n in range(10)]
    assert any("refused the progress" in text for text in our_warnings())
    with pytest.raises(StoreUnavailable, match="refused"):
        many[3].flush_progress()
    assert process.database.answering


def test_a_row_that_a_user_locked_holds_up_no_other(
    process: TaskProcess, own_database: Database, our_warnings: Callable[[], list[str]]
) -> None:
    many = [claimed(process, f"task {n}") for n in range(10)]
    for one in many:
        one.set_progress(70)
    with own_database.locked("task 3"):
        process.database.ask(lambda store: process.heartbeat.run_once(lambda: store), SOON)
        assert [one.pending for one in many] == [n == 3 for n in range(10)]
        assert not any(one.lost for one in many)
        with pytest.raises(StoreUnavailable):
            many[3].flush_progress(timeout=0.1)
    assert many[3].flush_progress() is True
    assert our_warnings() == []


def test_a_claim_of_a_locked_row_holds_up_no_other(
    start_process: StartProcess, own_database: Database, our_warnings: Callable[[], list[str]]
) -> None:
    with_row = open_store(own_database.url, SCHEMA)
    with_row.claim(described("earlier", "locked"))
    with_row.close()
    process = start_process(own_database.url, claim_after=0.01)
    with own_database.locked("locked"):
        locked = begin(process, "locked", retries=1)
        others = [begin(process, f"task {n}") for n in range(20)]
        eventually(lambda: all(one.lease for one in others))
        assert locked.claim is None
    eventually(lambda: locked.lease)
    assert our_warnings() == []


@pytest.fixture
def refuse_progress_of(own_database: Database) -> Callable[[str], None]:
    """Have a trigger refuse every new progress of a task."""

    def refuse(task_id: str) -> None:
        own_database.execute(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN RAISE EXCEPTION 'refused by a trigger'; END $$"
        )
        own_database.execute(
            "CREATE TRIGGER refuse BEFORE UPDATE ON {schema}.jobs_hot FOR EACH ROW "
            f"WHEN (NEW.task_id = '{task_id}' AND NEW.progress IS DISTINCT FROM OLD.progress) "
            "EXECUTE FUNCTION refuse()"
        )

    return refuse
