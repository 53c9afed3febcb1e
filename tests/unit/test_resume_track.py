"""Progress of any loop, how fast it goes, and what is raised to leave a task."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_awa.model import StopReason
from celery_awa.resume import track as track_module
from celery_awa.resume.pace import Pace
from celery_awa.resume.resumption import Resumption
from celery_awa.resume.stops import Interrupt, Park, Snooze, Stop
from tests.runtime_parts import Clock

from .resume_attempt import FakeAttempt, Run


@pytest.fixture
def attempt() -> FakeAttempt:
    return Run().attempt(stop=StopReason.CANCEL)  # which it does not look at


def told(attempt: FakeAttempt) -> list[tuple[Any, ...]]:
    return [(one["current"], one["total"], one["message"]) for one in attempt.reports]


def test_reports_come_at_the_first_item_ten_times_a_second_and_at_the_end(
    attempt: FakeAttempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, track_module)
    for _ in attempt.resumption.track("abcdef", message=lambda item: f"at {item}"):
        clock.pass_by(0.0501)
    assert told(attempt) == [
        (0, 6, "at a"),
        (2, 6, "at c"),
        (4, 6, "at e"),
        (6, 6, "at f"),
    ]
    assert attempt.reports[-1]["rate"] == pytest.approx(20, rel=0.01)
    assert attempt.kept == []


def test_the_total_is_what_is_given_else_the_length_else_unknown(attempt: FakeAttempt) -> None:
    track = attempt.resumption.track
    for iterable, total in (([1], 9), ([1], None), (iter([1]), None)):
        list(track(iterable, total=total))
    assert [one["total"] for one in attempt.reports[1::2]] == [9, 1, None]


def test_nothing_to_track_is_all_done(attempt: FakeAttempt) -> None:
    assert list(attempt.resumption.track([], message=str)) == []
    assert told(attempt) == [(0, 0, None)]


def test_a_loop_that_is_left_reports_no_end(attempt: FakeAttempt) -> None:
    for _ in attempt.resumption.track(range(3), message="working"):
        break
    assert told(attempt) == [(0, 3, "working")]


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"total": -1}, ValueError),
        ({"total": float("inf")}, ValueError),
        ({"total": "3"}, TypeError),
        ({"total": True}, TypeError),
        ({"message": 3}, TypeError),
    ],
)
def test_what_is_not_allowed_is_refused_at_the_call(
    attempt: FakeAttempt, options: dict[str, Any], error: type[Exception], inside: bool
) -> None:
    resumption = attempt.resumption if inside else Resumption(None)
    with pytest.raises(error, match=next(iter(options))):
        resumption.track(range(3), **options)


def test_outside_an_attempt_it_is_the_loop_alone() -> None:
    assert list(Resumption(None).track(range(3), message="x")) == [0, 1, 2]


# --- the pace ---


def test_the_pace_is_unknown_at_first_and_then_the_average() -> None:
    pace = Pace(100, now=50.0)
    assert pace.rate(105, 50.05) is None
    assert pace.rate(110, 51.0) == 10
    assert pace.rate(140, 52.0) == 20


def test_the_pace_forgets_what_is_long_ago() -> None:
    pace = Pace(0, now=0.0)
    for second in range(1, 61):
        pace.rate(second * 100, float(second))
    for second in range(61, 101):
        last = pace.rate(6_000 + second - 60, float(second))
    assert last == pytest.approx(1, abs=0.1)


def test_the_pace_after_a_long_pause_is_the_pauses() -> None:
    pace = Pace(0, now=0.0)
    pace.rate(1_000, 1.0)
    assert pace.rate(1_001, 1_001.0) == 0.001


def test_the_pace_has_three_digits_and_is_never_negative() -> None:
    pace = Pace(0, now=0.0)
    assert pace.rate(123_456, 1.0) == 123_000
    assert (pace.rate(0, 2.0) or 0) >= 0


@given(st.lists(st.tuples(st.floats(0.001, 20), st.integers(0, 1_000)), min_size=1, max_size=30))
def test_the_pace_lies_between_the_slowest_and_the_fastest(steps: list[tuple[float, int]]) -> None:
    pace, now, count, rates = Pace(0, now=0.0), 0.0, 0, []
    last_now, last_count = 0.0, 0
    for seconds, items in steps:
        now, count = now + seconds, count + items
        rate = pace.rate(count, now)
        if now - last_now >= 0.1:
            rates.append((count - last_count) / (now - last_now))
            last_now, last_count = now, count
            assert rate is not None
            assert min(rates) * 0.99 <= rate <= max(rates) * 1.01


# --- stops ---


def test_stops_are_no_exceptions_and_say_what_becomes_of_the_task() -> None:
    assert issubclass(Stop, BaseException)
    assert not issubclass(Stop, Exception)
    told = {
        Interrupt(): "was interrupted",
        Interrupt(StopReason.CANCEL): "was interrupted: cancel",
        Snooze(2.5): "goes on in 2.5 s",
        Park("secret", None): "waits for a callback",
        Park("secret", 60): "waits for a callback, for 60 s at most",
    }
    assert {stop: str(stop) for stop in told} == told


def test_stops_carry_what_they_are_for() -> None:
    park = Park("token", None)
    assert (park.token, park.timeout) == ("token", None)
    assert Snooze(3).seconds == 3
    assert Interrupt(StopReason.CANCEL).reason is StopReason.CANCEL
