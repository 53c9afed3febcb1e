"""Loops and steps that go on where an earlier attempt left off, and what they can loop over."""

from .item_errors import RetryItem, SkipItems
from .sources import (
    CsvRows,
    JsonLines,
    Lines,
    Pages,
    Query,
    QuerysetRows,
    SelectRows,
    Source,
    SourceBase,
    Unreadable,
)

__all__ = [
    "CsvRows",
    "JsonLines",
    "Lines",
    "Pages",
    "Query",
    "QuerysetRows",
    "RetryItem",
    "SelectRows",
    "SkipItems",
    "Source",
    "SourceBase",
    "Unreadable",
]
