"""Items whose work fails, that cannot be read, or that kill their worker."""

from __future__ import annotations

from typing import Any

import pytest

from celery_awa.errors import LeaseLost, TooManyItemErrors
from celery_awa.model import StopReason
from celery_awa.resume import RetryItem, SkipItems
from celery_awa.resume.iteration import Iteration
from celery_awa.resume.resumption import Resumption
from celery_awa.resume.stops import Interrupt, Snooze

from .resume_attempt import FakeAttempt, LeavesTask, Records, Run


@pytest.fixture
def run() -> Run:
    return Run()


def loop(attempt: FakeAttempt, source: Any, **options: Any) -> Iteration:
    return attempt.resumption.iterate(source, **options)


def work(rows: Iteration, bad: Any = ()) -> list[Any]:
    """Work on all items; those in ``bad`` fail. What was begun, in order."""
    begun = []
    for item in rows:
        with rows.item():
            begun.append(item)
            if item in bad:
                raise ValueError(f"bad {item}")
    return begun


def test_an_item_that_fails_is_skipped_and_recorded(run: Run) -> None:
    rows = loop(run.attempt(), list("abcd"), on_item_error=SkipItems())
    assert work(rows, "bd") == ["a", "b", "c", "d"]
    assert (rows.done, rows.skipped) == (4, 2)
    assert run.loop() == {
        "finished": True,
        "done": 4,
        "skipped": {
            "count": 2,
            "last": [
                {"item": 2, "error": "ValueError: bad b"},
                {"item": 4, "error": "ValueError: bad d"},
            ],
        },
    }


def test_of_many_that_failed_the_last_twenty_are_told_in_few_words(run: Run) -> None:
    rows = loop(run.attempt(), range(50), on_item_error=SkipItems())
    for _ in rows:
        with rows.item():
            raise ValueError("\0\ud800" + "x" * 1_000)
    skipped = run.loop()["skipped"]
    assert skipped["count"] == 50
    assert [one["item"] for one in skipped["last"]] == list(range(31, 51))
    assert all(len(one["error"]) <= 500 for one in skipped["last"])


def test_too_many_failures_fail_the_task_with_the_last_as_the_cause(run: Run) -> None:
    attempt = run.attempt()
    rows = loop(attempt, range(10), on_item_error=SkipItems(limit=2))
    with pytest.raises(TooManyItemErrors, match="item 6: ValueError: bad 5") as failed:
        work(rows, (1, 3, 5))
    assert isinstance(failed.value.__cause__, ValueError)
    attempt.resumption.settle()
    assert run.loop()["done"] == 5
    # The count is the run's, not the attempt's.
    with pytest.raises(TooManyItemErrors):
        work(loop(run.attempt(), range(10), on_item_error=SkipItems(limit=2)), (5,))


def test_an_item_that_fails_comes_again_so_many_times(run: Run) -> None:
    rows = loop(run.attempt(), range(3), on_item_error=RetryItem(times=2))
    begun = []
    for item in rows:
        with rows.item():
            begun.append(item)
            if begun.count(1) in (1, 2) and item == 1:
                raise ValueError
    assert begun == [0, 1, 1, 1, 2]
    assert run.loop() == {"finished": True, "done": 3}


def test_an_item_that_keeps_failing_raises_its_own_error(run: Run) -> None:
    attempt = run.attempt()
    rows = loop(attempt, range(3), on_item_error=RetryItem(times=2))
    with pytest.raises(ValueError, match="bad 1"):
        work(rows, (1,))
    attempt.resumption.settle()
    assert run.loop()["done"] == 1


def test_each_item_has_its_own_tries(run: Run) -> None:
    rows = loop(run.attempt(), range(3), on_item_error=RetryItem(times=1))
    begun: list[int] = []
    for item in rows:
        with rows.item():
            begun.append(item)
            if begun.count(item) == 1:
                raise ValueError
    assert begun == [0, 0, 1, 1, 2, 2]


def test_under_raise_a_guard_lets_everything_pass(run: Run) -> None:
    with pytest.raises(ValueError, match="bad 0"):
        work(loop(run.attempt(), range(3)), (0,))


