"""What ``iterate`` makes of its argument."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, Final

from .base import Source
from .queryset_rows import QuerysetRows
from .sequence import SequenceSource

_USABLE: Final = (
    "iterate() needs what another attempt can read on from: a list or another sequence, a range, "
    "a QuerySet, or a source of celery_awa.resume (Lines, CsvRows, JsonLines, Query, QuerysetRows, "
    "SelectRows, Pages, or your own). self.track(iterable) reports progress over anything, "
    "without a cursor"
)

#: What to do with other things; the order counts.
_ADVICE: Final[tuple[tuple[Any, str], ...]] = (
    (str, "if it is the path of a file, use Lines(path)"),
    ((bytes, bytearray, memoryview), "list(data) is the list of its bytes"),
    (Mapping, "list(mapping.items()) is a list, if each attempt makes it in the same order"),
    (Set, "a set has no order: sorted(values) is a list in the same order each time"),
    (AsyncIterable, "an asynchronous iterable cannot be read from a task"),
    (
        Iterator,
        "an iterator begins where it is, not at a cursor: use list(iterator), if each attempt gets "
        "the same items in the same order, or write a source (SourceBase)",
    ),
    (Iterable, "use list(iterable), if each attempt gets the same items in the same order"),
)


def as_source(source: Any) -> Source[Any]:
    """The source, or one made of a sequence, a range or a QuerySet.

    TypeError, which says what to use instead, for what cannot be read on from a cursor.
    """
    if isinstance(source, Source) and not isinstance(source, type):
        return source
    if _has_base(source, "django.db.models.query", "QuerySet"):
        return QuerysetRows(source)
    is_text = isinstance(source, (str, bytes, bytearray, memoryview))
    if isinstance(source, Sequence) and not is_text:
        return SequenceSource(source)
    raise TypeError(f"{_USABLE}. It cannot use {_shown(source)}: {_instead(source)}")


def _instead(source: Any) -> str:
    if isinstance(source, type):
        return "that is a class, not something made of it"
    if hasattr(source, "readline"):
        return "give the file's path to Lines, CsvRows or JsonLines"
    if _has_base(source, "django.db.models.query", "RawQuerySet"):
        return "use Query(connection, sql, key)"
    if hasattr(source, "get_queryset"):
        return "a manager's all() is a QuerySet"
    if any(base.__module__.startswith("sqlalchemy.") for base in type(source).__mro__):
        return "use SelectRows(session, select, key)"
    for kinds, advice in _ADVICE:
        if isinstance(source, kinds):
            return advice
    return "it cannot be looped over"


def _shown(source: Any) -> str:
    kind = source if isinstance(source, type) else type(source)
    return kind.__qualname__


def _has_base(source: Any, module: str, name: str) -> bool:
    # By its name: whoever has no Django need not import it.
    return any(
        base.__module__ == module and base.__qualname__ == name for base in type(source).__mro__
    )
