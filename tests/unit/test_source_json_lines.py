"""One JSON value a line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from celery_awa.resume.sources import JsonLines, Unreadable

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
line_ends = st.sampled_from(["\n", "\r\n", "\n\n", "\n \t\r\n"])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    pairs=st.lists(st.tuples(values, line_ends), max_size=8),
    ascii_only=st.booleans(),
    compress=st.booleans(),
)
def test_reading_on_from_any_value_gives_what_reading_at_one_go_gives(
    tmp_path: Path, pairs: list[tuple[Any, str]], ascii_only: bool, compress: bool
) -> None:
    written = [json.dumps(value, ensure_ascii=ascii_only) + end for value, end in pairs]
    data = "".join(written).encode()
    path = tmp_path / "file"
    path.write_bytes(gzip.compress(data) if compress else data)

    whole = list(JsonLines(path).read(None))

    assert [item for item, _ in whole] == [value for value, _ in pairs]
    for number, (_, cursor) in enumerate(whole):
        assert list(JsonLines(path).read(cursor)) == whole[number + 1 :]


@pytest.mark.parametrize(
    "bad", [b"{", b'{"a": NaN}', b"1 2", b'"\xff"', b"[" * 100_000], ids=lambda bad: repr(bad[:8])
)
def test_a_line_that_is_not_json_is_an_item_error_and_the_next_one_is_read(
    tmp_path: Path, bad: bytes
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b'{"a": 1}\n' + bad + b'\n{"a": 3}')

    (first, _), (second, cursor), (third, _) = JsonLines(path).read(None)

    assert (first, third) == ({"a": 1}, {"a": 3})
    assert isinstance(second, Unreadable)
    assert isinstance(second.error, (ValueError, RecursionError))
    assert [item for item, _ in JsonLines(path).read(cursor)] == [{"a": 3}]


def test_a_mark_at_the_start_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\xef\xbb\xbf1\n2\n")
    assert [item for item, _ in JsonLines(path).read(None)] == [1, 2]
