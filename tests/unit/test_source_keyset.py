"""Paging by a key, over rows in memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_awa.errors import CheckpointMismatch
from celery_awa.resume.sources.key_values import from_json, to_json
from celery_awa.resume.sources.keyset import Key, Keyed, KeysetSource, with_repeats


class Table(KeysetSource[Any]):
    """Rows that are their own keys, and the pages that were asked for."""

    def __init__(self, rows: Sequence[Any], page_size: int = 2, total: Any = None) -> None:
        super().__init__(["k"], page_size, total)
        self.rows = rows
        self.asked: list[tuple[Key | None, int]] = []

    def _page(self, after: Key | None, limit: int) -> list[Keyed]:
        self.asked.append((after, limit))
        found = [row for row in self.rows if after is None or row is None or (row,) > after]
        return with_repeats([(row, (row,)) for row in found[:limit]])

    def _lacks_key(self) -> bool:
        return None in self.rows

    def _count(self) -> int:
        return len(self.rows)


def items(source: Any, cursor: Any = None) -> list[Any]:
    return [item for item, _ in source.read(cursor)]


@given(count=st.integers(0, 12), page_size=st.integers(1, 13))
def test_reading_on_from_any_row_gives_what_reading_at_one_go_gives(
    count: int, page_size: int
) -> None:
    table = Table(range(count), page_size)
    whole = list(table.read(None))
    assert [row for row, _ in whole] == list(range(count))
    for number, (_, cursor) in enumerate(whole):
        assert list(table.read(cursor)) == whole[number + 1 :]


def test_a_page_begins_after_the_last_one_and_is_read_when_it_is_needed() -> None:
    table = Table(range(5))
    reader = table.read(None)
    assert [next(reader)[0] for _ in range(2)] == [0, 1]
    assert table.asked == [(None, 3)]
    assert [row for row, _ in reader] == [2, 3, 4]
    assert table.asked == [(None, 3), ((1,), 3), ((3,), 3)]


@pytest.mark.parametrize(
    ("rows", "given"),
    [([1, 1, 2], 0), ([1, 2, 2], 0), ([1, 2, 3, 3], 2), ([1, 2, 3, 4, 4], 2)],
)
def test_no_row_of_a_page_is_given_where_a_key_comes_twice(rows: list[int], given: int) -> None:
    reader = Table(rows).read(None)
    assert [next(reader)[0] for _ in range(given)] == rows[:given]
    with pytest.raises(ValueError, match="several rows have the key"):
        next(reader)


def test_a_row_without_a_key_is_an_error_at_the_latest_at_the_end() -> None:
    class Hidden(Table):
        def _page(self, after: Key | None, limit: int) -> list[Keyed]:
            return [row for row in super()._page(after, limit) if row.key != (None,)]

    for table in (Table([1, None]), Table([1, 2, 3, None]), Hidden([1, 2, None])):
        with pytest.raises(ValueError, match=r"a row has NULL in its key \(k\)"):
            items(table)


def test_a_key_that_comes_again_after_itself_is_an_error_and_no_endless_loop() -> None:
    class Inexact(Table):
        def _page(self, after: Key | None, limit: int) -> list[Keyed]:
            return super()._page(None if after is None else (after[0] - 1,), limit)

    table = Inexact([1, 2, 3, 4])
    with pytest.raises(ValueError, match="the key k=2 came again after itself"):
        items(table)


@pytest.mark.parametrize(
    "value",
    [
        7,
        "text",
        UUID(int=7),
        datetime(2024, 1, 1, 12, 0, 0, 1),
        datetime(2024, 1, 1, tzinfo=timezone(timedelta(hours=5, minutes=30))),
        date(2024, 1, 1),
        time(12, 34, 56, 7),
        Decimal("1E+30"),
        Decimal("0.10"),
        b"\x00\xff",
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_keys_value_is_the_same_after_json(value: Any) -> None:
    found = from_json(json.loads(json.dumps(to_json(value))))
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    "value", [1.5, timedelta(1), (1, 2), object()], ids=lambda value: type(value).__name__
)
def test_a_key_of_another_type_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot be kept; allowed are str, int, UUID, datetime"):
        to_json(value)


@pytest.mark.parametrize(
    "kept", [{}, {"uuid": "x"}, {"date": 7}, {"nope": "x"}, {"date": "2024-01-01", "b": "x"}]
)
def test_what_is_no_kept_key_is_a_mismatch(kept: Any) -> None:
    with pytest.raises(CheckpointMismatch, match="which cannot be read"):
        from_json(kept)
