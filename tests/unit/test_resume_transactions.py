"""Loops whose cursor is committed with the work on each item."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from celery_awa.resume import RetryItem, SkipItems
from celery_awa.resume.resumption import Resumption

from .resume_attempt import Killed, Records, Run


@pytest.fixture
def run() -> Run:
    return Run()


def committed(run: Run, name: str = "items") -> Any:
    return run.committed["awa_committed"].get(name)


def test_the_state_after_the_present_item_is_committed(run: Run) -> None:
    rows = run.attempt().resumption.iterate(Records("abc"))
    next(rows)
    with run.transaction() as connection:
        rows.checkpoint_in(connection)
    assert committed(run) == {"cursor": {"at": 1}, "done": 1}
    assert list(run.attempt().resumption.iterate(Records("abc"))) == ["b", "c"]


def test_a_batchs_last_item_is_committed(run: Run) -> None:
    rows = run.attempt().resumption.iterate(Records("abc"), batch_size=2)
    next(rows)
    with run.transaction() as connection:
        rows.checkpoint_in(connection)
    assert committed(run) == {"cursor": {"at": 2}, "done": 2}


def test_from_then_on_nothing_else_is_kept_that_a_rollback_would_belie(run: Run) -> None:
    attempt = run.attempt()
    rows = attempt.resumption.iterate(range(10), checkpoint_every=1)
    with contextlib.suppress(Killed), run.transaction() as connection:
        for number in rows:
            rows.checkpoint_in(connection)
            if number == 5:
                raise Killed
    attempt.resumption.settle()
    assert run.loop() is None
    assert attempt.reports[-1]["current"] == 5
    assert list(run.attempt().resumption.iterate(range(10))) == list(range(10))


def test_what_was_kept_before_stays_and_goes_no_further(run: Run) -> None:
    attempt = run.attempt()
    rows = attempt.resumption.iterate(range(10), checkpoint_every=1, kill_limit=3)
    for _ in range(3):
        next(rows)
    rows.checkpoint_in({})  # never committed
    next(rows)
    next(rows)
    assert run.loop() == {"cursor": 1, "done": 2, "trying": {"item": 5, "tries": 1}}
    attempt.resumption.settle()
    assert run.loop() == {"cursor": 1, "done": 2}


def test_the_end_of_the_loop_may_come_before_the_commit(run: Run) -> None:
    rows = run.attempt().resumption.iterate(range(3))
    with contextlib.suppress(Killed), run.transaction() as connection:
        for _ in rows:
            rows.checkpoint_in(connection)
        raise Killed
    assert list(run.attempt().resumption.iterate(range(3))) == [0, 1, 2]


def test_a_loop_that_was_all_committed_is_finished_for_good_the_next_time(run: Run) -> None:
    rows = run.attempt().resumption.iterate(range(3))
    for _ in rows:
        with run.transaction() as connection:
            rows.checkpoint_in(connection)
    assert run.loop() is None
    assert list(run.attempt().resumption.iterate(range(3))) == []
    assert run.loop() == {"finished": True, "done": 3}


@pytest.mark.parametrize(("kept", "first"), [(1, 2), (2, 2), (5, 5)])
def test_whichever_of_kept_and_committed_is_further_counts(run: Run, kept: int, first: int) -> None:
    run.metadata = {"awa": {"iterations": {"items": {"cursor": kept - 1, "done": kept}}}}
    run.committed = {"awa_committed": {"items": {"cursor": 1, "done": 2}}}
    assert next(run.attempt().resumption.iterate(range(9))) == first


def test_skipped_items_ride_along(run: Run) -> None:
    rows = run.attempt().resumption.iterate(range(3), on_item_error=SkipItems())
    for number in rows:
        with rows.item():
            if number == 0:
                raise ValueError("bad")
        with run.transaction() as connection:
            rows.checkpoint_in(connection)
        break
    assert committed(run)["skipped"]["count"] == 1
    assert run.attempt().resumption.iterate(range(3)).skipped == 1


def test_two_items_in_a_row_that_kill_are_both_skipped(run: Run) -> None:
    worked: list[int] = []
    for _ in range(9):
        rows = run.attempt().resumption.iterate(range(5), kill_limit=2)
        try:
            for number in rows:
                if number in (2, 3):
                    raise Killed
                with run.transaction() as connection:
                    worked.append(number)
                    rows.checkpoint_in(connection)
        except Killed:
            continue
        break
    assert worked == [0, 1, 4]
    assert rows.skipped == 2


def test_what_comes_again_cannot_be_committed(run: Run) -> None:
    rows = run.attempt().resumption.iterate(range(3), on_item_error=RetryItem())
    next(rows)
    with rows.item():
        raise ValueError
    with run.transaction() as connection, pytest.raises(RuntimeError, match="comes again"):
        rows.checkpoint_in(connection)
    assert connection == {}


def test_it_belongs_into_the_body(run: Run) -> None:
    rows = run.attempt().resumption.iterate(range(1))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="body"):
            rows.checkpoint_in({})
        list(rows)


def test_outside_an_attempt_nothing_is_committed() -> None:
    rows = Resumption(None).iterate(range(2))
    next(rows)
    rows.checkpoint_in(None)
    assert list(rows) == [1]


def test_it_belongs_into_the_body_also_where_the_last_item_was_skipped(run: Run) -> None:
    source = Records(["a", ValueError("bad")])
    rows = run.attempt().resumption.iterate(source, on_item_error=SkipItems())
    for _ in rows:
        with rows.item():
            pass
    with pytest.raises(RuntimeError, match="body"):
        rows.checkpoint_in({})


@pytest.mark.parametrize("batch", [None, 1])
def test_in_a_later_attempt_nothing_runs_ahead_of_its_first_commit(
    run: Run, batch: int | None
) -> None:
    run.committed = {"awa_committed": {"items": {"cursor": 1, "done": 2}}}
    attempt = run.attempt()
    rows = attempt.resumption.iterate(range(9), checkpoint_every=1, batch_size=batch)
    for _ in range(4):  # in one transaction, which is not committed
        next(rows)
    attempt.resumption.settle()
    assert run.loop()["done"] == 2
