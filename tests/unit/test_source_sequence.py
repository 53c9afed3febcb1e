"""Sequences, and what else iterate takes or refuses."""

from __future__ import annotations

import io
from array import array
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from django.db.models import Manager
from django.db.models.query import RawQuerySet

from celery_awa.errors import CheckpointMismatch
from celery_awa.resume.sources import Lines, Pages, Source, SourceBase, Unreadable
from celery_awa.resume.sources.choose import as_source


class Lazy(Sequence[int]):
    """Loads what it is asked for."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> int:
        self.loaded.append(index)
        return index * 10


@pytest.mark.parametrize(
    "sequence",
    [["a", "b", "c"], ("a", "b", "c"), deque("abc"), range(5, 35, 10), array("i", [1, 2, 3])],
    ids=lambda sequence: type(sequence).__name__,
)
def test_a_sequence_is_read_on_after_the_index_of_the_cursor(sequence: Any) -> None:
    source = as_source(sequence)
    assert list(source.read(None)) == list(zip(sequence, range(3), strict=True))
    assert list(source.read(0)) == [(sequence[1], 1), (sequence[2], 2)]
    assert list(source.read(2)) == []


def test_progress_is_in_items() -> None:
    source = as_source(range(7))
    assert (source.total(), source.position(3, 4)) == (7, 4)
    assert list(as_source([]).read(None)) == []


def test_what_is_done_is_not_loaded_again() -> None:
    lazy = Lazy(1_000_000)
    assert next(as_source(lazy).read(999_997)) == (9_999_980, 999_998)
    assert lazy.loaded == [999_998]


def test_a_list_may_change_in_the_loop_as_in_any_other() -> None:
    numbers = [1, 2, 3]
    seen = []
    for number, _ in as_source(numbers).read(None):
        seen.append(number)
        if number == 2:
            numbers.append(4)
            numbers.remove(1)
    assert seen == [1, 2, 4]


def test_an_index_error_of_its_own_is_not_its_end() -> None:
    class Broken(Lazy):
        def __getitem__(self, index: Any) -> int:
            raise IndexError("of its own")

    with pytest.raises(IndexError, match="of its own"):
        list(as_source(Broken(3)).read(None))


@pytest.mark.parametrize("cursor", [3, -1, "1", {"offset": 1}, 1.0])
def test_a_cursor_that_does_not_fit_is_a_mismatch(cursor: Any) -> None:
    with pytest.raises(CheckpointMismatch, match="of a sequence that has 3 items now"):
        as_source(["a", "b", "c"]).read(cursor)


# What iterate takes, and what it refuses.


class Own(SourceBase[str]):
    def read(self, cursor: Any | None) -> Iterator[tuple[str | Unreadable, Any]]:
        yield "a", 1


class FromNothing:
    """A source without our base."""

    def read(self, cursor: Any) -> Any:
        yield "a", 1

    def total(self) -> None: ...

    def position(self, cursor: Any, done: int) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize(
    "source", [Own(), FromNothing(), Lines("absent"), Pages(lambda token: ([], None))]
)
def test_a_source_is_taken_as_it_is(source: Source[Any]) -> None:
    assert as_source(source) is source


def test_a_source_needs_only_read() -> None:
    source = Own()
    assert (source.total(), source.position(1, 5)) == (None, None)
    source.close()
    with pytest.raises(NotImplementedError, match=r"SourceBase must define read"):
        SourceBase[str]().read(None)


class Asynchronous:
    def __aiter__(self) -> AsyncIterator[int]:
        raise NotImplementedError


class Numbers:
    """What numpy's arrays are like."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return index

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("refused", "advice"),
    [
        ("path.csv", r"str: if it is the path of a file, use Lines\(path\)"),
        (b"bytes", r"bytes: list\(data\) is the list of its bytes"),
        (bytearray(), r"bytearray: list\(data\)"),
        (memoryview(b""), r"memoryview: list\(data\)"),
        ({"a": 1}, r"dict: list\(mapping\.items\(\)\)"),
        ({"a": 1}.items(), r"dict_items: a set has no order"),
        ({1, 2}, r"set: a set has no order: sorted\(values\)"),
        (iter([1]), r"list_iterator: an iterator begins where it is.*list\(iterator\)"),
        ((x for x in "ab"), r"generator: an iterator begins where it is"),
        (map(str, [1]), r"map: an iterator begins where it is"),
        (io.StringIO("a"), r"StringIO: give the file's path to Lines"),
        (io.BytesIO(b"a"), r"BytesIO: give the file's path to Lines"),
        (Numbers(), r"Numbers: use list\(iterable\)"),
        (Asynchronous(), r"Asynchronous: an asynchronous iterable"),
        (Path("file"), r"Path: it cannot be looped over"),
        (7, r"int: it cannot be looped over"),
        (None, r"NoneType: it cannot be looped over"),
        (Lines, r"Lines: that is a class"),
        (list, r"list: that is a class"),
        (sqlalchemy.select(sqlalchemy.column("a")), r"Select: use SelectRows\(session"),
        (RawQuerySet("SELECT 1", using="default"), r"RawQuerySet: use Query\("),
        (Manager(), r"a manager's all\(\) is a QuerySet"),
    ],
    ids=lambda value: None if isinstance(value, str) else type(value).__name__,
)
def test_what_cannot_be_read_on_from_is_refused_with_what_to_use(refused: Any, advice: str) -> None:
    with pytest.raises(TypeError, match=advice) as caught:
        as_source(refused)
    for name in ("iterate()", "a list", "a range", "QuerySet", "CsvRows", "self.track(iterable)"):
        assert name in str(caught.value)


def test_an_open_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        (tmp_path / "file").open() as file,
        pytest.raises(TypeError, match="TextIOWrapper: give the file's path to Lines"),
    ):
        as_source(file)
