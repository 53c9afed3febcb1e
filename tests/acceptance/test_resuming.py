"""Loops, steps and checkpoints outside workers, in eager mode, and across versions of the code."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from celery_awa import AwaTask, NotInAttempt
from celery_awa.errors import InvalidProgress
from tests.acceptance.diary import Diary
from tests.acceptance.jobs import Jobs, outcome
from tests.acceptance.workers import FAST, Worker

Start = Callable[..., Worker]
APP = "tests.acceptance.apps.resuming"
_numbers = itertools.count()


@pytest.fixture
def settings(settings: dict[str, Any]) -> dict[str, Any]:
    return {**settings, **FAST}


def direct(client: ModuleType, body: Callable[[Any], Any]) -> Any:
    """Call the body as that of a task, outside any attempt."""

    def run(self: Any) -> Any:  # Celery cannot read the signature of a lambda
        return body(self)

    # Under a name that is taken, Celery would answer the task that has it.
    name = f"direct.{next(_numbers)}"
    return client.app.task(base=AwaTask, bind=True, name=name, shared=False)(run)()


def test_outside_an_attempt_loops_and_steps_just_run(client: ModuleType) -> None:
    def body(self: Any) -> Any:
        done: list[Any] = list(self.iterate(range(3)))
        done += [list(batch) for batch in self.iterate(["abc"], name="b", batch_size=2)]
        with self.step("one") as step:
            done += [step.todo, step.cursor]
        done += self.track(range(2), message=str)
        self.checkpoint_in(object(), {"a": 1})
        return done, self.callback_payload, dict(self.callbacks)

    assert direct(client, body) == ([0, 1, 2, ["abc"], True, None, 0, 1], None, {})


@pytest.mark.parametrize(
    "verb",
    [
        lambda self: self.interrupt(),
        lambda self: self.snooze(1),
        lambda self: self.wait_for_callback(1),
        lambda self: self.callback_token(),
    ],
    ids=["interrupt", "snooze", "wait_for_callback", "callback_token"],
)
def test_outside_an_attempt_nobody_can_leave_off(client: ModuleType, verb: Any) -> None:
    with pytest.raises(NotInAttempt):
        direct(client, verb)


def test_outside_an_attempt_input_is_checked_all_the_same(client: ModuleType) -> None:
    with pytest.raises(InvalidProgress):
        direct(client, lambda self: self.checkpoint_in(object(), {"awa": 1}))
    with pytest.raises(InvalidProgress):
        direct(client, lambda self: self.checkpoint_in(object(), {"a": object()}))
    with pytest.raises(ValueError, match="checkpoint_every"):
        direct(client, lambda self: self.iterate(range(3), checkpoint_every=0))


@pytest.mark.parametrize(
    ("verb", "told"),
    [
        (lambda self: self.snooze(-1), "seconds is -1"),
        (lambda self: self.snooze("5"), "seconds is '5'"),
        (lambda self: self.snooze(float("nan")), "seconds is nan"),
        (lambda self: self.wait_for_callback(0), "timeout is 0"),
        (lambda self: self.wait_for_callback(True), "timeout is True"),
        (lambda self: self.callback_token(name=""), "name is ''"),
        (lambda self: self.callback_token(name="a\ud800"), "name is 'a"),
    ],
)
def test_what_a_verb_does_not_take_is_told_and_the_task_goes_on(
    client: ModuleType, verb: Any, told: str
) -> None:
    def body(self: Any) -> str:
        with pytest.raises(ValueError, match=told):
            verb(self)
        return "went on"

    task = client.app.task(base=AwaTask, bind=True, name="odd", shared=False)(body)
    assert task.apply().get() == "went on"


def test_in_eager_mode_a_task_that_makes_way_goes_on_at_once(client: ModuleType) -> None:
    seen: list[Any] = []

    def body(self: Any) -> str:
        for number in self.iterate(range(6)):
            seen.append(number)
            if number == 2 and not self.checkpoint:
                self.interrupt()
        if "slept" not in self.checkpoint:
            self.update_metadata({"slept": True})
            self.snooze(3600)
        return "done"

    task = client.app.task(base=AwaTask, bind=True, name="eager", shared=False)(body)
    assert task.apply().get() == "done"
    assert seen == [0, 1, 2, 2, 3, 4, 5]


def test_in_eager_mode_a_task_that_waits_for_something_outside_ends(client: ModuleType) -> None:
    def body(self: Any) -> Any:
        self.snooze(30)

    task = client.app.task(base=AwaTask, bind=True, name="eager.polls", shared=False)(body)
    with pytest.raises(NotInAttempt, match="100 times"):
        task.apply().get()


def test_a_task_waits_for_newer_code_before_a_checkpoint_that_such_has_left(
    start: Start, client: ModuleType, jobs: Jobs
) -> None:
    start()
    sent = client.unversioned.delay()
    job = jobs.wait_for(sent.id, "scheduled")
    assert job.metadata == {"line": 7, "awa_version": 1}
    assert job.run_at is not None
    assert 20 < (job.run_at - (job.attempted_at or job.run_at)).total_seconds() < 40


def test_in_eager_mode_nobody_calls_back(client: ModuleType) -> None:
    def body(self: Any) -> Any:
        return self.wait_for_callback(1)

    task = client.app.task(base=AwaTask, bind=True, name="eager.wait", shared=False)(body)
    with pytest.raises(NotInAttempt):
        task.apply().get()


def test_a_checkpoint_of_an_older_version_is_migrated_by_the_task(
    start: Start, client: ModuleType, jobs: Jobs, diary: Diary, database_url: str
) -> None:
    start()
    sent = client.leave_versioned.delay(1)
    found = outcome(sent)
    assert found["checkpoint"] == {"row": 6}
    assert found["progress"]["metadata"] == {"row": 6, "awa_version": 2}


def test_a_checkpoint_that_the_task_does_not_migrate_is_discarded(
    start: Start, client: ModuleType, jobs: Jobs, database_url: str
) -> None:
    start()
    sent = client.leave_versioned.delay(7)
    found = outcome(sent)
    assert found == {"checkpoint": {}, "progress": None}


def test_a_file_goes_on_in_the_middle_after_a_retry(
    start: Start, client: ModuleType, diary: Diary, tmp_path: Path
) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("".join(f"line {number}\n" for number in range(8)))
    start()
    sent = client.read_lines.delay(str(path), 5)
    assert outcome(sent) == "line 7"
    lines = [entry["line"] for entry in diary.entries("line", sent.id)]
    assert lines == [f"line {number}" for number in (0, 1, 2, 3, 4, 5, 5, 6, 7)]
