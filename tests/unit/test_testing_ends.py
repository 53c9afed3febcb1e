"""celery_awa.testing: how an attempt may end, and what the next one finds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from celery_awa.errors import InvalidProgress, ProgressTooLarge
from celery_awa.model import JobState
from celery_awa.testing import crash, run_task

from . import testing_tasks as tasks
from .testing_tasks import diary


@pytest.fixture(autouse=True)
def _empty_diary() -> Iterator[None]:
    yield
    diary.empty()


def test_a_checkpoint_is_what_the_task_begins_with() -> None:
    run = run_task(tasks.by_hand, 4, checkpoint={"last": 2})
    assert run.result == 4
    assert diary.lines == [3, 4, ("flushed", True)]
    assert (run.percent, run.message, run.flushes) == (100, "row 4", 1)


def test_a_checkpoint_may_be_that_of_a_run() -> None:
    kept = run_task(tasks.loop, 6, interrupt_after=4).checkpoint
    diary.lines.clear()
    assert run_task(tasks.loop, 6, checkpoint=kept).result == 6
    assert diary.lines == [4, 5]


@pytest.mark.parametrize("checkpoint", [{"a": {1, 2}}, {1: 2}, [("a", 1)]])
def test_a_checkpoint_is_checked(checkpoint: Any) -> None:
    with pytest.raises(InvalidProgress, match="metadata"):
        run_task(tasks.by_hand, 4, checkpoint=checkpoint)
    assert diary.lines == []


def test_a_checkpoint_has_the_apps_limit() -> None:
    with pytest.raises(ProgressTooLarge):
        run_task(tasks.by_hand, 4, checkpoint={"a": "x" * 10_000})


def test_a_failure_keeps_the_checkpoint_and_can_be_resumed() -> None:
    diary.call = lambda line: 1 / 0 if line == 3 else None
    run = run_task(tasks.by_hand, 4)
    assert (run.state, run.result, run.checkpoint) == (JobState.FAILED, None, {"last": 2})
    assert isinstance(run.error, ZeroDivisionError)
    diary.call = lambda line: None
    again = run.resume()
    assert (again.state, again.attempt, again.error) == (JobState.COMPLETED, 2, None)


def test_a_failure_is_the_tasks_own_exception() -> None:
    raised = OSError("away")
    raised.exc = "not this"  # type: ignore[attr-defined]  # as some libraries name a cause

    def fail(line: Any) -> None:
        raise raised

    diary.call = fail
    assert run_task(tasks.loop, 1).error is raised


def test_a_chain_of_retries_keeps_and_counts() -> None:
    first = run_task(tasks.retried, 2)
    assert (first.state, first.run_in, first.attempt) == (JobState.RETRYABLE, 7, 1)
    assert isinstance(first.error, OSError)
    second = first.resume()
    assert (second.state, second.checkpoint) == (JobState.RETRYABLE, {"try 0": 1, "try 1": 2})
    third = second.resume()
    assert (third.state, third.result) == (JobState.COMPLETED, {"try 0": 1, "try 1": 2})


def test_exhausted_retries_fail_with_their_error() -> None:
    run = run_task(tasks.retried, 5)
    while run.state is JobState.RETRYABLE:
        run = run.resume()
    assert (run.state, run.attempt) == (JobState.FAILED, 3)
    assert isinstance(run.error, OSError)
    assert run.checkpoint == {"try 0": 1, "try 1": 2, "try 2": 3}


def test_celerys_own_retries_are_retries() -> None:
    first = run_task(tasks.retried_by_celery)
    assert (first.state, first.run_in) == (JobState.RETRYABLE, 4)
    second = first.resume()
    assert (second.state, second.run_in) == (JobState.RETRYABLE, 8)
    assert second.resume().result == 2


def test_a_retry_may_change_the_arguments() -> None:
    run = run_task(tasks.retried_with_others, "first")
    assert (run.state, run.resume().result) == (JobState.RETRYABLE, "second")


def test_a_crash_of_a_retry_is_followed_by_that_retry() -> None:
    retry = run_task(tasks.retried, 1)
    diary.call = lambda line: crash()
    crashed = retry.resume()
    assert (crashed.state, crashed.attempt) == (JobState.RUNNING, 2)
    diary.call = lambda line: None
    again = crashed.resume()
    assert (again.state, again.attempt) == (JobState.COMPLETED, 3)
    assert diary.lines == [0, 1, 1]


def test_a_snooze_does_not_count() -> None:
    run = run_task(tasks.snoozing)
    assert (run.state, run.run_in, run.attempt) == (JobState.SCHEDULED, 60, 1)
    assert run.checkpoint == {"slept": True}
    again = run.resume()
    assert (again.result, again.attempt) == ("awake", 1)


def test_a_wait_goes_on_with_its_payload() -> None:
    first = run_task(tasks.asking)
    assert first.state is JobState.WAITING_EXTERNAL
    assert first.callback_token == diary.lines[0]
    second = first.resume(payload={"paid": [1, None]})
    assert second.state is JobState.WAITING_EXTERNAL
    assert second.callback_token == diary.lines[1] != first.callback_token
    third = second.resume(payload=None)
    assert (third.result, third.callback_token) == ([{"paid": [1, None]}, None], None)


def test_a_payload_is_wanted_just_where_a_callback_is() -> None:
    waiting = run_task(tasks.asking)
    with pytest.raises(ValueError, match=r"give resume\(\) the payload"):
        waiting.resume()
    with pytest.raises(InvalidProgress, match="payload"):
        waiting.resume(payload={1})
    with pytest.raises(ValueError, match=r"no callback is expected.*the job is scheduled"):
        run_task(tasks.snoozing).resume(payload=1)


def test_a_callback_may_come_after_a_crash_too() -> None:
    diary.call = lambda line: crash()
    run = run_task(tasks.asking)
    assert (run.state, run.callback_token) == (JobState.RUNNING, diary.lines[0])
    diary.call = lambda line: None
    assert run.resume(payload="yes").state is JobState.WAITING_EXTERNAL
    assert len(diary.lines) == 2  # it was not asked for again


def test_only_a_job_that_waits_or_whose_worker_died_expects_its_callback() -> None:
    run = run_task(tasks.asking_again)
    assert (run.state, run.callback_token) == (JobState.AVAILABLE, None)
    with pytest.raises(ValueError, match="no callback is expected"):
        run.resume(payload=1)


def test_who_asks_again_what_was_answered_is_told() -> None:
    waiting = run_task(tasks.asking_again, checkpoint={"asked": 1})
    assert waiting.state is JobState.WAITING_EXTERNAL
    asked = waiting.resume(payload="yes")
    assert asked.state is JobState.FAILED
    assert isinstance(asked.error, ValueError)
    assert "was answered in this run" in str(asked.error)


@pytest.mark.parametrize(
    ("how", "state"),
    [
        ("ignore", JobState.CANCELLED),
        ("reject", JobState.FAILED),
        ("requeue", JobState.AVAILABLE),
    ],
)
def test_celerys_other_ends_keep_the_checkpoint(how: str, state: JobState) -> None:
    run = run_task(tasks.ending, how)
    assert (run.state, run.checkpoint) == (state, {"kept": 1})


def test_a_replaced_task_leaves_nothing() -> None:
    run = run_task(tasks.replaced)
    assert (run.state, run.checkpoint) == (JobState.AVAILABLE, {})
    assert run.replacement is not None
    with pytest.raises(RuntimeError, match=r"the task was replaced by .*loop"):
        run.resume()
    assert run_task(run.replacement).result == 3


def test_a_completed_run_cannot_be_resumed() -> None:
    with pytest.raises(RuntimeError, match="the run is completed"):
        run_task(tasks.loop, 1).resume()


@pytest.mark.parametrize(
    ("version", "found"),
    [
        (None, {"line": 5, "awa_version": 2}),
        (2, {"line": 5, "awa_version": 2}),
        (1, {"row": 4}),
        (0, {}),
    ],
)
def test_a_checkpoint_of_other_code_is_migrated_or_discarded(version: Any, found: Any) -> None:
    run = run_task(tasks.versioned, checkpoint={"line": 5}, checkpoint_version=version)
    assert diary.lines == [found]
    assert run.checkpoint == {**found, "seen": True, "awa_version": 2}
    assert run.resume().checkpoint == run.checkpoint


def test_a_checkpoint_that_cannot_be_migrated_stays_as_it_is() -> None:
    run = run_task(tasks.unmigratable, checkpoint={"row": 5}, checkpoint_version=0)
    assert (run.state, run.checkpoint) == (JobState.FAILED, {"row": 5})
    assert isinstance(run.error, KeyError)


@pytest.mark.parametrize("version", [-1, True, "1"])
def test_a_version_is_checked(version: Any) -> None:
    with pytest.raises(ValueError, match=r"checkpoint_version is .*whole number from 0 on"):
        run_task(tasks.versioned, checkpoint_version=version)


@pytest.mark.parametrize(
    ("policy", "state"), [("requeue", JobState.RETRYABLE), ("fail", JobState.FAILED)]
)
def test_an_attempt_past_its_deadline_is_treated_by_its_policy(
    policy: str, state: JobState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks.loop, "lost_policy", policy)
    monkeypatch.setattr(tasks.loop, "deadline", 1e-9)
    run = run_task(tasks.loop, 3)
    assert (run.state, diary.lines) == (state, [])
