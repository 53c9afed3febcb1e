"""celery_awa.testing: an attempt that is crashed, interrupted or robbed of its lease."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from celery_awa.model import JobState
from celery_awa.testing import NotReached, crash, run_task

from . import testing_tasks as tasks
from .testing_tasks import diary


@pytest.fixture(autouse=True)
def _empty_diary() -> Iterator[None]:
    yield
    diary.empty()


def test_without_a_fault_the_task_completes() -> None:
    run = run_task(tasks.loop, 4)
    assert (run.state, run.result, run.error) == (JobState.COMPLETED, 4, None)
    assert diary.lines == [0, 1, 2, 3]
    assert run.percent == 100
    # As in its row: nothing is left to go on from.
    assert (run.checkpoint, run.items, run.steps) == ({}, {}, [])


def test_a_crash_keeps_what_was_kept_before_it_and_the_task_goes_on_from_there() -> None:
    run = run_task(tasks.loop, 6, every=2, crash_after=5)
    assert (run.state, run.result, run.error) == (JobState.RUNNING, None, None)
    assert diary.lines == [0, 1, 2, 3, 4]
    assert run.items == {"items": 4}
    diary.lines.clear()
    again = run.resume()
    assert (again.state, again.attempt, diary.lines) == (JobState.COMPLETED, 2, [4, 5])


def test_a_crash_keeps_less_than_a_clean_stop() -> None:
    assert run_task(tasks.loop, 6, crash_after=5).items == {}
    assert run_task(tasks.loop, 6, interrupt_after=5).items == {"items": 5}


def test_an_interrupted_task_goes_on_after_the_item() -> None:
    run = run_task(tasks.loop, 6, interrupt_after=4)
    assert (run.state, run.percent, run.attempt) == (JobState.AVAILABLE, 66, 1)
    diary.lines.clear()
    again = run.resume()
    assert diary.lines == [4, 5]
    # Interruptions do not count.
    assert (again.state, again.attempt) == (JobState.COMPLETED, 1)


def test_what_is_written_after_the_lease_was_lost_is_not_kept() -> None:
    run = run_task(tasks.loop, 6, every=2, lose_lease_after=5)
    assert (run.state, run.lease_lost, run.items) == (JobState.RUNNING, True, {"items": 4})
    assert diary.lines == [0, 1, 2, 3, 4]
    assert run.resume().state is JobState.COMPLETED


def test_a_body_that_goes_on_without_its_lease_returns_for_nothing() -> None:
    run = run_task(tasks.unlooking, lose_lease_after="only")
    assert diary.lines == [("todo", True), ("lease_lost", False)]
    assert (run.state, run.result, run.lease_lost) == (JobState.RUNNING, None, True)
    assert (run.steps, "late" in run.checkpoint) == (["only"], False)
    assert run.resume().result == "done"


def test_a_worker_that_stops_does_not_stop_a_body_that_does_not_look() -> None:
    run = run_task(tasks.unlooking, interrupt_after="only")
    assert diary.lines == [("todo", True), ("worker_stopping", True)]
    assert (run.state, run.flushes) == (JobState.COMPLETED, 1)


@pytest.mark.parametrize("fault", ["crash_after", "interrupt_after", "lose_lease_after"])
def test_a_step_is_kept_once_it_is_finished(fault: str) -> None:
    run = run_task(tasks.in_steps, **{fault: "load"})
    assert run.steps == ["fetch", "load"]
    assert diary.lines == ["fetch", "load"]
    again = run.resume()
    assert (again.result, diary.lines) == ("done", ["fetch", "load", "tell"])


def test_items_of_all_loops_count_together_and_those_of_one_by_its_name() -> None:
    assert run_task(tasks.two_loops, crash_after=4).items == {"rows": 3}
    assert diary.lines[-1] == ("files", 0)
    assert run_task(tasks.two_loops, interrupt_after=("files", 2)).items == {"rows": 3, "files": 2}


def test_a_batch_counts_its_items_and_is_finished_as_a_whole() -> None:
    run = run_task(tasks.batches, interrupt_after=5)
    assert run.items == {"items": 8}
    assert run.resume().state is JobState.COMPLETED
    assert diary.lines == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_the_last_item_is_an_item_too() -> None:
    assert run_task(tasks.loop, 3, crash_after=3).state is JobState.RUNNING
    assert run_task(tasks.loop, 3, interrupt_after=3).items == {"items": 3}


def test_a_crash_passes_what_treats_items_that_fail() -> None:
    run = run_task(tasks.skipping, crash_after=3)
    assert (run.state, run.items) == (JobState.RUNNING, {"items": 2})
    assert run.resume().result == 1


def test_each_resume_of_a_run_goes_on_from_that_run() -> None:
    stopped = run_task(tasks.loop, 6, interrupt_after=2)
    assert stopped.resume(interrupt_after=3).items == {"items": 5}
    assert stopped.resume(interrupt_after=1).items == {"items": 3}
    assert stopped.items == {"items": 2}


def test_a_run_crashed_at_every_item_does_each_at_least_once() -> None:
    for item in range(1, 8):
        diary.lines.clear()
        run = run_task(tasks.loop, 7, every=3, crash_after=item).resume()
        assert run.result == 7
        assert sorted(set(diary.lines)) == list(range(7))


def test_crash_is_for_places_that_no_item_marks() -> None:
    diary.do_at(3, crash)
    run = run_task(tasks.by_hand, 4)
    assert (run.state, run.checkpoint, run.flushes) == (JobState.RUNNING, {"last": 2}, 1)
    assert (run.percent, run.message) == (50, "row 2")
    assert run.resume().result == 4
    assert diary.lines == [1, 2, ("flushed", True), 3, 3, 4, ("flushed", True)]


def test_an_item_that_kills_its_worker_is_left_out_at_last() -> None:
    def die(line: Any) -> None:
        if line == 1:
            crash()

    diary.call = die
    run = run_task(tasks.poisoned)
    assert run.state is JobState.RUNNING
    run = run.resume()
    assert run.state is JobState.RUNNING
    assert run.resume().result == 1
    assert diary.lines == [0, 1, 1, 2]


def test_nothing_that_the_task_does_after_a_crash_is_kept() -> None:
    diary.do_at("work", crash)
    run = run_task(tasks.tidying)
    # The blocks run, since Python unwinds; what asks celery-awa for something ends them.
    assert diary.lines == ["work", "caught"]
    assert (run.state, run.checkpoint, run.progress) == (
        JobState.RUNNING,
        {"a": 1},
        {"metadata": {"a": 1}},
    )


def test_a_task_that_outlives_its_crash_has_no_result() -> None:
    def outlive() -> None:
        with pytest.raises(BaseException, match="the worker died here"):
            crash()

    diary.do_at(2, outlive)
    run = run_task(tasks.by_hand, 3)
    assert (run.state, run.result, run.checkpoint) == (JobState.RUNNING, None, {"last": 1})


def test_crash_outside_of_a_run_says_so() -> None:
    with pytest.raises(RuntimeError, match="none does now"):
        crash()


def test_a_retry_after_a_crash_is_no_retry() -> None:
    diary.do_at("work", crash)
    run = run_task(tasks.retried_after_a_crash)
    assert (run.state, run.error) == (JobState.RUNNING, None)
    assert run.resume().result == 0


def test_what_is_done_to_a_checkpoint_is_not_done_to_the_runs() -> None:
    run = run_task(tasks.changing_what_it_found, checkpoint={"list": [0]})
    run.checkpoint["list"].append("mine")
    run.resume()
    again = run.resume()
    assert diary.lines == [[0, 1], [0, 1], [0, 1]]
    assert again.checkpoint == {"list": [0]}


@pytest.mark.parametrize(
    ("after", "text"),
    [
        (7, r"crash_after=7 .* is completed; .*\{'items': 3\} and the steps \[\]"),
        ("rows", r"crash_after='rows' was not reached"),
        (("rows", 1), r"crash_after=\('rows', 1\) was not reached"),
    ],
)
def test_a_fault_that_never_came_is_an_error(after: Any, text: str) -> None:
    with pytest.raises(NotReached, match=text) as caught:
        run_task(tasks.loop, 3, crash_after=after)
    assert caught.value.run.result == 3


def test_an_error_before_the_fault_is_told_with_it() -> None:
    with pytest.raises(NotReached, match="the job is failed") as caught:
        run_task(tasks.loop, "three", crash_after=1)
    assert isinstance(caught.value.__cause__, TypeError)


@pytest.mark.parametrize("after", [0, -1, "", ("rows", 0), ("", 1)])
def test_a_fault_needs_a_place(after: Any) -> None:
    with pytest.raises(ValueError, match=r"interrupt_after is .*; it must be a number of items"):
        run_task(tasks.loop, 3, interrupt_after=after)


@pytest.mark.parametrize("after", [True, 1.5, ["rows", 1], ("rows",), (1, 2), ("rows", True)])
def test_a_fault_needs_a_place_of_the_right_kind(after: Any) -> None:
    with pytest.raises(TypeError, match=r"lose_lease_after is .*; it must be a number of items"):
        run_task(tasks.loop, 3, lose_lease_after=after)


def test_an_attempt_has_one_fault() -> None:
    with pytest.raises(ValueError, match="crash_after and interrupt_after exclude each other"):
        run_task(tasks.loop, 3, crash_after=1, interrupt_after=2)
    stopped = run_task(tasks.loop, 3, crash_after=1)
    with pytest.raises(ValueError, match="exclude each other"):
        stopped.resume(crash_after=1, lose_lease_after=1)
    assert diary.lines == [0]
