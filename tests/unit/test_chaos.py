"""The chaos command's own parts: its scripts repeat, and its checks find what is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chaos import checks, faults
from tests.chaos.script import FAULTS, Job, draw

LATE = Job("late", steps=5, pause=0.1, retry_at=None)
EARLY = Job("early", steps=5, pause=0.1, retry_at=None)
ONCE = Job("once", steps=5, pause=0.1, retry_at=None)


class Result:
    """What the result backend says of a task."""

    def __init__(self, state: str = "SUCCESS", result: str = "second") -> None:
        self.state = state
        self.result = result


def row(**fields: Any) -> dict[str, Any]:
    """A completed job's row, but for these columns."""
    completed = {"state": "completed", "attempt_token": "second", "progress": None, "errors": []}
    return completed | fields


def entry(what: str, done: int, lease: int) -> dict[str, Any]:
    return {"what": what, "done": done, "lease": lease}


def found(
    job: Job = LATE,
    stored: dict[str, Any] | None = None,
    result: Any = None,
    entries: list[dict[str, Any]] | None = None,
    could_ask: bool = True,
) -> list[str]:
    return list(checks.of_task(stored, result or Result(), job, entries or [], could_ask=could_ask))


def test_a_seed_draws_the_same_rounds_again_and_another_seed_others() -> None:
    rounds = [draw(7, number) for number in range(50)]
    assert [draw(7, number) for number in range(50)] == rounds
    assert [draw(8, number) for number in range(50)] != rounds
    # A round does not depend on those before it, so it can be repeated alone.
    assert draw(7, 49) == rounds[49]


def test_all_that_can_be_broken_is_drawn_and_can_be_broken() -> None:
    drawn = {fault.name for number in range(500) for fault in draw(1, number).faults}
    assert drawn == FAULTS.keys() == faults._ON_WORKERS.keys() | faults._ON_NETWORK.keys()


def test_nothing_is_wrong_with_a_task_that_ended_as_it_should() -> None:
    entries = [entry("began", 0, 1), entry("confirmed", 3, 1), entry("began", 4, 2)]
    assert found(stored=row(), entries=entries) == []


def test_without_acks_late_a_task_may_be_lost_before_it_began_and_no_later() -> None:
    assert checks.settled(None, EARLY, checks.NO_ROW_AFTER + 1)
    assert not checks.settled(None, LATE, checks.NO_ROW_AFTER + 1)
    assert found(EARLY, None, Result("PENDING"), entries=[]) == []
    assert found(EARLY, None, Result("PENDING"), entries=[entry("began", 0, 1)]) != []


@pytest.mark.parametrize(
    ("job", "stored", "result"),
    [
        (LATE, None, Result("PENDING")),
        (LATE, row(state="failed"), Result("FAILURE")),
        (
            EARLY,
            row(state="failed", errors=[{"error": "WorkerLostError: died"}]),
            Result("FAILURE"),
        ),
        (LATE, row(), Result("FAILURE")),
        (LATE, row(), Result(result="first")),
        (LATE, row(progress={"percent": 1}), Result()),
        (ONCE, row(state="failed"), Result("SUCCESS")),
    ],
    ids=[
        "no row",
        "failed though it may run again",
        "failed without a verdict of Celery's",
        "another result",
        "the result of an attempt without the lease",
        "progress after success",
        "a result against the policy's end",
    ],
)
def test_a_task_that_is_not_as_it_should_be_is_found(
    job: Job, stored: dict[str, Any] | None, result: Result
) -> None:
    assert found(job, stored, result)


def test_a_failure_by_policy_or_by_celerys_verdict_is_none() -> None:
    verdict = "WorkerLostError: Worker exited prematurely: signal 9 (SIGKILL) Job: 1."
    failed = row(state="failed", errors=[{"error": verdict}])
    assert found(EARLY, failed, Result("FAILURE")) == []
    assert found(ONCE, row(state="failed"), Result("FAILURE")) == []
    assert found(ONCE, None, Result("PENDING")) == []


def test_an_attempt_that_begins_behind_a_confirmed_flush_is_found() -> None:
    entries = [entry("began", 0, 1), entry("confirmed", 3, 1), entry("began", 2, 2)]
    assert found(stored=row(), entries=entries) == ["lease 2 began at 2 behind 3"]


def test_two_attempts_under_one_lease_are_found() -> None:
    entries = [entry("began", 0, 1), entry("began", 0, 1)]
    assert found(stored=row(), entries=entries) == ["two attempts had the same lease: [1, 1]"]


@pytest.mark.parametrize(("beats", "wrong"), [(2, 0), (3, 1)])
def test_more_than_two_heartbeats_a_cycle_are_found(beats: int, wrong: int) -> None:
    lines = [
        f"2026-01-01 00:00:{cycle * checks.WRITE_INTERVAL:06.3f} UTC [7] LOG:  a.heartbeat(1)"
        for cycle in range(100)
        for _ in range(beats)
    ]
    assert len(list(checks.of_statements("\n".join(lines)))) == wrong


def test_flushes_of_a_pool_child_are_no_heartbeats() -> None:
    flushes = ["2026-01-01 00:00:00.000 UTC [7] LOG:  SELECT * FROM a.heartbeat_with_progress(1)"]
    claim = ["2026-01-01 00:00:00.000 UTC [7] LOG:  SELECT * FROM a.claim(1)"]
    assert list(checks.of_statements("\n".join(claim + 50 * flushes))) == []