@pytest.mark.parametrize("policy", [SkipItems(), RetryItem()])
@pytest.mark.parametrize(
    "leaving",
    [LeavesTask(), Interrupt(), Snooze(1), KeyboardInterrupt(), LeaseLost(), TooManyItemErrors()],
    ids=repr,
)
def test_what_leaves_the_task_on_purpose_is_no_items_error(
    run: Run, policy: Any, leaving: BaseException
) -> None:
    rows = loop(run.attempt(), range(3), on_item_error=policy)
    next(rows)
    with pytest.raises(type(leaving)), rows.item():
        raise leaving
    assert rows.skipped == 0


@pytest.mark.parametrize("policy", [SkipItems(), RetryItem()])
def test_a_policy_without_its_guard_is_told_at_the_first_item(run: Run, policy: Any) -> None:
    attempt = run.attempt()
    with pytest.raises(RuntimeError, match=r"with rows\.item\(\)"):
        for _ in loop(attempt, range(3), on_item_error=policy):
            pass
    attempt.resumption.settle()
    assert run.loop() is None


def test_a_guard_outside_the_body_is_an_error(run: Run) -> None:
    rows = loop(run.attempt(), range(1))
    with pytest.raises(RuntimeError, match="body"):
        rows.item()
    list(rows)
    with pytest.raises(RuntimeError, match="body"):
        rows.item()


