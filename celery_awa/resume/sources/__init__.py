"""What a loop can run over and read on from a cursor: files, queries, pages, sequences."""

from .base import Source, SourceBase, Unreadable
from .csv_rows import CsvRows
from .json_lines import JsonLines
from .lines import Lines
from .pages import Pages
from .query import Query
from .queryset_rows import QuerysetRows
from .select_rows import SelectRows

__all__ = [
    "CsvRows",
    "JsonLines",
    "Lines",
    "Pages",
    "Query",
    "QuerysetRows",
    "SelectRows",
    "Source",
    "SourceBase",
    "Unreadable",
]
