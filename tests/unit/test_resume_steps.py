"""Steps: done once each, in one order, with a cursor by hand or by their loops."""

from __future__ import annotations

from typing import Any

import pytest

from celery_awa.errors import CheckpointMismatch, InvalidProgress
from celery_awa.model import StopReason
from celery_awa.resume.resumption import Resumption
from celery_awa.resume.stops import Interrupt

from .resume_attempt import FakeAttempt, Killed, Records, Run


@pytest.fixture
def run() -> Run:
    return Run()


def do(attempt: FakeAttempt, *names: str, fail_in: str | None = None) -> list[str]:
    """Run these steps; which of them were to be done."""
    done = []
    for name in names:
        with attempt.resumption.step(name) as step:
            if step.todo:
                done.append(name)
                if name == fail_in:
                    raise Killed
    return done


def test_a_finished_step_is_not_done_again(run: Run) -> None:
    with pytest.raises(Killed):
        do(run.attempt(), "a", "b", "c", fail_in="b")
    assert run.steps() == {"names": ["a", "b"], "finished": 1}
    assert do(run.attempt(), "a", "b", "c") == ["b", "c"]
    assert do(run.attempt(), "a", "b", "c") == []


def test_new_steps_at_the_end_are_done(run: Run) -> None:
    do(run.attempt(), "a")
    assert do(run.attempt(), "a", "b") == ["b"]


@pytest.mark.parametrize(
    ("code", "known", "met"),
    [(("b", "a"), "a", "b"), (("a", "c"), "b", "c"), (("x", "a", "b", "c"), "a", "x")],
)
def test_other_steps_than_are_known_are_told_with_both_names(
    run: Run, code: tuple[str, ...], known: str, met: str
) -> None:
    with pytest.raises(Killed):
        do(run.attempt(), "a", "b", "c", fail_in="c")
    with pytest.raises(CheckpointMismatch, match=rf"'{known}'.*'{met}'.*checkpoint_version"):
        do(run.attempt(), *code)
    assert do(run.attempt(), "a", "b", "c") == ["c"]


def test_a_step_that_does_not_ask_is_told_at_its_first_run(run: Run) -> None:
    with pytest.raises(RuntimeError, match=r"if step\.todo"), run.attempt().resumption.step("a"):
        pass
    assert run.steps()["finished"] == 0


def test_steps_do_not_nest(run: Run) -> None:
    resumption = run.attempt().resumption
    with pytest.raises(RuntimeError, match="nest"), resumption.step("a"), resumption.step("b"):
        pass


def test_a_name_is_used_once_an_attempt(run: Run) -> None:
    attempt = run.attempt()
    with pytest.raises(RuntimeError, match="second step"):
        do(attempt, "a", "a")


def test_no_step_begins_after_one_that_is_unfinished(run: Run) -> None:
    attempt = run.attempt()
    with pytest.raises(Killed):
        do(attempt, "a", fail_in="a")
    with pytest.raises(RuntimeError, match="'a' was left"):
        do(attempt, "b")


def test_a_step_inside_a_loop_is_told_when_that_goes_on(run: Run) -> None:
    attempt = run.attempt()
    rows = attempt.resumption.iterate(range(2))
    next(rows)
    do(attempt, "a")
    with pytest.raises(RuntimeError, match=r"'a'.*inside the loop 'items'"):
        next(rows)


