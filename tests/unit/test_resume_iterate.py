"""Loops: what an attempt keeps of them, where the next one goes on, and where they stop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from celery_awa.errors import InvalidProgress
from celery_awa.model import StopReason
from celery_awa.resume import iteration as iteration_module
from celery_awa.resume.resumption import Resumption
from celery_awa.resume.stops import Interrupt
from tests.runtime_parts import Clock

from .resume_attempt import FakeAttempt, Killed, Records, Run


@pytest.fixture
def run() -> Run:
    return Run()


def items(attempt: FakeAttempt, source: Any = range(10), **options: Any) -> list[Any]:
    return list(attempt.resumption.iterate(source, **options))


def test_a_loop_over_nothing_special_yields_all_and_is_finished_then(run: Run) -> None:
    assert items(run.attempt()) == list(range(10))
    assert run.loop() == {"finished": True, "done": 10}


def test_a_finished_loop_yields_nothing_and_reads_nothing(run: Run) -> None:
    items(run.attempt())
    source = Records([1, 2])
    assert items(run.attempt(), source) == []
    assert source.read_from == []
    assert run.loop() == {"finished": True, "done": 10}


def test_an_empty_source_is_a_finished_loop(run: Run) -> None:
    assert items(run.attempt(), []) == []
    assert run.loop() == {"finished": True, "done": 0}


def test_the_cursor_is_that_of_the_item_before_the_one_that_raised(run: Run) -> None:
    attempt = run.attempt()
    with contextlib.suppress(ZeroDivisionError):
        for item in attempt.resumption.iterate(Records("abcde")):
            if item == "c":
                raise ZeroDivisionError
    attempt.resumption.settle()
    assert run.loop() == {"cursor": {"at": 2}, "done": 2}
    assert items(run.attempt(), Records("abcde")) == ["c", "d", "e"]


def test_a_loop_that_was_left_by_break_did_not_finish_its_item(run: Run) -> None:
    attempt = run.attempt()
    rows = attempt.resumption.iterate(range(10))
    for item in rows:
        if item == 3:
            break
    attempt.resumption.settle()
    assert run.loop()["done"] == 3
    del rows


def test_after_a_break_another_loop_may_begin_though_the_first_is_still_there(run: Run) -> None:
    attempt = run.attempt()
    rows = attempt.resumption.iterate(range(10))
    next(rows)
    assert items(attempt, range(3), name="others") == [0, 1, 2]
    assert rows.done == 0


def test_settling_keeps_the_loops_that_were_left_earlier_too(run: Run) -> None:
    attempt = run.attempt()
    left = attempt.resumption.iterate(range(10))
    for _ in range(3):
        next(left)
    other = attempt.resumption.iterate(range(10), name="others")
    next(other)
    next(other)
    attempt.resumption.settle()
    assert (run.loop()["done"], run.loop("others")["done"]) == (2, 1)


def test_an_iterator_asked_by_next_is_the_same_loop(run: Run) -> None:
    attempt = run.attempt()
    rows = attempt.resumption.iterate(range(4))
    assert next(rows) == 0
    assert list(rows) == [1, 2, 3]
    with pytest.raises(StopIteration):
        next(rows)
    assert run.loop() == {"finished": True, "done": 4}


def test_a_source_that_fails_ends_no_loop_and_is_asked_again_from_the_cursor(run: Run) -> None:
    class Shaky(Records):
        def read(self, cursor: Any | None) -> Iterator[tuple[Any, Any]]:
            for item in super().read(cursor):
                if item[0] == "c" and len(self.read_from) == 1:
                    raise OSError("gone")
                yield item

    attempt = run.attempt()
    source = Shaky("abcd")
    rows = attempt.resumption.iterate(source)
    assert [next(rows), next(rows)] == ["a", "b"]
    with pytest.raises(OSError, match="gone"):
        next(rows)
    attempt.resumption.settle()
    assert run.loop()["done"] == 2
    assert list(rows) == ["c", "d"]
    assert source.read_from == [None, {"at": 2}]
    assert run.loop() == {"finished": True, "done": 4}


def test_a_source_is_closed_at_the_end_and_after_an_error(run: Run) -> None:
    whole, broken = Records("ab"), Records(["a", ValueError("bad")])
    items(run.attempt(), whole)
    with pytest.raises(ValueError, match="bad"):
        items(run.attempt(), broken, name="broken")
    assert (whole.closed, broken.closed) == (1, 1)


# --- checkpoints ---


def test_the_cursor_is_kept_every_so_many_items(run: Run) -> None:
    attempt = run.attempt()
    items(attempt, range(10), checkpoint_every=3, checkpoint_interval=1e6)
    kept = [state["iterations"]["items"]["done"] for state in attempt.kept]
    assert kept == [3, 6, 9, 10]


def test_the_cursor_is_kept_after_so_many_seconds(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, iteration_module)
    attempt = run.attempt()
    for item in attempt.resumption.iterate(range(10), checkpoint_interval=5.0):
        clock.pass_by(2.0)
        if item == 7:
            break
    kept = [state["iterations"]["items"]["done"] for state in attempt.kept]
    assert kept == [3, 6]


def test_a_killed_worker_repeats_what_was_done_since_the_last_checkpoint(run: Run) -> None:
    rows = run.attempt().resumption.iterate(range(10), checkpoint_every=4, checkpoint_interval=1e6)
    for _ in range(7):
        next(rows)
    assert items(run.attempt())[0] == 4


def test_settling_again_without_a_change_keeps_nothing(run: Run) -> None:
    attempt = run.attempt()
    rows = attempt.resumption.iterate(range(10))
    next(rows)
    next(rows)
    attempt.resumption.settle()
    count = len(attempt.kept)
    attempt.resumption.settle(ends=False)
    assert len(attempt.kept) == count == 1


def test_settling_before_any_loop_neither_waits_nor_keeps() -> None:
    class Away(FakeAttempt):
        @property
        def checkpoint(self) -> Any:
            raise AssertionError("it asks the database")

        @checkpoint.setter
        def checkpoint(self, value: Any) -> None: ...

    attempt = Away(Run())
    attempt.resumption.settle()
    assert attempt.kept == []


def test_a_cursor_that_is_no_json_is_an_error_and_settling_only_tells(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    class Odd(Records):
        def read(self, cursor: Any | None) -> Iterator[tuple[Any, Any]]:
            for item, _ in super().read(cursor):
                yield item, {1, 2}

    attempt = run.attempt()
    with pytest.raises(InvalidProgress, match="cursor"):
        items(attempt, Odd("ab"), checkpoint_every=1)
    attempt.resumption.settle()
    assert run.loop() is None
    assert "the last cursor was not kept" in caplog.text


@pytest.mark.parametrize(
    "odd",
    [
        None,
        [],
        {"iterations": []},
        {"iterations": {"items": 7}},
        {"iterations": {"items": {"cursor": None, "done": "many", "skipped": 3, "trying": []}}},
        {"steps": {"names": [1], "finished": "x"}},
    ],
)
def test_what_was_edited_by_hand_and_has_no_form_begins_anew(run: Run, odd: Any) -> None:
    run.metadata["awa"] = odd
    assert items(run.attempt()) == list(range(10))


# --- stops ---


def test_a_stop_is_seen_at_a_checkpoint_with_the_finished_item_kept(run: Run) -> None:
    attempt = run.attempt()
    attempt.stop_after(4)
    rows = attempt.resumption.iterate(range(10))
    assert [next(rows) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(Interrupt) as stopped:
        next(rows)
    assert stopped.value.reason is StopReason.WORKER_STOPPING
    assert run.loop() == {"cursor": 3, "done": 4}
    assert attempt.reports[-1]["current"] == 4
    assert items(run.attempt()) == [4, 5, 6, 7, 8, 9]


def test_except_exception_in_a_body_does_not_swallow_a_stop(run: Run) -> None:
    attempt = run.attempt()
    attempt.stop_after(1)
    with pytest.raises(Interrupt), contextlib.suppress(Exception):
        items(attempt)


def test_a_loop_begins_no_item_when_asked_to_stop_before(run: Run) -> None:
    attempt = run.attempt(stop=StopReason.CANCEL)
    source = Records("ab")
    with pytest.raises(Interrupt):
        items(attempt, source)
    assert source.read_from == []


def test_its_time_being_over_stops_an_attempt_only_once_it_finished_an_item(run: Run) -> None:
    seen: list[list[int]] = []
    for _ in range(4):
        attempt = run.attempt(stop=StopReason.MAX_RUNTIME)
        seen.append([])
        try:
            for item in attempt.resumption.iterate(range(3), checkpoint_every=1):
                seen[-1].append(item)
        except Interrupt:
            continue
        break
    assert seen == [[0], [1], [2], []]


def test_an_interruption_by_hand_tells_the_present_reason(run: Run) -> None:
    for reason in (None, StopReason.CANCEL):
        with pytest.raises(Interrupt) as stopped:
            run.attempt(stop=reason).resumption.interrupt()
        assert stopped.value.reason is reason


def test_tests_hear_of_each_finished_item_before_it_is_kept(run: Run) -> None:
    attempt = run.attempt()
    heard: list[tuple[str, int, int]] = []

    def on_item(name: str, count: int) -> bool:
        heard.append((name, count, len(attempt.kept)))
        if count == 3:
            raise Killed
        return count == 2

    attempt.on_item = on_item
    with pytest.raises(Killed):
        items(attempt, name="rows")
    assert heard == [("rows", 1, 0), ("rows", 2, 0), ("rows", 3, 1)]
    assert run.loop("rows")["done"] == 2


def test_in_a_test_no_checkpoint_falls_due_by_the_clock(run: Run) -> None:
    attempt = run.attempt()
    attempt.on_item = lambda name, count: False
    rows = attempt.resumption.iterate(range(9), checkpoint_interval=1e-9)
    for _ in range(5):
        next(rows)
    assert run.loop() is None


# --- reports ---


def test_progress_follows_from_the_sources_total(run: Run) -> None:
    attempt = run.attempt()
    items(attempt, range(4), checkpoint_every=2, message=lambda item: f"item {item}")
    told = [(one["current"], one["total"], one["message"]) for one in attempt.reports]
    assert told == [(0, 4, None), (2, 4, "item 1"), (4, 4, "item 3"), (4, 4, "item 3")]


def test_a_text_is_told_from_the_begin_and_the_count_goes_on_where_it_was(run: Run) -> None:
    first = run.attempt()
    first.stop_after(2)
    with pytest.raises(Interrupt):
        items(first, Records("abcd"), message="importing")
    again = run.attempt()
    items(again, Records("abcd"), message="importing")
    assert again.reports[0] == {
        "current": 2,
        "total": None,
        "message": "importing",
        "rate": None,
    }


def test_the_total_is_asked_once_and_only_in_an_attempt(run: Run) -> None:
    class Counted(Records):
        asked = 0

        def total(self) -> float | None:
            self.asked += 1
            return 4

    source = Counted("abcd")
    items(run.attempt(), source, checkpoint_every=1)
    assert source.asked == 1
    list(Resumption(None).iterate(source))
    assert source.asked == 1


def test_the_pace_is_that_of_this_attempt(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, iteration_module)
    run.metadata = {"awa": {"iterations": {"items": {"cursor": 99, "done": 100}}}}
    attempt = run.attempt()
    for _ in attempt.resumption.iterate(range(110), checkpoint_every=1):
        clock.pass_by(0.5)
    assert [one["rate"] for one in attempt.reports[:4]] == [None, 2.0, 2.0, 2.0]


# --- batches ---


def test_batches_are_lists_with_a_cursor_after_each(run: Run) -> None:
    attempt = run.attempt()
    assert items(attempt, range(7), batch_size=3) == [[0, 1, 2], [3, 4, 5], [6]]
    assert [state["iterations"]["items"]["done"] for state in attempt.kept] == [3, 6, 7, 7]


def test_a_batch_that_was_not_finished_comes_again(run: Run) -> None:
    attempt = run.attempt()
    rows = attempt.resumption.iterate(range(7), batch_size=3)
    next(rows)
    next(rows)
    attempt.resumption.settle()
    assert run.loop() == {"cursor": 2, "done": 3}
    assert items(run.attempt(), range(7), batch_size=2) == [[3, 4], [5, 6]]


# --- names and places ---


def test_a_name_is_used_once_an_attempt(run: Run) -> None:
    attempt = run.attempt()
    items(attempt)
    with pytest.raises(RuntimeError, match="name="):
        items(attempt)


def test_a_loop_inside_anothers_is_told_when_the_outer_one_goes_on(run: Run) -> None:
    attempt = run.attempt()
    outer = attempt.resumption.iterate(range(3), name="outer")
    next(outer)
    items(attempt, range(2), name="inner")
    with pytest.raises(RuntimeError, match=r"'inner'.*inside the loop 'outer'.*track"):
        next(outer)


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"name": ""}, ValueError, "name"),
        ({"name": "a/b"}, ValueError, "name"),
        ({"name": "x" * 101}, ValueError, "name"),
        ({"name": "\ud800"}, ValueError, "name"),
        ({"name": "a\0"}, ValueError, "name"),
        ({"name": 3}, TypeError, "name"),
        ({"batch_size": 0}, ValueError, "batch_size"),
        ({"batch_size": 1.5}, TypeError, "batch_size"),
        ({"checkpoint_every": 0}, ValueError, "checkpoint_every"),
        ({"checkpoint_every": True}, TypeError, "checkpoint_every"),
        ({"checkpoint_interval": 0}, ValueError, "checkpoint_interval"),
        ({"checkpoint_interval": float("nan")}, ValueError, "checkpoint_interval"),
        ({"checkpoint_interval": "1"}, TypeError, "checkpoint_interval"),
        ({"on_item_error": "skip"}, TypeError, "on_item_error"),
        ({"kill_limit": 0}, ValueError, "kill_limit"),
        ({"message": 3}, TypeError, "message"),
        ({"unknown": 3}, TypeError, "unknown"),
    ],
)
@pytest.mark.parametrize("inside", [True, False])
def test_what_is_not_allowed_is_refused_at_the_call(
    run: Run, options: dict[str, Any], error: type[Exception], told: str, inside: bool
) -> None:
    resumption = run.attempt().resumption if inside else Resumption(None)
    with pytest.raises(error, match=told):
        resumption.iterate(range(3), **options)


def test_outside_an_attempt_loops_just_run_and_may_nest() -> None:
    resumption = Resumption(None)
    seen = [
        (outer, inner)
        for outer in resumption.iterate(range(2))
        for inner in resumption.iterate(range(2))
    ]
    assert seen == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert list(Resumption(None).iterate(range(3), batch_size=2)) == [[0, 1], [2]]
    Resumption(None).settle()
