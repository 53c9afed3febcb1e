"""Steps that are done once over all attempts, and progress of any loop."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_awa.errors import CheckpointMismatch
from celery_awa.model import StopReason
from celery_awa.resume.stops import Interrupt

from .resumed import Row

NAMES = ["extract", "load", "tell"]


class Crash(BaseException):
    """Stands for SIGKILL: nothing of the attempt runs after it."""


def run(row: Row, done: list[str], fail_in: str | None = None, names: list[str] = NAMES) -> None:
    attempt = row.attempt()
    try:
        for name in names:
            with attempt.resumption.step(name) as step:
                if step.todo:
                    if name == fail_in:
                        raise OSError
                    done.append(name)
    except OSError:
        attempt.resumption.settle()


@given(st.lists(st.sampled_from(NAMES), max_size=5))
def test_each_step_is_done_once_whatever_fails(failures: list[str]) -> None:
    row, done = Row(), []
    for fail_in in failures:
        run(row, done, fail_in)
    run(row, done)
    assert done == NAMES
    run(row, done)
    assert done == NAMES


def test_a_loop_in_a_step_has_a_cursor_of_its_own_that_goes_with_the_step() -> None:
    row, seen = Row(), []

    def attempt_once(fail_at: tuple[str, int] | None) -> None:
        attempt = row.attempt()
        try:
            for name in ("first", "second"):
                with attempt.resumption.step(name) as step:
                    for number in step.iterate(range(4), checkpoint_every=1):
                        if fail_at == (name, number):
                            raise OSError
                        seen.append((name, number))
        except OSError:
            attempt.resumption.settle()

    attempt_once(("first", 2))
    attempt_once(("second", 1))
    assert list(row.metadata["awa"]["iterations"]) == ["second/items"]
    attempt_once(None)
    assert seen == [(name, number) for name in ("first", "second") for number in range(4)]
    attempt_once(None)
    assert len(seen) == 8


def test_a_cursor_by_hand_is_kept_until_its_step_is_finished() -> None:
    row = Row()

    def crash() -> None:
        with row.attempt().resumption.step("load") as step:
            assert step.todo
            assert step.cursor is None
            step.set_cursor({"page": 3})
            raise Crash

    with pytest.raises(Crash):
        crash()
    resumption = row.attempt().resumption
    with resumption.step("load") as step:
        assert step.todo
        assert step.cursor == {"page": 3}
    with row.attempt().resumption.step("load") as step:
        assert not step.todo
        assert step.cursor is None
        with pytest.raises(RuntimeError, match="is finished"):
            step.set_cursor(1)


@pytest.mark.parametrize(
    "names",
    [["load", "extract", "tell"], ["extract", "store", "tell"], ["extract", "tell"], ["new"]],
    ids=["another order", "another name", "one missing", "another beginning"],
)
def test_steps_that_are_not_the_checkpoints_are_an_error(names: list[str]) -> None:
    row, done = Row(), []
    run(row, done, fail_in="tell")
    with pytest.raises(CheckpointMismatch, match="checkpoint_version"):
        run(row, done, names=names)
    assert done == ["extract", "load"]


def test_steps_that_are_new_at_the_end_are_done() -> None:
    row, done = Row(), []
    run(row, done)
    run(row, done, names=[*NAMES, "clean"])
    assert done == [*NAMES, "clean"]


def test_a_block_that_does_not_ask_whether_it_is_to_be_done_is_an_error_at_once() -> None:
    resumption = Row().attempt().resumption
    with pytest.raises(RuntimeError, match=r"step\.todo"), resumption.step("load"):
        pass


def test_steps_in_steps_in_loops_and_twice_are_errors() -> None:
    resumption = Row().attempt().resumption
    with resumption.step("outer") as step:
        assert step.todo
        with pytest.raises(RuntimeError, match="outer"), resumption.step("inner"):
            pass
    with pytest.raises(RuntimeError, match="outer"), resumption.step("outer"):
        pass
    loop = resumption.iterate(range(3))
    next(loop)
    with pytest.raises(RuntimeError, match="items"), resumption.step("late"):
        pass


def test_a_task_that_is_asked_to_stop_does_so_before_a_step_and_at_a_cursor() -> None:
    row, done = Row(), []
    attempt = row.attempt()
    with attempt.resumption.step("extract") as step:
        assert step.todo
        done.append("extract")
        attempt.stop_reason = StopReason.WORKER_STOPPING
        with pytest.raises(Interrupt):
            step.set_cursor(1)
    with pytest.raises(Interrupt) as stopped, attempt.resumption.step("load"):
        pass
    assert stopped.value.reason is StopReason.WORKER_STOPPING
    run(row, done)
    assert done == NAMES


def test_max_runtime_lets_each_attempt_do_a_step() -> None:
    row = Row()
    for name in NAMES:
        attempt = row.attempt()
        attempt.stop_reason = StopReason.MAX_RUNTIME
        for known in NAMES[: NAMES.index(name)]:
            with attempt.resumption.step(known) as step:
                assert not step.todo
        with attempt.resumption.step(name) as step:
            assert step.todo
        if name != NAMES[-1]:
            after = NAMES[NAMES.index(name) + 1]
            with pytest.raises(Interrupt), attempt.resumption.step(after):
                pass


def test_whoever_tests_hears_of_finished_steps() -> None:
    attempt = Row().attempt()
    heard: list[str] = []
    attempt.on_step = heard.append
    for name in NAMES:
        with attempt.resumption.step(name) as step:
            assert step.todo
    assert heard == NAMES


@pytest.mark.parametrize("name", ["", "a/b", "x" * 101, 3, None])
def test_what_cannot_be_a_steps_name_is_told(name: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="name"):
        Row().attempt().resumption.step(name)


def test_a_tracked_loop_reports_how_far_it_is_and_keeps_nothing() -> None:
    row = Row()
    attempt = row.attempt()
    attempt.stop_reason = StopReason.CANCEL
    assert list(attempt.resumption.track(["a", "b", "c"], message="letters")) == ["a", "b", "c"]
    assert row.metadata == {}
    first, last = row.reports[0], row.reports[-1]
    assert (first["current"], first["total"], first["message"]) == (0, 3, "letters")
    assert (last["current"], last["total"]) == (3, 3)


def test_a_tracked_loop_of_unknown_length_counts() -> None:
    row = Row()
    letters = row.attempt().resumption.track(iter("abc"), message=str.upper)
    assert list(letters) == ["a", "b", "c"]
    assert (row.reports[-1]["current"], row.reports[-1]["total"]) == (3, None)
    assert row.reports[-1]["message"] == "C"
    row = Row()
    assert list(row.attempt().resumption.track(iter("ab"), total=10)) == ["a", "b"]
    assert (row.reports[-1]["current"], row.reports[-1]["total"]) == (2, 10)
