"""The buffer of one attempt: what is in it, how it counts, and what a claim brings."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_awa.errors import InvalidProgress, ProgressTooLarge
from celery_awa.model import Snapshot
from celery_awa.progress import ProgressBuffer, compose

from .progress_page import Page


def metadata_of(buffer: ProgressBuffer) -> Any:
    return (buffer.value() or {}).get("metadata")


# --- reporting ---


def test_nothing_reported_is_no_progress() -> None:
    buffer = ProgressBuffer()

    assert buffer.value() is None
    assert buffer.snapshot() == Snapshot(0, None)
    assert not buffer.pending


def test_the_last_of_several_reports_is_in_the_snapshot() -> None:
    buffer = ProgressBuffer()
    for percent in (10, 20, 30):
        buffer.set_progress(percent, f"at {percent}")

    assert buffer.snapshot() == Snapshot(3, '{"percent":30,"message":"at 30"}')


def test_a_thousand_changes_leave_the_last_one_pending() -> None:
    buffer = ProgressBuffer()
    for number in range(1, 1001):
        buffer.update_metadata({"last_id": number})

    assert buffer.generation == 1000
    assert buffer.pending
    assert metadata_of(buffer) == {"last_id": 1000}


def test_set_progress_without_a_message_removes_the_message() -> None:
    buffer = ProgressBuffer()
    buffer.set_progress(50, "x", current=5, total=10)
    buffer.set_progress(60)

    assert buffer.value() == {"percent": 60}


def test_set_progress_with_none_as_message_removes_the_message() -> None:
    buffer = ProgressBuffer()
    buffer.set_progress(50, "x")
    buffer.set_progress(50, None)

    assert buffer.value() == {"percent": 50}


def test_set_progress_leaves_the_metadata_alone() -> None:
    buffer = ProgressBuffer()
    buffer.update_metadata({"a": 1})
    buffer.set_progress(50)

    assert buffer.value() == {"percent": 50, "metadata": {"a": 1}}


def test_a_percent_of_none_is_indeterminate_and_a_missing_one_is_absent() -> None:
    buffer = ProgressBuffer()
    buffer.set_progress(None)
    assert buffer.value() == {"percent": None}

    buffer.set_progress(message="x")
    assert buffer.value() == {"message": "x"}


def test_percent_may_fall() -> None:
    buffer = ProgressBuffer()
    buffer.set_progress(100)
    buffer.set_progress(3)

    assert buffer.value() == {"percent": 3}


def test_metadata_is_merged_at_the_top_level_and_replaced_below() -> None:
    buffer = ProgressBuffer()
    buffer.update_metadata({"a": 1, "b": 1, "nested": {"x": 1, "y": 1}})
    buffer.update_metadata({"b": 2, "c": None, "nested": {"x": 2}})

    assert metadata_of(buffer) == {"a": 1, "b": 2, "c": None, "nested": {"x": 2}}


def test_metadata_alone_sets_no_percent() -> None:
    buffer = ProgressBuffer()
    buffer.update_metadata({"a": 1})

    assert buffer.value() == {"metadata": {"a": 1}}


def test_an_empty_update_is_no_change() -> None:
    buffer = ProgressBuffer()
    buffer.update_metadata({})

    assert buffer.generation == 0
    assert buffer.value() is None


def test_values_are_written_down_at_the_call() -> None:
    buffer = ProgressBuffer()
    mine: dict[str, Any] = {"rows": [1]}
    buffer.update_metadata(mine)
    mine["rows"].append(2)
    mine["more"] = True

    assert metadata_of(buffer) == {"rows": [1]}


def test_the_value_is_a_fresh_copy_each_time() -> None:
    buffer = ProgressBuffer()
    buffer.update_metadata({"rows": [1]})
    (buffer.value() or {})["metadata"]["rows"].append(2)

    assert metadata_of(buffer) == {"rows": [1]}


@pytest.mark.parametrize("bad", [{"a": {1}}, {"a": 1, "b": float("nan")}, {"ok": 1, 2: 2}])
def test_a_refused_update_leaves_the_buffer_as_it_was(bad: dict[Any, Any]) -> None:
    page = Page()
    buffer = ProgressBuffer(sink=page)
    buffer.set_progress(1, "x")
    buffer.update_metadata({"a": 0})
    before = (buffer.snapshot(), list(page.calls))

    with pytest.raises(InvalidProgress):
        buffer.update_metadata(bad)
    with pytest.raises(InvalidProgress):
        buffer.set_progress(2, "\x00")
    assert (buffer.snapshot(), page.calls) == before


def test_two_threads_lose_no_change() -> None:
    buffer = ProgressBuffer(limit=1_000_000)
    start = threading.Barrier(2)

    def report(name: str) -> None:
        start.wait(10)
        for number in range(500):
            buffer.update_metadata({f"{name}{number}": number})
            buffer.set_progress(number // 5)

    threads = [threading.Thread(target=report, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert buffer.generation == 2000
    assert len(metadata_of(buffer)) == 1000


@given(st.lists(st.integers(0, 100), min_size=1))
def test_percent_and_message_are_never_a_mixed_pair(percents: list[int]) -> None:
    page = Page()
    buffer = ProgressBuffer(sink=page)
    for percent in percents:
        buffer.set_progress(percent, str(percent))

    for _, _, data in page.calls:
        brief = json.loads(data)
        assert brief["message"] == str(brief["percent"])


# --- the limit ---


def test_a_snapshot_one_byte_above_the_limit_is_refused_and_the_last_good_one_stays() -> None:
    buffer = ProgressBuffer()
    around = len('{"metadata":{"a":""}}')
    buffer.update_metadata({"a": "x" * (65_536 - around)})
    good = buffer.snapshot()
    assert good.json is not None
    assert len(good.json) == 65_536

    with pytest.raises(ProgressTooLarge) as caught:
        buffer.update_metadata({"a": "x" * (65_537 - around)})

    assert (caught.value.size, caught.value.limit) == (65_537, 65_536)
    assert "65,537" in str(caught.value)
    assert "65,536" in str(caught.value)
    assert buffer.snapshot() == good


def test_the_limit_counts_for_messages_too() -> None:
    buffer = ProgressBuffer(limit=100)
    buffer.set_progress(1, "x" * 50)
    buffer.update_metadata({"a": 1})
    good = buffer.snapshot()

    with pytest.raises(ProgressTooLarge):
        buffer.set_progress(2, "x" * 70)
    assert buffer.snapshot() == good


def test_the_limit_counts_bytes_not_characters() -> None:
    buffer = ProgressBuffer(limit=100)

    with pytest.raises(ProgressTooLarge) as caught:
        buffer.set_progress(1, "€" * 40)
    assert caught.value.size == len('{"percent":1,"message":""}') + 120


texts = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=10)
reports = st.one_of(
    st.tuples(st.integers(0, 100), st.none() | texts),
    st.dictionaries(texts, texts | st.none(), min_size=1, max_size=4),
)


def report_all(buffer: ProgressBuffer, changes: list[Any]) -> None:
    for change in changes:
        if isinstance(change, dict):
            buffer.update_metadata(change)
        else:
            buffer.set_progress(*change)


@given(st.lists(reports, min_size=1))
def test_the_size_that_counts_is_the_size_of_the_snapshot(changes: list[Any]) -> None:
    sizes = []
    buffer = ProgressBuffer()
    for change in changes:
        report_all(buffer, [change])
        sizes.append(len((buffer.snapshot().json or "").encode()))

    report_all(ProgressBuffer(limit=max(sizes)), changes)
    with pytest.raises(ProgressTooLarge) as caught:
        report_all(ProgressBuffer(limit=max(sizes) - 1), changes)
    assert caught.value.size == max(sizes)


# --- what the database confirmed ---


def test_a_confirmed_generation_is_no_longer_pending() -> None:
    buffer = ProgressBuffer()
    buffer.set_progress(1)
    buffer.set_progress(2)

    buffer.acknowledge(1)
    assert buffer.pending
    buffer.acknowledge(2)
    assert not buffer.pending


def test_a_late_confirmation_takes_nothing_back() -> None:
    buffer = ProgressBuffer()
    for percent in range(5):
        buffer.set_progress(percent)
    buffer.acknowledge(5)
    buffer.acknowledge(3)

    assert buffer.acknowledged == 5
    assert not buffer.pending


# --- what a claim brings ---

KEPT = {"percent": 70, "message": "kept", "metadata": {"last_id": 6, "old": True}}


@pytest.mark.parametrize("kept", [None, {}])
def test_a_claim_that_brings_nothing_changes_nothing(kept: dict[str, Any] | None) -> None:
    buffer = ProgressBuffer()
    buffer.set_progress(5)

    assert buffer.lay_over(kept)
    assert buffer.value() == {"percent": 5}


def test_an_attempt_that_reported_nothing_shows_what_was_kept_and_has_nothing_pending() -> None:
    buffer = ProgressBuffer()

    assert buffer.lay_over(KEPT)
    assert buffer.value() == KEPT
    assert buffer.generation == 0
    assert not buffer.pending


def test_reported_metadata_is_laid_over_the_kept_key_by_key() -> None:
    buffer = ProgressBuffer()
    buffer.update_metadata({"last_id": 7, "new": 1})

    assert buffer.lay_over(KEPT)
    assert buffer.value() == {
        "percent": 70,
        "message": "kept",
        "metadata": {"last_id": 7, "old": True, "new": 1},
    }
    assert buffer.generation == 1
    assert buffer.pending


def test_a_reported_percent_wins_over_the_kept_one_with_its_message() -> None:
    buffer = ProgressBuffer()
    buffer.set_progress(5)

    assert buffer.lay_over(KEPT)
    assert buffer.value() == {"percent": 5, "metadata": KEPT["metadata"]}


def test_reports_after_the_claim_go_on_from_what_was_kept() -> None:
    buffer = ProgressBuffer()
    buffer.lay_over(KEPT)
    buffer.update_metadata({"last_id": 8})
    buffer.set_progress(80)

    assert buffer.value() == {"percent": 80, "metadata": {"last_id": 8, "old": True}}
    assert buffer.generation == 2


def test_a_checkpoint_is_kept_whole_where_both_together_are_too_large() -> None:
    kept = {"percent": 1, "metadata": {"big": "k" * 150}}
    page = Page()
    buffer = ProgressBuffer(limit=220, sink=page)
    buffer.set_progress(50, "mine")
    buffer.update_metadata({"mine": "m" * 100})

    assert buffer.lay_over(kept) is False
    assert buffer.value() == {"percent": 50, "message": "mine", "metadata": {"big": "k" * 150}}
    assert page.whole() == buffer.value()


def test_a_reported_message_gives_way_too_where_it_does_not_fit_beside_the_checkpoint() -> None:
    kept = {"metadata": {"big": "k" * 150}}
    page = Page()
    buffer = ProgressBuffer(limit=200, sink=page)
    buffer.set_progress(50, "m" * 100)

    assert buffer.lay_over(kept) is False
    assert buffer.value() == kept
    assert page.whole() == kept


def test_reported_metadata_too_large_beside_a_kept_message_is_taken_back_from_the_page() -> None:
    kept = {"message": "k" * 150}
    page = Page()
    buffer = ProgressBuffer(limit=200, sink=page)
    buffer.update_metadata({"mine": "m" * 100})

    assert buffer.lay_over(kept) is False
    assert buffer.value() == kept
    assert page.whole() == kept


@pytest.mark.parametrize("kept", [KEPT, {"percent": 70, "message": "kept"}, {"metadata": {"b": 1}}])
@pytest.mark.parametrize("mine", [{"a": "é"}, {"last_id": 7, "new": [1, 2]}])
def test_the_limit_counts_what_is_laid_over_to_the_byte(
    kept: dict[str, Any], mine: dict[str, Any]
) -> None:
    def laid_over(limit: int) -> tuple[ProgressBuffer, bool]:
        buffer = ProgressBuffer(limit=limit)
        buffer.update_metadata(mine)
        return buffer, buffer.lay_over(kept)

    whole = laid_over(1000)[0].snapshot().json or ""
    size = len(whole.encode())

    assert laid_over(size)[1] is True
    assert laid_over(size)[0].snapshot().json == whole
    assert laid_over(size - 1)[1] is False
    assert laid_over(size - 1)[0].value() == kept


def test_the_limit_counts_what_the_claim_brought_to_the_byte() -> None:
    buffer = ProgressBuffer(limit=len('{"percent":50,"message":"12345"}'))
    buffer.lay_over({"percent": 7})
    buffer.set_progress(50, "12345")

    with pytest.raises(ProgressTooLarge):
        buffer.set_progress(50, "123456")


def test_a_checkpoint_above_a_lowered_limit_is_kept() -> None:
    buffer = ProgressBuffer(limit=20)

    assert buffer.lay_over(KEPT)
    assert buffer.value() == KEPT


REPORTS_OF_FIVE: list[Callable[[ProgressBuffer], None]] = [
    lambda buffer: buffer.set_progress(5),
    lambda buffer: buffer.update_metadata({"a": 5}),
]


@pytest.mark.parametrize("reported", [0, 1, 2])
def test_a_checkpoint_above_a_lowered_limit_stands_in_the_row_alone(reported: int) -> None:
    page = Page()
    buffer = ProgressBuffer(limit=35, sink=page)
    for report in REPORTS_OF_FIVE[:reported]:
        report(buffer)

    assert buffer.lay_over(KEPT) is (reported == 0)
    assert buffer.value() == KEPT
    # A reader of the page finds no news that it would write over the row.
    assert (page.generation, page.whole()) == (0, None)
    later = Page()
    buffer.attach(later)
    assert (later.generation, later.whole()) == (0, None)


def test_what_shrinks_a_checkpoint_to_the_limit_is_on_the_page_as_a_whole() -> None:
    page = Page()
    buffer = ProgressBuffer(limit=100, sink=page)
    buffer.lay_over({"percent": 5, "metadata": {"a": 1, "big": "x" * 100}})
    with pytest.raises(ProgressTooLarge):
        buffer.set_progress(6)
    buffer.update_metadata({"big": None})

    assert page.whole() == buffer.value() == {"percent": 5, "metadata": {"a": 1, "big": None}}
    assert page.generation == 1


@pytest.mark.parametrize(
    "kept",
    [
        {"percent": 5, "later_version": {"x": [1]}},
        {"percent": 5, "metadata": {"huge": 10**40, "deep": json.loads("[" * 90 + "]" * 90)}},
        {"percent": "odd", "message": 7},
    ],
)
def test_what_this_version_would_not_write_itself_is_kept_as_it_is(kept: dict[str, Any]) -> None:
    buffer = ProgressBuffer()

    assert buffer.lay_over(kept)
    assert buffer.value() == kept


@pytest.mark.parametrize("metadata", [None, [], "x", {}])
def test_kept_metadata_that_is_no_object_is_no_checkpoint(metadata: Any) -> None:
    buffer = ProgressBuffer()
    buffer.lay_over({"percent": 5, "metadata": metadata})
    buffer.update_metadata({"a": 1})

    assert buffer.value() == {"percent": 5, "metadata": {"a": 1}}


def test_a_kept_float_is_still_a_float_when_it_is_written_again() -> None:
    buffer = ProgressBuffer()
    buffer.lay_over({"metadata": {"x": 1e20}})

    assert buffer.snapshot().json == '{"metadata":{"x":100000000000000000000.0}}'


# --- the sink ---


def test_each_change_is_in_the_sink_when_the_call_returns() -> None:
    page = Page()
    buffer = ProgressBuffer(sink=page)
    buffer.set_progress(50, "x")
    buffer.update_metadata({"a": 1})
    buffer.update_metadata({"b": "é"})

    assert page.calls == [
        ("brief", 1, b'{"percent":50,"message":"x"}'),
        ("metadata", 2, b'{"a":1}'),
        ("metadata", 3, '{"a":1,"b":"é"}'.encode()),
    ]


def test_an_equal_report_still_brings_its_generation_to_the_sink() -> None:
    page = Page()
    buffer = ProgressBuffer(sink=page)
    for _ in range(2):
        buffer.set_progress(50)
        buffer.update_metadata({"a": 1})

    assert [generation for _, generation, _ in page.calls] == [1, 2, 3, 4]


def test_a_new_sink_gets_the_present_state_the_older_record_first() -> None:
    buffer = ProgressBuffer()
    buffer.update_metadata({"a": 1})
    buffer.set_progress(50)
    page = Page()
    buffer.attach(page)

    assert page.calls == [("metadata", 1, b'{"a":1}'), ("brief", 2, b'{"percent":50}')]


def test_a_new_sink_of_a_silent_attempt_gets_nothing() -> None:
    page = Page()
    ProgressBuffer().attach(page)

    assert page.calls == []


def test_a_second_sink_gets_what_the_first_one_had() -> None:
    buffer = ProgressBuffer(sink=Page())
    buffer.set_progress(50)
    second = Page()
    buffer.attach(second)

    assert second.whole() == {"percent": 50}


def test_a_sink_let_go_hears_no_more() -> None:
    page = Page()
    buffer = ProgressBuffer(sink=page)
    buffer.attach(None)
    buffer.set_progress(50)
    buffer.resync()

    assert page.calls == []
    assert buffer.value() == {"percent": 50}


@pytest.mark.parametrize(
    "action",
    [
        pytest.param(lambda buffer: buffer.attach(None), id="let go of the sink after a fork"),
        pytest.param(lambda buffer: buffer.acknowledge(1), id="note what was confirmed"),
        pytest.param(lambda buffer: (buffer.snapshot(), buffer.pending), id="read"),
    ],
)
def test_none_of_these_waits_for_a_reporting_thread(
    action: Callable[[ProgressBuffer], object],
) -> None:
    buffer = ProgressBuffer()
    acting = threading.Thread(target=action, args=(buffer,), daemon=True)
    waited = []

    class Reporting(Page):
        def write_brief(self, generation: int, data: bytes) -> None:
            acting.start()
            acting.join(5)
            waited.append(acting.is_alive())

    buffer.attach(Reporting())
    buffer.set_progress(50)

    assert waited == [False]


def test_what_the_claim_brought_reaches_the_sink_with_the_same_generation() -> None:
    page = Page()
    buffer = ProgressBuffer(sink=page)
    buffer.update_metadata({"last_id": 7})
    buffer.lay_over(KEPT)

    assert page.whole() == buffer.value()
    assert page.generation == buffer.generation == 1


def test_the_sink_is_written_by_one_thread_at_a_time() -> None:
    inside, second = threading.Event(), threading.Event()
    overlaps = []

    class Slow(Page):
        def write_brief(self, generation: int, data: bytes) -> None:
            inside.set()
            # The other thread has come as far as it can when it waits for the lock, which
            # cannot be seen from here: a moment is given to it.
            overlaps.append(second.wait(0.05))

        def write_metadata(self, generation: int, data: bytes) -> None:
            second.set()

    buffer = ProgressBuffer(sink=Slow())
    first = threading.Thread(target=buffer.set_progress, args=(50,))
    first.start()
    assert inside.wait(10)
    buffer.update_metadata({"a": 1})
    first.join(10)

    assert overlaps == [False]
    assert second.is_set()


@pytest.mark.parametrize(
    ("brief", "metadata", "whole"),
    [
        (None, None, None),
        (b"", b"", None),
        (b"{}", b"{}", None),
        (b'{"percent":5}', None, '{"percent":5}'),
        (None, b'{"a":1}', '{"metadata":{"a":1}}'),
        (b"{}", b'{"a":1}', '{"metadata":{"a":1}}'),
        (b'{"percent":5}', b"{}", '{"percent":5}'),
        (b'{"percent":5}', '{"a":"é"}'.encode(), '{"percent":5,"metadata":{"a":"é"}}'),
    ],
)
def test_two_records_make_one_progress_object(
    brief: bytes | None, metadata: bytes | None, whole: str | None
) -> None:
    assert compose(brief, metadata) == whole
