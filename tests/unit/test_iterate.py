"""Loops over attempts that crash, fail, are stopped and go on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_awa.errors import TooManyItemErrors
from celery_awa.model import StopReason
from celery_awa.resume import RetryItem, SkipItems, SourceBase, Unreadable
from celery_awa.resume.stops import Interrupt

from .resumed import MemoryAttempt, Row, Transaction

#: What ends an attempt, and at which of its items, counted from 0.
ENDS = st.lists(
    st.tuples(st.sampled_from(["crash", "raise", "stop"]), st.integers(0, 12)), max_size=8
)


class Crash(BaseException):
    """Stands for SIGKILL: nothing of the attempt runs after it."""


def work(
    row: Row, done: list[int], count: int, ends: list[tuple[str, int]], **options: Any
) -> list[int]:
    """Loop over numbers in as many attempts as it takes; answers with what each one began."""
    firsts = []
    for how, where in [*ends, ("end", count)]:
        attempt = row.attempt()
        loop = attempt.resumption.iterate(range(count), **options)
        try:
            for turn, piece in enumerate(loop):
                if not turn:
                    firsts.append(piece if isinstance(piece, int) else piece[0])
                if turn == where and how == "raise":
                    raise OSError
                done += [piece] if isinstance(piece, int) else piece
                if turn == where and how == "stop":
                    attempt.stop_reason = StopReason.WORKER_STOPPING
                if turn == where and how == "crash":
                    raise Crash
            else:
                break
        except (OSError, Interrupt):
            attempt.resumption.settle()
        except Crash:
            pass
    return firsts


@given(ENDS, st.integers(0, 60), st.integers(1, 5), st.sampled_from([None, 1, 3]))
def test_every_item_is_done_in_order_and_what_is_repeated_is_bounded(
    ends: list[tuple[str, int]], count: int, every: int, batch: int | None
) -> None:
    row, done = Row(), []
    work(
        row,
        done,
        count,
        ends,
        checkpoint_every=every,
        checkpoint_interval=1000,
        batch_size=batch,
    )
    assert sorted(set(done)) == list(range(count))
    # Going back is what a crash does, and by no more than was not kept.
    back = [before + 1 - after for before, after in itertools.pairwise(done)]
    assert all(0 <= steps <= (batch or every) for steps in back)
    crashes = sum(how == "crash" for how, _ in ends)
    assert sum(steps > 0 for steps in back) <= crashes


@given(ENDS, st.integers(0, 40), st.sampled_from([None, 4]), st.data())
def test_with_the_cursor_in_the_transaction_every_item_is_done_exactly_once(
    ends: list[tuple[str, int]], count: int, batch: int | None, data: st.DataObject
) -> None:
    row, table = Row(), []
    for how, where in [*ends, ("end", count)]:
        attempt = row.attempt()
        loop = attempt.resumption.iterate(
            range(count), batch_size=batch, checkpoint_every=2, kill_limit=100
        )
        try:
            for turn, piece in enumerate(loop):
                transaction = Transaction(attempt, table)
                transaction.rows = [piece] if isinstance(piece, int) else piece
                loop.checkpoint_in(transaction)
                if turn == where and how == "raise":
                    raise OSError  # rolls back
                if turn == where and how == "crash" and data.draw(st.booleans()):
                    raise Crash  # before the commit
                transaction.commit()
                if turn == where and how == "crash":
                    raise Crash  # after it
                if turn == where and how == "stop":
                    attempt.stop_reason = StopReason.WORKER_STOPPING
        except (OSError, Interrupt):
            attempt.resumption.settle()
        except Crash:
            pass
    assert table == list(range(count))


def test_a_loop_that_is_over_hands_out_nothing_in_a_later_attempt() -> None:
    row, done = Row(), []
    work(row, done, 5, [])
    again = row.attempt().resumption.iterate(range(5))
    assert list(again) == []
    assert again.done == 5
    assert done == list(range(5))


def test_a_break_leaves_the_item_unfinished_and_a_closed_loop_makes_room() -> None:
    row = Row()
    first = row.attempt()
    rows = first.resumption.iterate(range(9), name="rows")
    for number in rows:
        if number == 3:
            break
    with pytest.raises(RuntimeError, match="rows"):
        list(first.resumption.iterate(range(3), name="more"))
    rows.close()
    assert list(first.resumption.iterate(range(3), name="other")) == [0, 1, 2]
    first.resumption.settle()
    assert next(row.attempt().resumption.iterate(range(9), name="rows")) <= 3


def test_a_second_loop_of_the_same_name_is_an_error_and_another_name_is_another_cursor() -> None:
    attempt = Row().attempt()
    assert list(attempt.resumption.iterate(range(2))) == [0, 1]
    with pytest.raises(RuntimeError, match="name="):
        attempt.resumption.iterate(range(2))
    assert list(attempt.resumption.iterate(range(2), name="more")) == [0, 1]


def test_max_runtime_stops_a_loop_after_an_item_and_the_other_reasons_before_one() -> None:
    for reason in StopReason:
        attempt = Row().attempt()
        attempt.stop_reason = reason
        loop = attempt.resumption.iterate(range(5), checkpoint_every=1)
        if reason is StopReason.MAX_RUNTIME:
            assert next(loop) == 0
        with pytest.raises(Interrupt) as stopped:
            next(loop)
        assert stopped.value.reason is reason


def test_items_that_fail_are_left_out_recorded_and_told_apart_in_later_attempts() -> None:
    row = Row()
    first = row.attempt()
    rows = first.resumption.iterate(range(6), on_item_error=SkipItems(limit=3), checkpoint_every=1)
    done = []
    for number in rows:
        with rows.item():
            if number % 2:
                raise ValueError(f"no {number}")
            done.append(number)
        if number == 3:
            break
    second = row.attempt()
    rows = second.resumption.iterate(range(6), on_item_error=SkipItems(limit=3))
    for number in rows:
        with rows.item():
            if number == 5:
                raise ValueError("no 5")
            done.append(number)
    assert set(done) == {0, 2, 3, 4}
    kept = row.metadata["awa"]["iterations"]["items"]
    assert kept["skipped"]["count"] == 2
    assert [entry["item"] for entry in kept["skipped"]["last"]] == [2, 6]
    assert "no 1" in kept["skipped"]["last"][0]["error"]


def test_one_error_too_many_is_the_tasks() -> None:
    attempt = Row().attempt()
    rows = attempt.resumption.iterate(range(9), on_item_error=SkipItems(limit=2))

    def fail_all() -> None:
        for number in rows:
            with rows.item():
                raise ValueError(str(number))

    with pytest.raises(TooManyItemErrors) as told:
        fail_all()
    assert isinstance(told.value.__cause__, ValueError)


def test_what_leaves_the_body_on_purpose_is_no_items_error() -> None:
    attempt = Row().attempt()
    rows = attempt.resumption.iterate(range(9), on_item_error=SkipItems())
    next(rows)
    for leaves in (KeyError, Interrupt, SystemExit):  # let_pass names the first
        with pytest.raises(leaves), rows.item():
            raise leaves


def test_an_item_is_tried_again_and_then_its_error_is_the_tasks() -> None:
    row, tried = Row(), []
    attempt = row.attempt()
    rows = attempt.resumption.iterate(range(5), on_item_error=RetryItem(times=2))

    def try_all() -> None:
        for number in rows:
            with rows.item():
                tried.append(number)
                if number == 1 and tried.count(1) < 3:
                    raise ValueError
                if number == 3:
                    raise OSError("the disk is away")

    with pytest.raises(OSError, match="the disk is away"):
        try_all()
    assert tried == [0, 1, 1, 1, 2, 3, 3, 3]
    attempt.resumption.settle()
    assert next(row.attempt().resumption.iterate(range(5))) == 3


def test_a_policy_without_the_guard_is_told_at_the_first_item() -> None:
    rows = Row().attempt().resumption.iterate(range(5), on_item_error=SkipItems())
    next(rows)
    with pytest.raises(RuntimeError, match=r"with rows\.item\(\)"):
        next(rows)


class Spoilt(SourceBase):
    """Numbers, of which one cannot be read."""

    def read(self, cursor: Any) -> Iterator[tuple[Any, int]]:
        for number in range(0 if cursor is None else cursor + 1, 6):
            yield (Unreadable(ValueError("no 2")) if number == 2 else number), number


@pytest.mark.parametrize("batch", [None, 1, 2, 4])
def test_what_cannot_be_read_is_an_items_error(batch: int | None) -> None:
    row = Row()
    rows = row.attempt().resumption.iterate(Spoilt(), batch_size=batch)

    def read_all() -> None:
        for _ in rows:
            pass

    with pytest.raises(ValueError, match="no 2"):
        read_all()
    row = Row()
    rows = row.attempt().resumption.iterate(Spoilt(), batch_size=batch, on_item_error=SkipItems())
    found = []
    for piece in rows:
        with rows.item():
            found += piece if isinstance(piece, list) else [piece]
    assert found == [0, 1, 3, 4, 5]
    assert rows.done == 6
    (entry,) = row.metadata["awa"]["iterations"]["items"]["skipped"]["last"]
    assert entry["item"] == 3


@pytest.mark.parametrize("clean", [False, True])
def test_an_item_that_kills_its_worker_is_left_out_after_so_many_deaths(clean: bool) -> None:
    row, done, deaths = Row(), [], 0
    for _ in range(5):
        attempt = row.attempt()
        rows = attempt.resumption.iterate(range(5), kill_limit=2)
        try:
            for number in rows:
                if number == 2:
                    raise Crash
                done.append(number)
            break
        except Crash:
            deaths += 1
            if clean:  # an error is no death
                attempt.resumption.settle()
    if clean:
        assert (deaths, set(done)) == (5, {0, 1})
        return
    assert deaths == 2
    assert done == [0, 1, 3, 4]
    (entry,) = row.metadata["awa"]["iterations"]["items"]["skipped"]["last"]
    assert entry["item"] == 3
    assert "2 times" in entry["error"]


def test_progress_follows_the_source() -> None:
    row = Row()
    rows = row.attempt().resumption.iterate(
        range(4), checkpoint_every=1, message=lambda number: f"number {number}"
    )
    assert list(rows) == [0, 1, 2, 3]
    told = [(one["current"], one["total"], one["message"]) for one in row.reports]
    assert told[:3] == [(1, 4, "number 0"), (2, 4, "number 1"), (3, 4, "number 2")]
    assert told[-1][:2] == (4, 4)


def test_checkpoints_come_by_count_and_by_time_and_cost_nothing_between() -> None:
    attempt = Row().attempt()
    rows = attempt.resumption.iterate(range(1000), checkpoint_every=250, checkpoint_interval=1000)
    assert len(list(rows)) == 1000
    assert attempt.keeps <= 5
    attempt = Row().attempt()
    rows = attempt.resumption.iterate(range(10), checkpoint_interval=1e-9)
    assert len(list(rows)) == 10
    assert attempt.keeps >= 10


def test_whoever_tests_hears_of_each_item_and_may_have_it_kept() -> None:
    row, heard = Row(), []
    attempt = row.attempt()

    def hear(name: str, done: int) -> bool:
        heard.append((name, done))
        return done == 2

    attempt.on_item = hear
    rows = attempt.resumption.iterate(range(4), checkpoint_interval=1000)
    for _ in range(3):
        next(rows)
    assert heard == [("items", 1), ("items", 2)]
    assert row.metadata["awa"]["iterations"]["items"]["done"] == 2


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"batch_size": 0}, ValueError),
        ({"batch_size": 1.5}, TypeError),
        ({"checkpoint_every": 0}, ValueError),
        ({"checkpoint_interval": 0}, ValueError),
        ({"checkpoint_interval": "1"}, TypeError),
        ({"kill_limit": 0}, ValueError),
        ({"on_item_error": "skip"}, (TypeError, ValueError)),
        ({"name": ""}, ValueError),
        ({"name": "a/b"}, ValueError),
        ({"name": 3}, TypeError),
    ],
)
def test_an_argument_that_is_not_allowed_is_told_at_the_call(
    options: dict[str, Any], error: Any
) -> None:
    attempt: MemoryAttempt = Row().attempt()
    with pytest.raises(error, match=next(iter(options))):
        attempt.resumption.iterate(range(3), **options)
    assert list(attempt.resumption.iterate(range(3))) == [0, 1, 2]


@pytest.mark.parametrize("value", ["abc", {"a": 1}, {1, 2}, iter([1]), 5, None])
def test_what_cannot_be_read_again_is_told_with_what_to_use(value: Any) -> None:
    with pytest.raises(TypeError):
        Row().attempt().resumption.iterate(value)
