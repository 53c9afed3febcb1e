"""When attempts get their row, and which of them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from celery_awa.errors import StoreUnavailable
from celery_awa.model import JobState, Verdict
from celery_awa.runtime import attempt as attempt_module
from celery_awa.runtime import claims as claims_module
from celery_awa.runtime.attempt import Attempt
from celery_awa.runtime.claims import LOCKED_PAUSE, Claims
from celery_awa.runtime.in_flight import InFlight
from celery_awa.runtime.trouble import Trouble
from celery_awa.settings import Settings
from tests.fake_store import FakeDatabase, FakeStore
from tests.runtime_parts import Clock, attempt, described, undescribable


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch, claims_module, attempt_module)


@pytest.fixture
def store(database: FakeDatabase) -> FakeStore:
    return database.open()


class Running:
    """Attempts in flight and the claims for them."""

    def __init__(self, store: FakeStore, **settings: float) -> None:
        self.store = store
        self.settings = Settings(**settings)  # type: ignore[arg-type]
        self.in_flight = InFlight()
        self.claims = Claims(self.in_flight, self.settings, Trouble())

    def add(self, one: Attempt) -> Attempt:
        one.claim_due = one.started_at + self.settings.claim_after
        self.in_flight.add(one)
        return one

    def run(self, **options: Any) -> int:
        return self.claims.run_once(lambda: self.store, **options)


@pytest.fixture
def running(store: FakeStore, clock: Clock) -> Running:
    return Running(store)


def test_nothing_is_claimed_before_it_ran_for_a_while(running: Running, clock: Clock) -> None:
    one = running.add(attempt())
    assert running.claims.due() == clock.now + 1
    clock.pass_by(0.99)
    assert running.run() == 0
    clock.pass_by(0.01)
    assert running.run() == 1
    assert one.claim is not None
    assert one.claim.verdict is Verdict.YOURS
    assert running.claims.due() is None


def test_without_attempts_nothing_is_due(running: Running) -> None:
    assert running.claims.due() is None


def test_who_reported_is_claimed_at_the_next_cycle(store: FakeStore, clock: Clock) -> None:
    running = Running(store, claim_after=100.0, write_interval=2.0)
    silent, late = running.add(attempt("silent")), running.add(attempt("late"))
    # Reporting wakes nobody, so it is looked for every cycle.
    for _ in range(3):
        assert running.claims.due() == clock.now + 2
        clock.pass_by(2)
        assert running.run() == 0
    late.set_progress(1)
    assert running.claims.due() <= clock.now
    assert running.run() == 1
    assert late.lease is not None
    assert silent.claim is None
    assert running.claims.due() == clock.now + 2


def test_who_reported_in_its_first_cycle_is_claimed_at_the_end_of_it(
    store: FakeStore, clock: Clock
) -> None:
    running = Running(store, claim_after=100.0, write_interval=2.0)
    one = running.add(attempt())
    one.set_progress(1)
    clock.pass_by(1.9)
    assert running.run() == 0
    clock.pass_by(0.1)
    assert running.run() == 1


def test_many_attempts_are_claimed_in_one_pass(
    running: Running, clock: Clock, database: FakeDatabase
) -> None:
    many = [running.add(attempt(f"task {n}")) for n in range(200)]
    clock.pass_by(1)
    assert running.run() == 200
    assert len({one.lease for one in many}) == 200


def test_two_attempts_of_one_task_get_two_leases(running: Running, clock: Clock) -> None:
    first, second = attempt(redelivered=True), attempt(retries=1)
    for one in (first, second):
        running.add(one)
    clock.pass_by(1)
    running.run()
    assert first.lease is not None
    assert second.lease is not None
    assert second.lease.run_lease == first.lease.run_lease + 1


def test_a_locked_row_holds_up_no_other_and_is_tried_again(
    running: Running, clock: Clock, database: FakeDatabase
) -> None:
    locked = running.add(attempt("locked"))
    others = [running.add(attempt(f"task {n}")) for n in range(3)]
    database.locked.add("locked")
    clock.pass_by(1)
    running.run()  # gives up after the lock: half a second went by, errands wait
    running.run()
    assert all(one.lease for one in others)
    assert database.count("claim") == 4
    assert running.claims.due() == clock.now + LOCKED_PAUSE
    database.locked.clear()
    clock.pass_by(LOCKED_PAUSE)
    assert running.run() == 1
    assert locked.lease is not None


def test_a_locked_row_of_who_reported_is_not_tried_without_a_pause(
    running: Running, clock: Clock, database: FakeDatabase
) -> None:
    locked = running.add(attempt("locked"))
    locked.set_progress(1)
    database.locked.add("locked")
    clock.pass_by(5)
    for _ in range(3):
        running.run()
    assert database.count("claim") == 1
    assert running.claims.due() == clock.now + LOCKED_PAUSE


def test_a_claim_that_fails_comes_last_the_next_time(
    running: Running, clock: Clock, database: FakeDatabase
) -> None:
    first, second = running.add(attempt("first")), running.add(attempt("second"))
    clock.pass_by(1)
    claim = running.store.claim

    def fail_first(new: Any) -> Any:
        if new.task_id == "first":
            raise StoreUnavailable("a statement that takes too long")
        return claim(new)

    running.store.claim = fail_first  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            running.run()
    assert second.lease is not None
    assert first.claim is None


def test_a_refused_attempt_runs_without_a_row(
    running: Running,
    clock: Clock,
    database: FakeDatabase,
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = running.add(attempt("refused"))
    database.refused.add("refused")
    clock.pass_by(1)
    running.run()
    assert one.unclaimable == "refused: refused"
    assert running.claims.due() is None
    running.run()
    assert database.count("claim") == 1
    assert "runs without a row" in caplog.text


def test_an_attempt_that_cannot_be_described_holds_up_no_other(
    running: Running, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    broken, sound = running.add(undescribable("broken")), running.add(attempt("sound"))
    clock.pass_by(1)
    running.run()
    assert sound.lease is not None
    assert broken.unclaimable is not None
    assert running.claims.due() is None
    assert "cannot be described" in caplog.text


def test_who_ended_is_not_claimed(running: Running, clock: Clock, database: FakeDatabase) -> None:
    one = running.add(attempt())
    one.ended = True
    clock.pass_by(1)
    assert running.claims.due() is None
    running.run()
    running.claims.claim(running.store, one, late=True)
    assert database.statements == []


def test_a_claim_marks_itself_before_it_looks_whether_the_attempt_ended(
    running: Running, database: FakeDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else an end that looks between the two would not know of it: a running ghost."""
    one = running.add(attempt())
    seen: list[bool] = []
    monkeypatch.setattr(
        Attempt,
        "ended",
        property(lambda self: seen.append(self.claim_sent) or False),
        raising=False,
    )
    running.claims.claim(running.store, one, late=True)
    assert seen
    assert all(seen)


