"""What a cycle sends for all attempts, and what they are told."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import pytest

from celery_awa.errors import StoreUnavailable
from celery_awa.model import Beat, JobState, Lease, Pulse, Snapshot
from celery_awa.runtime import attempt as attempt_module
from celery_awa.runtime import heartbeat as heartbeat_module
from celery_awa.runtime.attempt import Attempt
from celery_awa.runtime.heartbeat import Heartbeat, HeartbeatCounts
from celery_awa.runtime.trouble import Trouble
from celery_awa.settings import Settings
from tests.fake_store import FakeDatabase, FakeStore
from tests.runtime_parts import SOON, Clock, attempt

WRITES = ("heartbeat", "heartbeat_with_progress")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch, heartbeat_module, attempt_module)


class Worker:
    """Claimed attempts and a heartbeat over them."""

    def __init__(self, clock: Clock, **options: Any) -> None:
        self.clock = clock
        self.database = FakeDatabase()
        self.store: FakeStore = self.database.open()
        self.attempts: list[Attempt] = []
        known = {name: options.pop(name) for name in list(options) if name != "always"}
        self.settings = Settings(**known)
        self.heartbeat = Heartbeat(self._beating, self.settings, Trouble(), **options)

    def _beating(self) -> Iterable[Attempt]:
        return list(self.attempts)

    def claim(self, task_id: str = "task") -> Attempt:
        one = attempt(task_id)
        one.claimed(self.store.claim(one.describe(late=False)), self.clock.now)
        self.attempts.append(one)
        return one

    def beat(self, after: float = 0.0, **options: Any) -> HeartbeatCounts:
        """One pass, and forget which statements there were before it."""
        self.clock.pass_by(after)
        self.database.statements.clear()
        return self.heartbeat.run_once(lambda: self.store, **options)

    def percent(self, task_id: str = "task") -> Any:
        return (self.database.rows[task_id].progress or {}).get("percent")

    def beats(self, task_id: str = "task") -> int:
        return self.database.rows[task_id].beats


@pytest.fixture
def worker(clock: Clock) -> Worker:
    return Worker(clock)


def test_nothing_is_due_without_a_lease(worker: Worker) -> None:
    worker.attempts.append(attempt())
    assert worker.heartbeat.due() is None
    assert worker.beat() == HeartbeatCounts()
    assert worker.database.statements == []


def test_a_worker_with_children_looks_every_cycle(clock: Clock) -> None:
    worker = Worker(clock, always=True)
    worker.beat()
    assert worker.heartbeat.due() == clock.now + 2
    assert worker.database.statements == []


def test_what_is_pending_is_written_every_cycle_and_acknowledged(worker: Worker) -> None:
    one = worker.claim()
    for percent in (1, 2, 3):
        one.set_progress(percent)
        assert worker.beat(after=2) == HeartbeatCounts(with_progress=1)
        assert worker.database.statements == ["heartbeat_with_progress"]
        assert worker.percent() == percent
        assert not one.pending
    assert worker.heartbeat.due() == worker.clock.now + 2


def test_without_news_the_heartbeat_comes_alone_when_it_is_due(worker: Worker) -> None:
    worker.claim()
    sent = [bool(worker.beat(after=2).alone) for _ in range(10)]
    # One every five cycles of 2 s, from the claim on, which is as good as a heartbeat.
    assert sent == ([False] * 4 + [True]) * 2


@pytest.mark.parametrize(("write", "beat", "stale"), [(9.9, 10, 20), (3, 10, 20), (0.05, 0.1, 0.2)])
def test_a_long_cycle_does_not_make_a_heartbeat_late(
    clock: Clock, write: float, beat: float, stale: float
) -> None:
    worker = Worker(clock, write_interval=write, heartbeat_interval=beat, stale_after=stale)
    worker.claim()
    last = clock.now
    for _ in range(40):
        if worker.beat(after=write * 1.01).alone:
            assert clock.now - last < stale * 0.8
            last = clock.now


def test_a_cycle_is_never_longer_than_the_heartbeats_interval(clock: Clock) -> None:
    worker = Worker(clock, write_interval=60.0)
    worker.claim()
    worker.beat()
    assert worker.heartbeat.due() == clock.now + 10
    assert worker.beat(after=10).alone == 1


def test_six_hundred_attempts_take_two_statements(worker: Worker) -> None:
    many = [worker.claim(f"task {n}") for n in range(600)]
    worker.beat()
    for one in many[::2]:
        one.set_progress(50)
    assert worker.beat(after=10) == HeartbeatCounts(with_progress=300, alone=300)
    assert worker.database.statements == ["heartbeat_with_progress", "heartbeat"]
    assert all(row.beats == 1 for row in worker.database.rows.values())


def test_any_number_of_reports_is_one_statement_a_cycle(worker: Worker) -> None:
    one = worker.claim()
    for _ in range(5):
        for number in range(2_000):
            one.set_progress(number % 100)
        worker.beat(after=2)
        assert worker.database.statements == ["heartbeat_with_progress"]
        assert worker.percent() == 99


def test_one_refused_snapshot_costs_the_others_nothing(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    many = [worker.claim(f"task {n}") for n in range(10)]
    worker.database.refused_progress.add("task 6")
    for one in many:
        one.set_progress(7)
    worker.beat()
    assert [worker.percent(f"task {n}") for n in range(10)] == [7] * 6 + [None] + [7] * 3
    assert all(row.beats == 1 for row in worker.database.rows.values())
    assert [one.pending for one in many] == [n == 6 for n in range(10)]
    assert "refused the progress" in caplog.text
    # It is not sent again until there is something new of it.
    assert worker.beat(after=2) == HeartbeatCounts()
    worker.database.refused_progress.clear()
    many[6].set_progress(8)
    worker.beat(after=2)
    assert worker.percent("task 6") == 8


def test_a_row_that_takes_no_update_costs_the_others_nothing(worker: Worker) -> None:
    many = [worker.claim(f"task {n}") for n in range(10)]
    worker.database.refused.add("task 3")
    worker.beat()
    counts = worker.beat(after=10)
    assert (counts.alone, counts.skipped, counts.lost) == (10, 1, 0)
    assert [worker.beats(f"task {n}") for n in range(10)] == [int(n != 3) for n in range(10)]
    assert not many[3].lost


@pytest.mark.parametrize("news", [True, False])
def test_a_locked_row_is_left_out_and_not_taken_for_lost(worker: Worker, news: bool) -> None:
    many = [worker.claim(f"task {n}") for n in range(10)]
    worker.beat()
    worker.database.locked.add("task 4")
    for one in many if news else []:
        one.set_progress(7)
    counts = worker.beat(after=10)
    assert (counts.skipped, counts.lost) == (1, 0)
    assert [worker.beats(f"task {n}") for n in range(10)] == [int(n != 4) for n in range(10)]
    assert not many[4].lost
    worker.database.locked.clear()
    worker.beat(after=2)
    assert worker.beats("task 4") == 1


def test_a_locked_row_and_a_refused_one_at_once_cost_the_others_nothing(worker: Worker) -> None:
    many = [worker.claim(f"task {n}") for n in range(10)]
    worker.database.locked.add("task 2")
    worker.database.refused_progress.add("task 7")
    for one in many:
        one.set_progress(7)
    worker.beat()
    assert [worker.beats(f"task {n}") for n in range(10)] == [int(n != 2) for n in range(10)]
    assert [worker.percent(f"task {n}") for n in range(10)] == [
        None if n in (2, 7) else 7 for n in range(10)
    ]
    assert not any(one.lost for one in many)


def test_a_lease_that_is_gone_is_told_once_and_not_sent_again(worker: Worker) -> None:
    one, other = worker.claim(), worker.claim("other")
    worker.database.rows["task"].run_lease += 1
    one.set_progress(50)
    other.set_progress(50)
    assert worker.beat().lost == 1
    assert one.lost
    assert one.pending  # nothing was confirmed
    assert worker.percent() is None
    one.set_progress(60)
    assert worker.beat(after=10) == HeartbeatCounts(alone=1)


def test_a_row_that_is_locked_and_gone_is_gone(worker: Worker) -> None:
    one, other = worker.claim(), worker.claim("other")
    worker.database.locked.add("other")
    worker.database.rows["task"].state = JobState.COMPLETED
    worker.beat()
    counts = worker.beat(after=10)
    assert (counts.lost, counts.skipped) == (1, 1)
    assert (one.lost, other.lost) == (True, False)


def test_an_older_snapshot_is_neither_written_nor_a_lost_lease(worker: Worker) -> None:
    one = worker.claim()
    one.set_progress(10)
    worker.database.rows["task"].write(Snapshot(5, '{"percent": 55}'))
    assert worker.beat() == HeartbeatCounts(with_progress=1)
    assert worker.percent() == 55
    assert not one.lost
    assert one.acknowledged() == 5


def test_a_snapshot_taken_before_a_flush_and_sent_after_it_does_not_undo_it(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = worker.claim()
    one.set_progress(10)
    lease = worker.database.rows["task"].lease
    send = worker.store.heartbeat_with_progress

    def after_a_flush(beats: list[Beat], *, skip_locked: bool = False) -> dict[Lease, Pulse]:
        monkeypatch.undo()
        one.set_progress(20)
        send([Beat(lease, one.snapshot())])
        return send(beats, skip_locked=skip_locked)

    with monkeypatch.context() as patched:
        patched.setattr(worker.store, "heartbeat_with_progress", after_a_flush)
        worker.heartbeat.run_once(lambda: worker.store)
    assert worker.percent() == 20
    assert not one.pending


def test_a_heartbeat_that_races_the_end_brings_no_running_row_back(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    one = worker.claim()
    one.set_progress(10)
    row = worker.database.rows["task"]
    row.state = JobState.COMPLETED
    worker.beat()
    assert (row.state, row.progress, row.beats) == (JobState.COMPLETED, None, 0)
    assert caplog.records == []


def test_nothing_is_acknowledged_or_lost_when_the_database_fails(worker: Worker) -> None:
    one = worker.claim()
    one.set_progress(10)
    worker.database.raising["heartbeat_with_progress"] = StoreUnavailable("cut")
    with pytest.raises(StoreUnavailable):
        worker.beat()
    assert (one.pending, one.lost) == (True, False)
    assert worker.heartbeat.due() == worker.clock.now + 2
    worker.database.raising.clear()
    worker.beat(after=2)
    assert worker.percent() == 10


@pytest.mark.parametrize(("size", "cycles"), [(1_000, 1), (8_000, 1), (17_000, 2), (60_000, 5)])
def test_large_snapshots_are_written_more_rarely(worker: Worker, size: int, cycles: int) -> None:
    one = worker.claim()
    one.update_metadata({"large": "x" * size})
    worker.beat()
    written = []
    for number in range(1, 11):
        one.set_progress(number)
        written.append(bool(worker.beat(after=2).with_progress))
    assert written == ([False] * (cycles - 1) + [True]) * (10 // cycles)


def test_a_large_snapshot_that_waits_does_not_hold_up_the_heartbeat(clock: Clock) -> None:
    worker = Worker(clock, write_interval=10.0, stale_after=100.0)
    one = worker.claim()
    one.update_metadata({"large": "x" * 60_000})
    worker.beat()
    one.set_progress(1)
    assert worker.beat(after=9.9) == HeartbeatCounts(alone=1)


def test_the_last_heartbeat_writes_everything(worker: Worker) -> None:
    large, silent = worker.claim("large"), worker.claim("silent")
    large.update_metadata({"large": "x" * 60_000})
    worker.beat()
    large.set_progress(99)
    assert worker.beat(last=True) == HeartbeatCounts(with_progress=1, alone=1)
    assert worker.percent("large") == 99
    assert worker.beats("silent") == 1
    assert not silent.pending


def test_the_confirmed_heartbeat_is_dated_by_its_sending(worker: Worker) -> None:
    one = worker.claim()
    worker.clock.pass_by(7)
    one.set_progress(1)
    sent_at = worker.clock.now
    send = worker.store.heartbeat_with_progress

    def slowly(beats: list[Beat], *, skip_locked: bool = False) -> dict[Lease, Pulse]:
        worker.clock.pass_by(5)
        return send(beats, skip_locked=skip_locked)

    worker.store.heartbeat_with_progress = slowly  # type: ignore[method-assign]
    worker.beat()
    assert one.confirmed_at == sent_at


def test_an_attempt_that_begins_anew_under_its_token_is_beaten_for_again(worker: Worker) -> None:
    one = worker.claim()
    worker.database.rows["task"].run_lease += 1
    worker.beat()
    worker.beat(after=10)
    assert one.lost
    again = worker.claim("again")
    again.token = one.token
    again.set_progress(5)
    worker.beat(after=2)
    assert worker.percent("again") == 5


def test_reports_from_another_thread_during_the_cycles_are_all_seen_in_the_end(
    worker: Worker,
) -> None:
    one = worker.claim()
    done = threading.Event()

    def report() -> None:
        for number in range(20_000):
            one.set_progress(current=number, total=20_000)
        done.set()

    threading.Thread(target=report).start()
    cycles = 0
    while not done.wait(0.001):
        worker.beat(after=2)
        cycles += 1
        assert worker.database.count(*WRITES) <= 1
    assert done.wait(SOON)
    worker.beat(after=2)
    assert worker.database.rows["task"].progress["current"] == 19_999
    assert not one.pending
