"""The objects of a Django QuerySet, page by page, in the order of a key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .keyset import Key, Keyed, KeysetSource, with_repeats


class QuerysetRows(KeysetSource[Any]):
    """The objects of a Django QuerySet, read in pages of ``page_size`` in the order of ``key``.

    ``key``: a unique field of the model that is never NULL. ``values()`` works, if it has the key.
    Prefetching is done for each page. The total is ``count()``, once. Each page is a query of its
    own, and outside of ``atomic()`` nothing stays open between them. An object that comes to lie
    before the cursor meanwhile is not seen. ``iterate(queryset)`` is the same with the key "pk".

    Raises ValueError for a QuerySet that is sliced, combined (``union()``), distinct on fields or
    ordered by something else, and for another kind of key; TypeError for ``values_list()``; while
    reading ValueError where joins bring an object twice (``distinct()`` helps).
    """

    def __init__(self, queryset: Any, key: str = "pk", page_size: int = 1000) -> None:
        if not hasattr(queryset, "model") or not hasattr(queryset, "query"):
            raise TypeError(f"queryset must be a QuerySet, not {type(queryset).__qualname__}")
        field = _field(queryset.model, key)
        super().__init__([field.attname], page_size, "count")
        _check_query(queryset.query, {key, "pk" if field.primary_key else key, field.name})
        self._key = field.attname
        self._queryset = queryset.order_by(self._key)

    def _page(self, after: Key | None, limit: int) -> list[Keyed]:
        found = self._queryset
        if after is not None:
            found = found.filter(**{f"{self._key}__gt": after[0]})
        return with_repeats([(row, (self._key_of(row),)) for row in found[:limit]])

    def _key_of(self, row: Any) -> Any:
        if isinstance(row, Mapping):
            if self._key in row:
                return row[self._key]
            raise ValueError(f"values() must have the key {self._key!r} among its fields")
        if isinstance(row, self._queryset.model):
            return getattr(row, self._key)
        raise TypeError("values_list() shows no key: use values(), or the objects themselves")

    def _lacks_key(self) -> bool:
        return False  # the field allows no NULL

    def _count(self) -> int:
        return int(self._queryset.count())


def _field(model: Any, key: str) -> Any:
    """The field; ValueError unless it is fit to be a key, FieldDoesNotExist if there is none."""
    meta = model._meta
    field = meta.pk if key == "pk" else meta.get_field(key)
    if getattr(field, "column", None) is None:
        raise ValueError(f"key {key!r} of {model.__name__} is not one field with a column")
    if not field.unique and (field.name,) not in _unique_alone(meta):
        raise ValueError(f"key {key!r} of {model.__name__} is not unique: rows could be lost")
    if field.null:
        raise ValueError(f"key {key!r} of {model.__name__} may be NULL: rows could be lost")
    return field


def _unique_alone(meta: Any) -> list[tuple[str, ...]]:
    return [tuple(constraint.fields) for constraint in meta.total_unique_constraints]


def _check_query(query: Any, names: set[str]) -> None:
    if query.is_sliced:
        raise ValueError("the QuerySet is sliced, and pages cannot be taken from a slice")
    if query.combinator:
        raise ValueError(f"pages cannot be taken from a QuerySet made by {query.combinator}()")
    if query.distinct_fields:
        raise ValueError("pages cannot be taken from a QuerySet that is distinct on some fields")
    if query.extra_order_by or not set(query.order_by) <= names:
        raise ValueError(
            "the QuerySet is ordered by something else than the key: leave order_by() out, or "
            "give QuerysetRows a unique field as the key"
        )
