"""Pages of another service's list, each of which names the next."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from ...errors import CheckpointMismatch
from .base import SourceBase

T = TypeVar("T")

#: ``fetch(token)`` gives a page's items and the next page's token, None after the last.
Fetch = Callable[[Any], "tuple[Iterable[T], Any]"]


class Pages(SourceBase[T]):
    """The items of pages that ``fetch`` brings.

    ``fetch(token)`` returns ``(items, next_token)``, with None for the next token after the last
    page; it is called with ``start`` first. Tokens must be JSON values.

    A cursor is ``{"token": of the page, "index": of the item in it}``, and the page is fetched
    again when it is gone on with. So it is where the page's last item is done, too: what was added
    to that page meanwhile is not lost, as it would be if the cursor named the next page. Items that
    move to other pages meanwhile can be lost or come twice, as in any paging by position. A page
    that became shorter than what is done of it is refused with CheckpointMismatch.

    Raises TypeError if ``fetch`` returns something else or a token is no JSON value, ValueError if
    a page is named as the next of itself, and whatever ``fetch`` raises.
    """

    def __init__(self, fetch: Fetch[T], start: Any = None) -> None:
        if not callable(fetch):
            raise TypeError(f"fetch must be a function of a token, not {type(fetch).__name__}")
        self._fetch = fetch
        self._start = _token(start)

    def read(self, cursor: Any | None) -> Iterator[tuple[T, dict[str, Any]]]:
        if cursor is None:
            return self._pages(self._start, 0)
        token, index = _parts_of(cursor)
        return self._pages(token, index + 1)

    def _pages(self, token: Any, first: int) -> Iterator[tuple[T, dict[str, Any]]]:
        more = True
        while more:
            items, following = self._page(token)
            if len(items) < first:
                raise CheckpointMismatch(
                    f"the checkpoint lies after item {first} of the page {token!r}, which has "
                    f"{len(items)} items now"
                )
            for index in range(first, len(items)):
                yield items[index], {"token": token, "index": index}
            more = following is not None
            token, first = following, 0

    def _page(self, token: Any) -> tuple[list[T], Any]:
        page = self._fetch(token)
        if not isinstance(page, tuple) or len(page) != 2:
            raise TypeError(
                f"fetch must return a tuple (items, next token), not {type(page).__name__}"
            )
        items, following = page
        if isinstance(items, (str, bytes, Mapping)) or not isinstance(items, Iterable):
            raise TypeError(
                f"the items that fetch returns must be a list, not {type(items).__name__}"
            )
        if following is not None and following == token:
            raise ValueError(f"fetch names page {token!r} as the next of itself, without end")
        return list(items), _token(following)


def _token(value: Any) -> Any:
    """The value; TypeError unless a later attempt gets the same one from JSON."""
    try:
        same = json.loads(json.dumps(value)) == value
    except (TypeError, ValueError, RecursionError):
        same = False
    if not same:
        raise TypeError(
            f"the page token {value!r} is no JSON value: use a str, a number, or lists and dicts "
            "with string keys of them"
        )
    return value


def _parts_of(cursor: Any) -> tuple[Any, int]:
    if isinstance(cursor, dict) and "token" in cursor:
        index = cursor.get("index")
        if isinstance(index, int) and index >= 0:
            return cursor["token"], index
    raise CheckpointMismatch(f"{cursor!r} is no cursor of pages")
