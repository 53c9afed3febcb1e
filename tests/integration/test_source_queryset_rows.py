"""Objects of Django's QuerySets in pages by a key, on PostgreSQL."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from datetime import datetime, timezone
from decimal import Decimal
from typing import Any

import django
import pytest
from django.conf import settings
from django.core.exceptions import FieldDoesNotExist
from django.db import connections, models
from django.test.utils import CaptureQueriesContext

from celery_awa.errors import CheckpointMismatch
from celery_awa.resume.sources import QuerysetRows
from celery_awa.resume.sources.choose import as_source

from .user_connections import django_alias

# Before there can be models.
if not settings.configured:
    settings.configure(LOGGING_CONFIG=None)
    django.setup()


class Shop(models.Model):
    name = models.TextField(unique=True)

    class Meta:
        app_label = "awa_sources"


class Tag(models.Model):
    name = models.TextField()

    class Meta:
        app_label = "awa_sources"


class Order(models.Model):
    """Ordered by something that is no key, as models often are."""

    shop = models.ForeignKey(Shop, models.CASCADE)
    code = models.UUIDField(unique=True)
    at = models.DateTimeField(unique=True)
    price = models.DecimalField(max_digits=8, decimal_places=2, unique=True)
    number = models.BigIntegerField()
    note = models.TextField(unique=True, null=True)
    amount = models.IntegerField()
    tags = models.ManyToManyField(Tag)

    class Meta:
        app_label = "awa_sources"
        ordering = ("-amount",)
        constraints = (models.UniqueConstraint(fields=["number"], name="awa_sources_number"),)


class Detail(models.Model):
    order = models.OneToOneField(Order, models.CASCADE, primary_key=True)

    class Meta:
        app_label = "awa_sources"


MODELS = (Shop, Tag, Order, Detail)


@pytest.fixture(scope="module")
def alias(module_database_url: str) -> Iterator[str]:
    with django_alias(module_database_url) as alias:
        with connections[alias].schema_editor() as editor:
            for model in MODELS:
                editor.create_model(model)
        shops = [Shop(name=name) for name in ("a", "b")]
        Shop.objects.using(alias).bulk_create(shops)
        Tag.objects.using(alias).bulk_create(Tag(name=name) for name in ("x", "y"))
        Order.objects.using(alias).bulk_create(
            Order(
                shop=shops[n % 2],
                code=uuid.uuid4(),
                at=datetime(2024, 1, 1, 12, 0, 0, n, tzinfo=timezone.utc),
                price=Decimal(n) / 4,
                number=n * 2**40,
                note=str(n),
                amount=n % 3,
            )
            for n in range(7)
        )
        for order in Order.objects.using(alias).order_by("id")[:5]:
            Detail.objects.using(alias).create(order=order)
            Order.tags.through.objects.using(alias).bulk_create(
                Order.tags.through(order_id=order.pk, tag_id=tag.pk)
                for tag in Tag.objects.using(alias).all()
            )
        yield alias


@pytest.fixture
def orders(alias: str) -> models.QuerySet[Order]:
    return Order.objects.using(alias).all()


def items(source: Any, cursor: Any = None) -> list[Any]:
    return [item for item, _ in source.read(cursor)]


@pytest.mark.parametrize("key", ["pk", "id", "code", "at", "price", "number"])
@pytest.mark.parametrize("page_size", [1, 3, 100])
def test_objects_are_read_on_from_any_of_them(
    orders: models.QuerySet[Order], key: str, page_size: int
) -> None:
    expected = list(orders.order_by(key))
    assert len(expected) == 7
    source = QuerysetRows(orders, key, page_size)
    whole = list(source.read(None))
    assert [order for order, _ in whole] == expected
    for number, (_, cursor) in enumerate(whole):
        kept = json.loads(json.dumps(cursor))
        assert list(source.read(kept)) == whole[number + 1 :]


def test_iterate_takes_a_queryset_by_its_primary_key(orders: models.QuerySet[Order]) -> None:
    source = as_source(orders.filter(amount__lt=2))
    assert isinstance(source, QuerysetRows)
    found = list(source.read(None))
    assert [order for order, _ in found] == list(orders.filter(amount__lt=2).order_by("pk"))
    assert found[0][1] == {"id": found[0][0].pk}
    assert source.total() == 5


def test_the_total_is_counted_once(orders: models.QuerySet[Order], alias: str) -> None:
    with CaptureQueriesContext(connections[alias]) as asked:
        source = QuerysetRows(orders)
        assert len(asked) == 0
        assert (source.total(), source.total()) == (7, 7)
    assert len(asked) == 1


def test_a_page_is_one_query_and_prefetching_is_done_for_each(
    orders: models.QuerySet[Order], alias: str
) -> None:
    source = QuerysetRows(orders.prefetch_related("shop"), page_size=4)
    with CaptureQueriesContext(connections[alias]) as asked:
        assert {order.shop.name for order in items(source)} == {"a", "b"}
    assert len(asked) == 4


def test_a_key_may_be_a_reference(alias: str) -> None:
    details = Detail.objects.using(alias).all()
    for key in ("pk", "order"):
        source = QuerysetRows(details, key, page_size=2)
        whole = list(source.read(None))
        assert [detail for detail, _ in whole] == list(details.order_by("pk"))
        assert items(source, whole[2][1]) == [detail for detail, _ in whole[3:]]


def test_values_are_dicts_that_need_the_key(orders: models.QuerySet[Order]) -> None:
    source = QuerysetRows(orders.values("id", "amount"), page_size=2)
    whole = list(source.read(None))
    assert [row for row, _ in whole] == list(orders.order_by("id").values("id", "amount"))
    assert items(source, whole[3][1]) == [row for row, _ in whole[4:]]
    with pytest.raises(ValueError, match="must have the key 'id' among its fields"):
        items(QuerysetRows(orders.values("amount")))
    with pytest.raises(TypeError, match="shows no key"):
        items(QuerysetRows(orders.values_list("id", "amount")))


def test_objects_with_annotations_are_read_on_from(orders: models.QuerySet[Order]) -> None:
    source = QuerysetRows(orders.annotate(tagged=models.Count("tags")), page_size=2)
    whole = list(source.read(None))
    assert [order.tagged for order, _ in whole] == [2] * 5 + [0] * 2
    assert items(source, whole[3][1]) == [order for order, _ in whole[4:]]


@pytest.mark.parametrize("page_size", [1, 2, 100])
def test_an_object_that_a_join_brings_twice_is_an_error(
    orders: models.QuerySet[Order], page_size: int
) -> None:
    tagged = orders.filter(tags__name__in=["x", "y"])
    with pytest.raises(ValueError, match="several rows have the key id="):
        items(QuerysetRows(tagged, page_size=page_size))
    assert len(items(QuerysetRows(tagged.distinct(), page_size=page_size))) == 5


def test_its_own_order_may_be_by_the_key(orders: models.QuerySet[Order]) -> None:
    for ordered in (orders.order_by("pk"), orders.order_by("id"), orders.order_by()):
        assert len(items(QuerysetRows(ordered))) == 7


@pytest.mark.parametrize("order", [("-pk",), ("amount",), ("pk", "amount"), ("?",)])
def test_another_order_is_refused(orders: models.QuerySet[Order], order: tuple[str]) -> None:
    with pytest.raises(ValueError, match="is ordered by something else than the key"):
        QuerysetRows(orders.order_by(*order))
    with pytest.raises(ValueError, match="is ordered by something else than the key"):
        QuerysetRows(orders.order_by(models.F("pk").desc()))
    with pytest.raises(ValueError, match="is ordered by something else than the key"):
        QuerysetRows(orders.extra(order_by=["amount"]))


def test_what_has_no_pages_is_refused(orders: models.QuerySet[Order]) -> None:
    for refused, reason in (
        (orders[:5], "is sliced"),
        (orders.union(orders), r"made by union\(\)"),
        (orders.order_by("amount").distinct("amount"), "distinct on some fields"),
    ):
        with pytest.raises(ValueError, match=reason):
            as_source(refused)
    with pytest.raises(TypeError, match="queryset must be a QuerySet, not list"):
        QuerysetRows([])


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("amount", "'amount' of Order is not unique"),
        ("shop", "'shop' of Order is not unique"),
        ("note", "'note' of Order may be NULL"),
        ("tags", "'tags' of Order is not unique"),
    ],
)
def test_a_key_that_would_lose_rows_is_refused(
    orders: models.QuerySet[Order], key: str, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        QuerysetRows(orders, key)


def test_a_key_that_is_no_field_is_djangos_own_error(orders: models.QuerySet[Order]) -> None:
    with pytest.raises(FieldDoesNotExist):
        QuerysetRows(orders, "nope")


@pytest.mark.parametrize("cursor", [7, {"pk": 7}, {"id": {"uuid": "x"}}, {"id": {"nope": "x"}}])
def test_a_cursor_of_another_key_is_a_mismatch(orders: models.QuerySet[Order], cursor: Any) -> None:
    with pytest.raises(CheckpointMismatch):
        as_source(orders).read(cursor)


def test_a_composite_primary_key_is_refused() -> None:
    composite = getattr(models, "CompositePrimaryKey", None)
    if composite is None:
        pytest.skip("this Django has no composite primary keys")

    class Item(models.Model):
        pk = composite("a", "b")
        a = models.IntegerField()
        b = models.IntegerField()

        class Meta:
            app_label = "awa_sources"

    with pytest.raises(ValueError, match="'pk' of Item is not one field with a column"):
        QuerysetRows(Item.objects.all())


def test_who_has_no_use_for_it_imports_neither_django_nor_sqlalchemy() -> None:
    # Celery itself imports a part of Django where that is installed.
    code = "import sys, celery_awa.resume; print({'django.db', 'sqlalchemy'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout == "set()\n"