@pytest.mark.parametrize("name", ["", "a/b", "x" * 101])
def test_names_are_checked(run: Run, name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        run.attempt().resumption.step(name)


# --- cursors ---


def test_a_cursor_is_kept_at_once_and_found_again(run: Run) -> None:
    attempt = run.attempt()
    step = attempt.resumption.step("a").__enter__()
    assert step.todo
    assert step.cursor is None
    value = {"page": 3}
    step.set_cursor(value)
    assert run.steps()["cursor"] == {"page": 3}
    value["page"] = 4
    assert step.cursor == {"page": 3}
    attempt.resumption.settle()
    assert run.steps()["cursor"] == {"page": 3}
    with run.attempt().resumption.step("a") as step:
        assert step.todo
        assert step.cursor == {"page": 3}
    assert run.steps() == {"names": ["a"], "finished": 1}


def test_a_cursor_is_that_of_its_step_alone(run: Run) -> None:
    with pytest.raises(Killed):
        do(run.attempt(), "a", "b", fail_in="b")
    run.metadata["awa"]["steps"]["cursor"] = 7
    resumption = run.attempt().resumption
    with resumption.step("a") as step:
        assert step.cursor is None
    with resumption.step("b") as step:
        assert step.todo
        assert step.cursor == 7


def test_a_finished_step_takes_no_cursor(run: Run) -> None:
    do(run.attempt(), "a")
    with run.attempt().resumption.step("a") as step, pytest.raises(RuntimeError, match="todo"):
        step.set_cursor(1)


def test_a_cursor_that_is_no_json_changes_nothing(run: Run) -> None:
    with run.attempt().resumption.step("a") as step:
        assert step.todo
        step.set_cursor(1)
        with pytest.raises(InvalidProgress, match="cursor"):
            step.set_cursor({1, 2})
        assert step.cursor == run.steps()["cursor"] == 1


def test_a_cursor_that_is_too_large_changes_nothing(run: Run) -> None:
    attempt = run.attempt()
    with attempt.resumption.step("a") as step:
        assert step.todo
        with pytest.raises(InvalidProgress):
            step.set_cursor("x" * 66_000)
        assert step.cursor is None
        attempt.resumption.keep()
        step.set_cursor(2)
    assert run.steps()["finished"] == 1


def test_a_step_is_asked_inside_its_block_only(run: Run) -> None:
    step = run.attempt().resumption.step("a")
    with pytest.raises(RuntimeError, match="with block"):
        step.set_cursor(1)
    with step:
        assert step.todo
    with pytest.raises(RuntimeError, match="with block"):
        step.set_cursor(1)


# --- loops in steps ---


def test_a_steps_loop_goes_on_and_is_forgotten_with_the_step(run: Run) -> None:
    attempt = run.attempt()
    step = attempt.resumption.step("a").__enter__()
    rows = step.iterate(Records("abc"))
    assert [next(rows), next(rows)] == ["a", "b"]
    attempt.resumption.settle()
    assert run.loop("a/items") == {"cursor": {"at": 1}, "done": 1}
    attempt = run.attempt()
    with attempt.resumption.step("a") as step:
        assert list(step.iterate(Records("abc"))) == ["b", "c"]
    attempt.resumption.settle()
    assert run.metadata["awa"] == {"steps": {"names": ["a"], "finished": 1}}


def test_a_finished_steps_loop_yields_nothing(run: Run) -> None:
    do(run.attempt(), "a")
    source = Records("abc")
    with run.attempt().resumption.step("a") as step:
        assert list(step.iterate(source)) == []
    assert source.read_from == []


def test_a_loop_in_a_steps_block_is_the_steps_and_each_step_may_have_the_same(run: Run) -> None:
    attempt = run.attempt()
    for name in ("a", "b"):
        with attempt.resumption.step(name):
            assert list(attempt.resumption.iterate(range(2))) == [0, 1]
    assert run.metadata["awa"] == {"steps": {"names": ["a", "b"], "finished": 2}}


def test_a_loop_that_was_left_in_a_step_does_not_come_back(run: Run) -> None:
    attempt = run.attempt()
    with attempt.resumption.step("a") as step:
        rows = step.iterate(range(9))
        next(rows)
        next(rows)
    attempt.resumption.settle()
    assert "iterations" not in run.metadata["awa"]


# --- stops ---


def test_a_step_begins_not_when_asked_to_stop(run: Run) -> None:
    with pytest.raises(Interrupt):
        do(run.attempt(stop=StopReason.CANCEL), "a")
    assert run.steps() is None


def test_a_stop_is_seen_at_a_steps_end_and_at_a_cursor(run: Run) -> None:
    attempt = run.attempt()
    step = attempt.resumption.step("a").__enter__()
    attempt.stop_reason = StopReason.WORKER_STOPPING
    with pytest.raises(Interrupt):
        step.set_cursor(5)
    assert run.steps() == {"names": ["a"], "finished": 0, "cursor": 5}
    attempt = run.attempt()
    attempt.on_step = lambda name: setattr(attempt, "stop_reason", StopReason.CANCEL)
    with pytest.raises(Interrupt):
        do(attempt, "a", "b")
    assert run.steps() == {"names": ["a"], "finished": 1}


def test_an_attempt_whose_time_is_over_does_one_step_or_one_cursor(run: Run) -> None:
    with pytest.raises(Interrupt):
        do(run.attempt(stop=StopReason.MAX_RUNTIME), "a", "b")
    assert run.steps() == {"names": ["a"], "finished": 1}
    resumption = run.attempt(stop=StopReason.MAX_RUNTIME).resumption
    with resumption.step("a"):
        pass
    step = resumption.step("b").__enter__()
    step.set_cursor(None)  # which is no advance
    with pytest.raises(Interrupt):
        step.set_cursor(1)
    assert run.steps()["cursor"] == 1


def test_tests_hear_of_each_step_that_was_done(run: Run) -> None:
    do(run.attempt(), "a")
    attempt = run.attempt()
    heard: list[Any] = []
    attempt.on_step = heard.append
    do(attempt, "a", "b")
    assert heard == ["b"]


def test_outside_an_attempt_steps_just_run() -> None:
    for _ in range(2):
        with Resumption(None).step("a") as step:
            assert step.todo
            step.set_cursor(3)
            assert step.cursor == 3
            assert list(step.iterate(range(2))) == [0, 1]
            with pytest.raises(InvalidProgress):
                step.set_cursor({1})
