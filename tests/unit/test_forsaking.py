"""Attempts that nobody ends: aborted ones, and those that die with their process."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from celery_awa.errors import RowLocked, StoreRefused
from celery_awa.model import Envelope, JobState, Lease, Transition
from celery_awa.runtime.attempt import Attempt
from celery_awa.runtime.task_process import TaskProcess
from tests.fake_store import FakeDatabase, FakeStore, Row
from tests.runtime_parts import (
    SOON,
    StartProcess,
    begin,
    claimed,
    described,
    undescribable,
)
from tests.waiting import eventually

COMPLETED = Transition(JobState.COMPLETED)
OFTEN = {"write_interval": 0.01, "heartbeat_interval": 0.01}


def is_forsaken(row: Row) -> bool:
    """Running, and stale at once."""
    return row.state is JobState.RUNNING and row.heartbeat_at is None


# One that was aborted.


def test_a_forsaken_attempt_leaves_its_last_snapshot_and_a_stale_row(
    process: TaskProcess, database: FakeDatabase
) -> None:
    one = claimed(process)
    one.set_progress(60)
    process.forsake(one)
    row = database.rows["task"]
    assert is_forsaken(row)
    assert row.progress == {"percent": 60}
    assert process.attempts() == 0
    assert one.should_stop


def test_nothing_is_written_before_the_lease_is_given_up_if_nothing_is_new(
    process: TaskProcess, database: FakeDatabase
) -> None:
    one = claimed(process)
    process.forsake(one)
    assert database.statements == ["claim", "forsake"]


def test_an_attempt_without_a_row_gets_one_for_the_rescue_to_find(
    process: TaskProcess, database: FakeDatabase
) -> None:
    one = begin(process, envelope=Envelope(b"whole", whole=True))
    one.set_progress(60)
    process.forsake(one)
    row = database.rows["task"]
    assert is_forsaken(row)
    assert (row.progress, row.whole) == ({"percent": 60}, True)


def test_nothing_ends_or_forsakes_it_a_second_time(
    process: TaskProcess, database: FakeDatabase
) -> None:
    one = claimed(process)
    process.forsake(one)
    process.forsake(one)
    assert process.end(one, COMPLETED) is None
    assert database.statements == ["claim", "forsake"]


def test_one_that_has_ended_is_not_forsaken(process: TaskProcess, database: FakeDatabase) -> None:
    one = claimed(process)
    process.end(one, COMPLETED)
    process.forsake(one)
    assert database.count("forsake") == 0


def test_another_attempts_lease_is_left_alone(process: TaskProcess, database: FakeDatabase) -> None:
    one = claimed(process)
    database.open().claim(described("the newer one"))
    one.set_progress(60)
    process.forsake(one)
    row = database.rows["task"]
    assert not is_forsaken(row)
    assert row.progress is None


def test_one_that_is_known_to_be_lost_or_refused_writes_nothing(
    process: TaskProcess, database: FakeDatabase
) -> None:
    lost = claimed(process)
    lost.answer(acknowledged=0, confirmed_at=0.0, lost=True)
    database.refused.add("refused")
    refused = begin(process, "refused", claim=True)
    assert refused.unclaimable is not None
    statements = list(database.statements)
    for one in (lost, refused):
        process.forsake(one)
    assert database.statements == statements
    assert process.attempts() == 0


def test_one_that_cannot_be_described_is_forgotten(
    process: TaskProcess, database: FakeDatabase
) -> None:
    one = undescribable("task", process)
    process.begin(one, claim=False)
    process.forsake(one)
    assert database.rows == {}
    assert process.attempts() == 0


def test_a_refused_snapshot_does_not_keep_the_lease(
    process: TaskProcess, database: FakeDatabase
) -> None:
    one = claimed(process)
    one.set_progress(60)
    database.refused_progress.add("task")
    process.forsake(one)
    row = database.rows["task"]
    assert is_forsaken(row)
    assert row.progress is None


def test_while_the_database_is_away_it_is_kept_and_not_waited_for(
    process: TaskProcess, database: FakeDatabase
) -> None:
    one = claimed(process)
    one.set_progress(60)
    database.go_away()
    process.forsake(one)
    assert process.attempts() == 1
    database.come_back()
    eventually(lambda: is_forsaken(database.rows["task"]))
    assert database.rows["task"].progress == {"percent": 60}
    eventually(lambda: process.attempts() == 0)


def test_a_locked_row_is_tried_again_with_the_snapshot(
    process: TaskProcess, database: FakeDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = claimed(process)
    one.set_progress(60)
    database.locked.add("task")
    process.forsake(one)
    assert not is_forsaken(database.rows["task"])
    database.locked.clear()
    eventually(lambda: is_forsaken(database.rows["task"]))
    assert database.rows["task"].progress == {"percent": 60}


def test_no_heartbeat_takes_it_back(start_process: StartProcess, database: FakeDatabase) -> None:
    process = start_process(**OFTEN)
    other, one = claimed(process, "other"), claimed(process)
    process.forsake(one)
    beats = database.rows["other"].beats
    eventually(lambda: database.rows["other"].beats > beats + 2)
    assert is_forsaken(database.rows["task"])
    process.end(other, COMPLETED)


def test_if_it_is_struck_in_the_midst_it_can_be_forsaken_again(
    process: TaskProcess, database: FakeDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = claimed(process)

    def strike(*_: object, **__: object) -> None:
        raise TimeoutError

    with monkeypatch.context() as patched:
        patched.setattr(process.database, "post", strike)
        with pytest.raises(TimeoutError):
            process.forsake(one)
    process.forsake(one)
    assert is_forsaken(database.rows["task"])


# Those that die with their process.


def running(process: TaskProcess, count: int = 3) -> list[Attempt]:
    many = [claimed(process, f"task {n}") for n in range(count)]
    for number, one in enumerate(many):
        one.set_progress(number)
    return many


def test_a_dying_process_writes_the_last_snapshots_and_gives_up_its_leases(
    process: TaskProcess, database: FakeDatabase
) -> None:
    running(process)
    assert process.stop(SOON, dying=True)
    rows = list(database.rows.values())
    assert [row.progress for row in rows] == [{"percent": number} for number in range(3)]
    assert all(map(is_forsaken, rows))
    assert database.count("forsake") == 1


def test_a_process_that_stops_in_order_keeps_the_leases(
    process: TaskProcess, database: FakeDatabase
) -> None:
    running(process)
    assert process.stop(SOON)
    assert not any(map(is_forsaken, database.rows.values()))
    assert [row.progress for row in database.rows.values()] == [{"percent": n} for n in range(3)]


def test_what_has_ended_or_has_no_row_is_no_lease_to_give_up(
    process: TaskProcess, database: FakeDatabase
) -> None:
    process.end(claimed(process, "ended"), COMPLETED)
    begin(process, "silent")
    assert process.stop(SOON, dying=True)
    assert database.count("forsake") == 0
    assert list(database.rows) == ["ended"]


def test_what_reported_before_its_claim_is_claimed_and_given_up(
    process: TaskProcess, database: FakeDatabase
) -> None:
    begin(process).set_progress(60)
    assert process.stop(SOON, dying=True)
    assert is_forsaken(database.rows["task"])
    assert database.rows["task"].progress == {"percent": 60}


@pytest.mark.parametrize("fault", ["locked", "refused"])
def test_one_row_does_not_keep_the_other_leases(
    process: TaskProcess, database: FakeDatabase, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    running(process)
    error = RowLocked("locked") if fault == "locked" else StoreRefused("refused")
    forsake = FakeStore.forsake

    def where_one_fails(store: FakeStore, leases: Sequence[Lease]) -> None:
        if database.rows["task 1"].lease in leases:
            raise error
        forsake(store, leases)

    monkeypatch.setattr(FakeStore, "forsake", where_one_fails)
    # What is locked is tried again as long as there is time; what is refused is given up.
    assert process.stop(0.3, dying=True) is (fault == "refused")
    assert [is_forsaken(row) for row in database.rows.values()] == [True, False, True]


def test_after_the_leases_are_given_up_no_heartbeat_takes_that_back(
    start_process: StartProcess, database: FakeDatabase
) -> None:
    process = start_process(**OFTEN)
    running(process, 1)
    # Something that cannot be written holds the stop open.
    database.locked.add("reported")
    done = begin(process, "reported")
    done.set_progress(1)
    process.end(done, COMPLETED)
    stopping = threading.Thread(target=process.stop, args=(SOON,), kwargs={"dying": True})
    stopping.start()
    row = database.rows["task 0"]
    eventually(lambda: is_forsaken(row))
    beats, seen = row.beats, len(database.statements)
    database.until(lambda: len(database.statements) > seen + 20)
    assert (row.beats, is_forsaken(row)) == (beats, True)
    database.locked.clear()
    stopping.join(SOON)
