"""The rows of a select of SQLAlchemy, page by page, in the order of a key."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from .keyset import Key, Keyed, KeysetSource, Total, with_repeats


class SelectRows(KeysetSource[Any]):
    """The rows of an SQLAlchemy ``select()``, in pages of ``page_size`` in the order of a key.

    ``session_or_connection``: a Session or a Connection of SQLAlchemy, not an asynchronous one.
    Where one thing is selected, as in ``select(User)``, it is given itself, otherwise rows. A
    session's transaction stays open until you end it; if you commit in the loop, set
    ``expire_on_commit=False``, or each object of the page is loaded once more. Load collections by
    ``selectinload``.

    ``key``: a column, such as ``User.id``, or several, in ascending order. Together they must be
    unique and never NULL, or a row could be lost between two pages: ValueError where they are not.
    A row that comes to lie before the cursor meanwhile is not seen.

    ``total``: None, a number of rows, or "count", which counts them once when the loop begins.

    Raises TypeError for what is no ``select()``, ValueError for one with ORDER BY, LIMIT, OFFSET
    or DISTINCT.
    """

    def __init__(
        self,
        session_or_connection: Any,
        select: Any,
        key: Any,
        page_size: int = 1000,
        total: Total = None,
    ) -> None:
        self._columns = list(key) if isinstance(key, (list, tuple)) else [key]
        super().__init__(_names(self._columns), page_size, total)
        self._session = _checked(session_or_connection)
        _check_select(select)
        self._select = select
        labels = [column.label(f"awa_key_{n}") for n, column in enumerate(self._columns)]
        self._ordered = select.add_columns(*labels).order_by(*self._columns)

    def _page(self, after: Key | None, limit: int) -> list[Keyed]:
        statement = self._ordered.limit(limit)
        if after is not None:
            statement = statement.where(_above(self._columns, after))
        # Frozen, so that the rows and their keys can be taken apart.
        found = self._session.execute(statement).freeze()
        width = len(found().keys()) - len(self._columns)
        rows = found().columns(*range(width))
        rows = rows.scalars().all() if width == 1 else rows.all()
        keys = found().columns(*range(width, width + len(self._columns))).all()
        return with_repeats([(row, tuple(key)) for row, key in zip(rows, keys, strict=True)])

    def _lacks_key(self) -> bool:
        from sqlalchemy import or_

        nulls = or_(*(column.is_(None) for column in self._columns))
        return self._session.execute(self._select.where(nulls).limit(1)).first() is not None

    def _count(self) -> int:
        from sqlalchemy import func, select

        counted = select(func.count()).select_from(self._select.subquery())
        return int(self._session.execute(counted).scalar_one())


def _above(columns: Sequence[Any], key: Key) -> Any:
    from sqlalchemy import literal, tuple_

    if len(columns) == 1:
        return columns[0] > key[0]
    pairs = zip(key, columns, strict=True)
    values = [literal(value, column.type) for value, column in pairs]
    return tuple_(*columns) > tuple_(*values)


def _names(columns: Sequence[Any]) -> list[str]:
    for column in columns:
        if not hasattr(column, "label") or not getattr(column, "key", None):
            raise TypeError(f"key must be a column, such as User.id, or several, not {column!r}")
    names = [str(column.key) for column in columns]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"key must have at least one column, and each once, not {names}")
    return names


def _checked(session: Any) -> Any:
    if not callable(getattr(session, "execute", None)) or not callable(
        getattr(session, "scalars", None)
    ):
        raise TypeError(
            "session_or_connection must be a Session or Connection of SQLAlchemy, "
            f"not {type(session).__qualname__}"
        )
    if inspect.iscoroutinefunction(session.execute):
        raise TypeError(f"an asynchronous {type(session).__qualname__} cannot be read from a task")
    return session


def _check_select(select: Any) -> None:
    from sqlalchemy import Select

    if not isinstance(select, Select):
        raise TypeError(
            f"select must be what select() makes, not {type(select).__qualname__}; "
            "where another has a subquery(), select from that"
        )
    refused = {
        "ORDER BY": bool(select._order_by_clauses),
        "LIMIT": select._limit_clause is not None or select._fetch_clause is not None,
        "OFFSET": select._offset_clause is not None,
        "DISTINCT": select._distinct,
    }
    for clause, present in refused.items():
        if present:
            raise ValueError(
                f"the select has {clause}, and SelectRows takes pages in the order of its key: "
                "leave it out, or select from its subquery()"
            )
