"""The rows of an SQL query, page by page, in the order of a key."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any

from .keyset import Key, Keyed, KeysetSource, Total

_NEEDED = "connection must be of psycopg, or another with cursor() that takes %s for parameters"


class Query(KeysetSource[dict[str, Any]]):
    """The rows of an SQL query as dicts, read in pages of ``page_size`` in the order of a key.

    ``connection``: of psycopg, or another to PostgreSQL with ``cursor()`` and %s for parameters.
    Each page is a statement of its own. With autocommit nothing stays open between them. Otherwise
    the first begins a transaction that lasts until you end it, as you may at any time: an open one
    keeps vacuum from cleaning up in the whole database.

    ``sql``: a SELECT without ORDER BY and LIMIT; an index on the key makes each page cheap.
    ``params``: None (then % stands for itself), a sequence for %s, or a mapping for %(name)s.

    ``key``: a column of the query, or several, in ascending order. Together they must be unique and
    never NULL, or a row could be lost between two pages: ValueError where they are not. NULLs that
    no page shows are looked for at the end. A row that comes to lie before the cursor meanwhile is
    not seen. A cursor has the key's values as PostgreSQL writes them.

    ``total``: None, a number of rows, or "count", which counts them once when the loop begins.
    """

    def __init__(
        self,
        connection: Any,
        sql: str,
        key: str | Sequence[str],
        params: Sequence[Any] | Mapping[str, Any] | None = None,
        page_size: int = 1000,
        total: Total = None,
    ) -> None:
        super().__init__(_columns(key), page_size, total)
        if not isinstance(sql, str):
            raise TypeError(f"sql must be a str, not {type(sql).__name__}")
        self._connection = _checked(connection)
        self._params = _checked_params(params)
        self._keys = [_quoted(name) for name in self._names]
        text = sql.strip().rstrip(";")
        # Every statement has a parameter of ours, and so a % has to be doubled.
        text = text.replace("%", "%%") if params is None else text
        # The line end ends a comment.
        self._rows = f"({text}\n) AS awa_rows"

    def _page(self, after: Key | None, limit: int) -> list[Keyed]:
        where = ""
        own: dict[str, Any] = {}
        if after is not None:
            own = {f"awa_after_{number}": value for number, value in enumerate(after)}
            where = f"WHERE ({_listed(self._keys)}) > ({_listed(map(self._place, own))})"
        own["awa_limit"] = limit
        order = _listed(self._keys)
        # PostgreSQL compares the keys and writes them, whatever their type: it knows what is equal,
        # and reads what it wrote.
        texts = _listed(f"{key}::text AS awa_key_{n}" for n, key in enumerate(self._keys))
        before = _listed(f"lag({key}) OVER awa_order" for key in self._keys)
        names, found = self._ask(
            f"SELECT *, {texts}, ROW({order}) = ROW({before}) AS awa_repeats FROM ("
            f"SELECT * FROM {self._rows} {where} ORDER BY {order} LIMIT {self._place('awa_limit')}"
            f") AS awa_page WINDOW awa_order AS (ORDER BY {order}) ORDER BY {order}",
            own,
        )
        width = len(names) - len(self._keys) - 1
        _check_names(names[:width])
        return [
            Keyed(
                dict(zip(names[:width], values[:width], strict=True)),
                tuple(values[width:-1]),
                bool(values[-1]),
            )
            for values in found
        ]

    def _lacks_key(self) -> bool:
        nulls = " OR ".join(f"{key} IS NULL" for key in self._keys)
        _, found = self._ask(
            f"SELECT 1 FROM {self._rows} WHERE {nulls} LIMIT {self._place('awa_limit')}",
            {"awa_limit": 1},
        )
        return bool(found)

    def _count(self) -> int:
        _, [[count]] = self._ask(
            f"SELECT count(*) AS awa_count FROM {self._rows} LIMIT {self._place('awa_limit')}",
            {"awa_limit": 1},
        )
        return int(count)

    def _place(self, name: str) -> str:
        return f"%({name})s" if isinstance(self._params, Mapping) else "%s"

    def _ask(self, statement: str, own: Mapping[str, Any]) -> tuple[list[str], list[Sequence[Any]]]:
        """The columns' names and the rows; our parameters come last in every statement."""
        parameters: Any
        if isinstance(self._params, Mapping):
            parameters = {**self._params, **own}
        else:
            parameters = (*self._params, *own.values())
        with closing(_cursor(self._connection)) as cursor:
            cursor.execute(statement, parameters)
            names = [column[0] for column in cursor.description]
            return names, [_values(row, names) for row in cursor.fetchall()]


def _cursor(connection: Any) -> Any:
    psycopg = sys.modules.get("psycopg")
    if psycopg is not None and isinstance(connection, psycopg.Connection):
        # Not connection.cursor(): the user's factories may make anything of it and its rows.
        return psycopg.Cursor(connection, row_factory=lambda cursor: tuple)
    return connection.cursor()


def _values(row: Any, names: Sequence[str]) -> Sequence[Any]:
    return [row[name] for name in names] if isinstance(row, Mapping) else row


def _checked(connection: Any) -> Any:
    kind = type(connection)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name.startswith("sqlalchemy.") and not hasattr(connection, "cursor"):
        raise TypeError(f"{_NEEDED}, not {name}: use SelectRows with it")
    if not hasattr(connection, "cursor"):
        raise TypeError(f"{_NEEDED}, not {name}")
    if hasattr(kind, "__aenter__") and not hasattr(kind, "__enter__"):
        raise TypeError(f"{_NEEDED}, not the asynchronous {name}")
    return connection


def _columns(key: Any) -> list[str]:
    names = [key] if isinstance(key, str) else key
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"key must be a column's name, or a sequence of them, not {key!r}")
    if not names or len(set(names)) < len(names) or not all(names):
        raise ValueError(f"key is {key!r}; it must name at least one column, and each once")
    return list(names)


def _checked_params(params: Any) -> Sequence[Any] | Mapping[str, Any]:
    if params is None:
        return ()
    if isinstance(params, Mapping):
        taken = [name for name in params if str(name).startswith("awa_")]
        if taken:
            raise ValueError(f"params has {taken[0]!r}; names with awa_ are Query's own")
        return params
    if isinstance(params, (str, bytes)) or not isinstance(params, Sequence):
        raise TypeError(
            f"params must be None, a sequence or a mapping, not {type(params).__name__}"
        )
    return params


def _check_names(names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two columns of the query are called {name!r}: name one otherwise")


def _quoted(name: str) -> str:
    # Every statement has parameters, so a % in a name is doubled like any other.
    return '"{}"'.format(name.replace('"', '""').replace("%", "%%"))


def _listed(parts: Iterable[str]) -> str:
    return ", ".join(parts)
