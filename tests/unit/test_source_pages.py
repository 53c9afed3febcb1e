"""Pages that name the next one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_awa.errors import CheckpointMismatch
from celery_awa.resume.sources import Pages

LIST: dict[Any, tuple[list[str], Any]] = {
    None: (["a", "b"], "p2"),
    "p2": ([], "p3"),
    "p3": (["c"], {"after": ["c", 3]}),
    "last": (["d", "e"], None),
}


class Service:
    """A list in pages, and the tokens it was asked for."""

    def __init__(self, pages: dict[Any, tuple[Any, Any]]) -> None:
        self.pages = {json.dumps(token): page for token, page in pages.items()}
        self.asked: list[Any] = []

    def __call__(self, token: Any) -> tuple[Any, Any]:
        self.asked.append(token)
        return self.pages[json.dumps(token)]


def service() -> Service:
    made = Service(LIST)
    made.pages[json.dumps({"after": ["c", 3]})] = made.pages.pop('"last"')
    return made


def items(source: Any, cursor: Any = None) -> list[Any]:
    return [item for item, _ in source.read(cursor)]


def test_pages_are_read_one_after_the_other_when_they_are_needed() -> None:
    fetch = service()
    reader = Pages(fetch).read(None)
    assert fetch.asked == []
    assert [next(reader)[0] for _ in range(2)] == ["a", "b"]
    assert fetch.asked == [None]
    assert [item for item, _ in reader] == ["c", "d", "e"]
    assert fetch.asked == [None, "p2", "p3", {"after": ["c", 3]}]


def test_the_first_page_may_have_a_token() -> None:
    assert items(Pages(service(), start="p3")) == ["c", "d", "e"]


@given(
    sizes=st.lists(st.integers(0, 3), min_size=1, max_size=5),
)
def test_reading_on_from_any_item_gives_what_reading_at_one_go_gives(sizes: list[int]) -> None:
    pages: dict[Any, tuple[Any, Any]] = {}
    for number, size in enumerate(sizes):
        following = number + 1 if number + 1 < len(sizes) else None
        pages[number or None] = ([(number, item) for item in range(size)], following)
    fetch = Service(pages)
    whole = list(Pages(fetch).read(None))
    assert len(whole) == sum(sizes)
    for number, (_, cursor) in enumerate(whole):
        kept = json.loads(json.dumps(cursor))
        assert list(Pages(fetch).read(kept)) == whole[number + 1 :]


def test_what_was_added_to_a_page_meanwhile_is_not_lost() -> None:
    fetch = Service({None: (["a"], 2), 2: (["c"], None)})
    _, cursor = next(Pages(fetch).read(None))
    fetch.pages["null"] = (["a", "b"], 2)
    assert items(Pages(fetch), cursor) == ["b", "c"]


def test_a_page_that_became_shorter_is_a_mismatch() -> None:
    fetch = Service({None: (["a", "b"], 2), 2: (["c"], None)})
    *_, (_, cursor), _ = Pages(fetch).read(None)
    fetch.pages["null"] = (["b"], 2)
    with pytest.raises(CheckpointMismatch, match="after item 2 of the page None, which has 1"):
        items(Pages(fetch), cursor)


def test_a_page_that_is_next_to_itself_is_an_error_before_its_items() -> None:
    fetch = Service({None: (["a"], "p"), "p": (["b"], "p")})
    reader = Pages(fetch).read(None)
    assert next(reader)[0] == "a"
    with pytest.raises(ValueError, match="names page 'p' as the next of itself"):
        next(reader)


@pytest.mark.parametrize("token", [(1, 2), b"p", object(), float("nan"), {1: 2}, {"a": {1}}])
def test_a_token_that_is_no_json_is_refused(token: Any) -> None:
    with pytest.raises(TypeError, match="is no JSON value"):
        Pages(service(), start=token)
    with pytest.raises(TypeError, match="is no JSON value"):
        items(Pages(lambda _: (["a"], token)))


@pytest.mark.parametrize(
    ("page", "message"),
    [
        (["a"], r"must return a tuple \(items, next token\), not list"),
        (None, r"must return a tuple \(items, next token\), not NoneType"),
        (("a", "b", "c"), r"must return a tuple \(items, next token\), not tuple"),
        (({"items": []}, None), "the items that fetch returns must be a list, not dict"),
        (("text", None), "the items that fetch returns must be a list, not str"),
        ((7, None), "the items that fetch returns must be a list, not int"),
    ],
)
def test_a_page_of_another_form_is_an_error(page: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        items(Pages(lambda _: page))


def test_fetch_must_be_a_function() -> None:
    with pytest.raises(TypeError, match="fetch must be a function of a token, not list"):
        Pages([])  # type: ignore[arg-type]


@pytest.mark.parametrize("cursor", [3, {}, {"token": 1}, {"token": 1, "index": -1}, {"index": 1}])
def test_a_cursor_of_something_else_is_a_mismatch(cursor: Any) -> None:
    with pytest.raises(CheckpointMismatch, match="is no cursor of pages"):
        Pages(service()).read(cursor)


def test_progress_is_counted_without_a_total() -> None:
    source = Pages(service())
    assert source.total() is None
    assert source.position({"token": None, "index": 0}, 7) in (None, 7)