def test_with_last_all_who_reported_are_claimed(running: Running, database: FakeDatabase) -> None:
    reported, silent = running.add(attempt("reported")), running.add(attempt("silent"))
    reported.set_progress(1)
    assert running.run(last=True) == 1
    assert reported.lease is not None
    assert silent.claim is None


def test_what_was_kept_is_laid_under_what_was_reported(
    running: Running, clock: Clock, database: FakeDatabase
) -> None:
    running.store.claim(described("earlier"))
    row = database.rows["task"]
    row.progress = {"percent": 30, "message": "old", "metadata": {"kept": 1, "both": 1}}
    row.state = JobState.RETRYABLE
    one = running.add(attempt(retries=1))
    one.update_metadata({"both": 2})
    clock.pass_by(1)
    running.run()
    assert one.buffer.value() == {
        "percent": 30,
        "message": "old",
        "metadata": {"kept": 1, "both": 2},
    }
    assert dict(one.checkpoint) == {"kept": 1, "both": 1}
    assert (one.number, one.pending) == (2, True)


def test_what_was_kept_is_not_pending(
    running: Running, clock: Clock, database: FakeDatabase
) -> None:
    running.store.claim(described("earlier"))
    database.rows["task"].progress = {"metadata": {"kept": 1}}
    one = running.add(attempt(retries=1))
    clock.pass_by(1)
    running.run()
    assert one.buffer.value() == {"metadata": {"kept": 1}}
    assert not one.pending


@pytest.mark.parametrize("progress", [[1], "text", 7, {"metadata": [1]}, {"metadata": "x"}])
def test_progress_that_was_edited_into_something_else_is_no_checkpoint(
    running: Running, clock: Clock, database: FakeDatabase, progress: Any
) -> None:
    running.store.claim(described("earlier"))
    database.rows["task"].progress = progress
    one = running.add(attempt(retries=1))
    clock.pass_by(1)
    running.run()
    assert one.lease is not None
    assert dict(one.checkpoint) == {}


def test_what_was_reported_before_the_claim_and_is_too_large_is_told(
    running: Running,
    clock: Clock,
    database: FakeDatabase,
    caplog: pytest.LogCaptureFixture,
) -> None:
    running.store.claim(described("earlier"))
    database.rows["task"].progress = {"metadata": {"kept": "x" * 40_000}}
    one = running.add(attempt(retries=1))
    one.update_metadata({"new": "y" * 40_000})
    clock.pass_by(1)
    running.run()
    assert "too large together" in caplog.text
    assert set(one.checkpoint) == {"kept"}


@pytest.mark.parametrize(
    ("state", "verdict"),
    [(JobState.COMPLETED, Verdict.FINISHED), (JobState.RUNNING, Verdict.HELD)],
)
def test_an_attempt_whose_row_is_not_its_own_has_lost_its_lease(
    running: Running, clock: Clock, database: FakeDatabase, state: JobState, verdict: Verdict
) -> None:
    running.store.claim(described("another"))
    database.rows["task"].state = state
    if verdict is Verdict.HELD:
        database.rows["task"].began_at = math.inf
    one = running.add(attempt())
    clock.pass_by(1)
    running.run()
    assert one.claim is not None
    assert one.claim.verdict is verdict
    assert (one.lost, one.lease) == (True, None)


def test_a_claim_whose_answer_was_lost_is_repeated_for_the_same_lease(
    running: Running, clock: Clock, database: FakeDatabase
) -> None:
    one = running.add(attempt())
    database.unanswered.append("claim")
    clock.pass_by(1)
    with pytest.raises(StoreUnavailable):
        running.run()
    running.store = database.open()
    running.run()
    assert one.lease == database.rows["task"].lease
    assert one.lease.run_lease == 1