@pytest.mark.parametrize(
    ("kind", "name"), [(SkipItems, "limit"), (RetryItem, "times")], ids=["skip", "retry"]
)
def test_policies_check_their_numbers(kind: Any, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        kind(0)
    with pytest.raises(TypeError, match=name):
        kind("3")


# --- what cannot be read ---

BROKEN = ["a", UnicodeError("not text"), "c", "d"]


def test_what_cannot_be_read_raises_its_error(run: Run) -> None:
    attempt = run.attempt()
    with pytest.raises(UnicodeError, match="not text"):
        list(loop(attempt, Records(BROKEN)))
    attempt.resumption.settle()
    assert run.loop() == {"cursor": {"at": 1}, "done": 1}


def test_what_cannot_be_read_is_skipped_as_what_fails_is(run: Run) -> None:
    rows = loop(run.attempt(), Records(BROKEN), on_item_error=SkipItems())
    assert work(rows, "d") == ["a", "c", "d"]
    assert [one["item"] for one in run.loop()["skipped"]["last"]] == [2, 4]
    assert run.loop()["done"] == 4


def test_what_cannot_be_read_is_not_read_again(run: Run) -> None:
    with pytest.raises(UnicodeError):
        work(loop(run.attempt(), Records(BROKEN), on_item_error=RetryItem()))


def test_a_batch_leaves_out_what_cannot_be_read_and_counts_it(run: Run) -> None:
    attempt = run.attempt()
    rows = loop(attempt, Records(BROKEN), batch_size=2, on_item_error=SkipItems())
    assert work(rows) == [["a", "c"], ["d"]]
    assert run.loop()["done"] == 4
    assert run.loop()["skipped"]["count"] == 1


def test_before_what_cannot_be_read_the_rest_of_its_batch_is_worked_on(run: Run) -> None:
    attempt = run.attempt()
    rows = loop(attempt, Records(BROKEN), batch_size=3)
    assert next(rows) == ["a"]
    with pytest.raises(UnicodeError):
        next(rows)
    assert run.loop() == {"cursor": {"at": 1}, "done": 1}


def test_a_skip_in_a_batch_that_comes_again_is_counted_once(run: Run) -> None:
    attempt = run.attempt()
    rows = loop(attempt, Records(BROKEN), batch_size=3, on_item_error=SkipItems())
    for _ in rows:
        break
    attempt.resumption.settle()
    rows = loop(run.attempt(), Records(BROKEN), batch_size=3, on_item_error=SkipItems())
    work(rows)
    assert rows.skipped == 1


def test_a_batch_that_fails_is_one_of_the_skipped(run: Run) -> None:
    rows = loop(run.attempt(), range(6), batch_size=2, on_item_error=SkipItems(limit=1))
    assert work(rows, ([2, 3],)) == [[0, 1], [2, 3], [4, 5]]
    assert run.loop()["skipped"] == {
        "count": 1,
        "last": [{"item": 3, "last_item": 4, "error": "ValueError: bad [2, 3]"}],
    }


def test_a_batch_comes_again_as_it_was(run: Run) -> None:
    rows = loop(run.attempt(), range(2), batch_size=2, on_item_error=RetryItem(1))
    seen = []
    for batch in rows:
        with rows.item():
            seen.append(list(batch))
            batch.clear()
            if len(seen) == 1:
                raise ValueError
    assert seen == [[0, 1], [0, 1]]


def test_the_rules_for_items_hold_outside_an_attempt() -> None:
    rows = Resumption(None).iterate(Records(BROKEN), on_item_error=SkipItems())
    assert work(rows, "a") == ["a", "c", "d"]
    assert rows.skipped == 2
    with pytest.raises(TooManyItemErrors):
        work(Resumption(None).iterate(range(3), on_item_error=SkipItems(1)), (0, 1))


# --- what kills its worker ---


def test_an_item_that_killed_its_worker_so_often_is_skipped(run: Run) -> None:
    for _ in range(3):
        killed = loop(run.attempt(), range(5), kill_limit=3)
        while next(killed) != 2:
            pass
    rows = loop(run.attempt(), range(5), kill_limit=3)
    assert list(rows) == [3, 4]
    assert run.loop() == {
        "finished": True,
        "done": 5,
        "skipped": {"count": 1, "last": [{"item": 3, "error": "killed its worker 3 times"}]},
    }


def test_a_clean_end_takes_the_try_back(run: Run) -> None:
    for _ in range(4):
        attempt = run.attempt()
        next(loop(attempt, range(5), kill_limit=1))
        assert run.loop()["trying"] == {"item": 1, "tries": 1}
        attempt.resumption.settle()
        assert run.loop() is None


def test_a_flush_in_the_body_does_not_take_the_try_back(run: Run) -> None:
    attempt = run.attempt()
    next(loop(attempt, range(5), kill_limit=2))
    attempt.resumption.settle(ends=False)
    assert run.loop()["trying"] == {"item": 1, "tries": 1}


def test_batches_count_as_items_that_kill(run: Run) -> None:
    next(loop(run.attempt(), range(5), kill_limit=1, batch_size=2))
    assert list(loop(run.attempt(), range(5), kill_limit=1, batch_size=2)) == [[2, 3], [4]]
    assert run.loop()["skipped"]["last"] == [
        {"item": 1, "last_item": 2, "error": "killed its worker 1 times"}
    ]


def test_the_tries_of_one_item_are_not_those_of_the_next(run: Run) -> None:
    killed = loop(run.attempt(), range(5), kill_limit=2)
    next(killed)
    killed = loop(run.attempt(), range(5), kill_limit=2)
    next(killed)
    next(killed)
    assert run.loop()["trying"] == {"item": 2, "tries": 1}


# --- more than one guard, and stops ---


def test_an_item_that_fails_twice_in_its_body_is_one_failure(run: Run) -> None:
    rows = loop(run.attempt(), range(2), on_item_error=SkipItems(limit=2))
    for _ in rows:
        for error in (ValueError("first"), ValueError("second")):
            with rows.item():
                raise error
    skipped = run.loop()["skipped"]
    assert [one["error"] for one in skipped["last"]] == ["ValueError: first"] * 2


def test_an_item_that_fails_twice_in_its_body_is_tried_again_once(run: Run) -> None:
    rows = loop(run.attempt(), range(1), on_item_error=RetryItem(times=2))
    for _ in range(2):
        next(rows)
        for _ in range(2):
            with rows.item():
                raise KeyError
    next(rows)
    with pytest.raises(KeyError), rows.item():
        raise KeyError


def test_a_stop_is_seen_before_an_item_comes_again(run: Run) -> None:
    attempt = run.attempt()
    rows = loop(attempt, range(3), on_item_error=RetryItem())
    next(rows)
    with rows.item():
        attempt.stop_reason = StopReason.WORKER_STOPPING
        raise ValueError
    with pytest.raises(Interrupt):
        next(rows)
    attempt.resumption.settle()
    assert run.loop() is None
