"""Rows of SQLAlchemy's selects in pages by a key, on PostgreSQL."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    joinedload,
    mapped_column,
    relationship,
    scoped_session,
    selectinload,
    sessionmaker,
)

from celery_awa.errors import CheckpointMismatch
from celery_awa.resume.sources import SelectRows

from .user_connections import engine_on


class Base(DeclarativeBase):
    pass


class User(Base):
    __tablename__ = "users"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
    code: Mapped[uuid.UUID]
    at: Mapped[datetime] = mapped_column(sa.DateTime(timezone=True))
    day: Mapped[date]
    price: Mapped[Decimal]
    mark: Mapped[bytes]
    group: Mapped[int]
    maybe: Mapped[int | None]
    gone: Mapped[timedelta]
    orders: Mapped[list[Order]] = relationship()


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    user_id: Mapped[int] = mapped_column(sa.ForeignKey("users.id"))


@pytest.fixture(scope="module")
def engine(module_database_url: str) -> Iterator[sa.Engine]:
    engine = engine_on(module_database_url)
    Base.metadata.create_all(engine)
    with Session(engine) as session:
        for n in range(7):
            user = User(
                id=n + 1,
                name=chr(103 - n),
                code=uuid.uuid4(),
                at=datetime(2024, 1, 1, 12, 0, 0, n, tzinfo=timezone.utc),
                day=date(2024, 1, 1) + timedelta(days=n),
                price=Decimal(n) / 4,
                mark=bytes([n, 255 - n]),
                group=n % 3,
                maybe=n or None,
                gone=timedelta(days=n),
            )
            user.orders = [Order(), Order()]
            session.add(user)
        session.commit()
    yield engine
    engine.dispose()


@pytest.fixture
def session(engine: sa.Engine) -> Iterator[Session]:
    with Session(engine) as session:
        yield session


def items(source: Any, cursor: Any = None) -> list[Any]:
    return [item for item, _ in source.read(cursor)]


def check_reading_on(source: SelectRows, expected: list[Any]) -> None:
    """Reading at one go gives the rows, and so does reading with a stop after any of them."""
    whole = list(source.read(None))
    assert [item for item, _ in whole] == expected
    for number, (_, cursor) in enumerate(whole):
        kept = json.loads(json.dumps(cursor))
        assert list(source.read(kept)) == whole[number + 1 :]


KEYS = ["id", "name", "code", "at", "day", "price", "mark"]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("page_size", [1, 3, 100])
def test_entities_are_read_on_from_any_of_them(session: Session, key: str, page_size: int) -> None:
    column = getattr(User, key)
    expected = list(session.scalars(sa.select(User).order_by(column)))
    assert len(expected) == 7
    check_reading_on(SelectRows(session, sa.select(User), column, page_size), expected)


@pytest.mark.parametrize("key", KEYS)
def test_a_key_of_several_columns_is_compared_as_one(session: Session, key: str) -> None:
    columns = (User.group, getattr(User, key))
    expected = list(session.scalars(sa.select(User).order_by(*columns)))
    check_reading_on(SelectRows(session, sa.select(User), columns, page_size=2), expected)


def test_a_cursor_has_the_key_by_its_name(session: Session) -> None:
    source = SelectRows(session, sa.select(User), [User.group, User.day])
    assert next(source.read(None))[1] == {"group": 0, "day": {"date": "2024-01-01"}}


def test_a_connection_gives_rows(engine: sa.Engine) -> None:
    users = User.__table__
    with engine.connect() as connection:
        select = sa.select(users.c.name, users.c.id).where(users.c.id > 2)
        source = SelectRows(connection, select, users.c.id, page_size=2)
        found = items(source)
        assert [(row.name, row.id) for row in found] == [(chr(104 - n), n) for n in range(3, 8)]
        check_reading_on(source, found)


def test_one_column_is_given_itself_and_several_things_as_rows(session: Session) -> None:
    assert items(SelectRows(session, sa.select(User.name), User.id)) == list("gfedcba")
    source = SelectRows(session, sa.select(User, User.name.label("called")), User.id, page_size=4)
    rows = items(source)
    assert [(row.User.id, row.called) for row in rows[:2]] == [(1, "g"), (2, "f")]
    assert len(rows) == 7


def test_joins_and_conditions_stay(session: Session) -> None:
    select = sa.select(Order, User).join(User, User.id == Order.user_id).where(User.group == 1)
    expected = [tuple(row) for row in session.execute(select.order_by(Order.id))]
    source = SelectRows(session, select, Order.id, page_size=3)
    assert [tuple(row) for row in items(source)] == expected
    assert len(expected) == 4


def test_a_scoped_session_is_one(engine: sa.Engine) -> None:
    session = scoped_session(sessionmaker(engine))
    assert len(items(SelectRows(session, sa.select(User), User.id, page_size=3))) == 7
    session.remove()


def test_a_total_is_counted_once_or_given_or_unknown(session: Session) -> None:
    select = sa.select(User).where(User.group == 0)
    counted = SelectRows(session, select, User.id, total="count")
    assert (counted.total(), counted.total()) == (3, 3)
    assert SelectRows(session, select, User.id, total=70).total() == 70
    assert SelectRows(session, select, User.id).total() is None


def test_collections_are_loaded_for_each_page(session: Session) -> None:
    select = sa.select(User).options(selectinload(User.orders))
    users = items(SelectRows(session, select, User.id, page_size=3))
    assert [len(user.__dict__["orders"]) for user in users] == [2] * 7


def test_collections_by_a_join_are_sqlalchemys_own_error(session: Session) -> None:
    select = sa.select(User).options(joinedload(User.orders))
    with pytest.raises(sa.exc.InvalidRequestError, match="unique"):
        items(SelectRows(session, select, User.id))


# Keys that would lose a row.


@pytest.mark.parametrize("page_size", [1, 2, 3, 100])
def test_a_key_that_comes_twice_is_an_error(session: Session, page_size: int) -> None:
    for select, key in (
        (sa.select(User), User.group),
        (sa.select(User).join(Order), User.id),
        (sa.select(User.name), (User.group, User.group.label("again"))),
    ):
        with pytest.raises(ValueError, match="several rows have the key"):
            items(SelectRows(session, select, key, page_size))


@pytest.mark.parametrize("page_size", [1, 100])
def test_null_in_a_key_is_an_error(session: Session, page_size: int) -> None:
    for key in (User.maybe, (User.maybe, User.id), (User.id, User.maybe)):
        source = SelectRows(session, sa.select(User), key, page_size)
        with pytest.raises(ValueError, match="a row has NULL in its key"):
            items(source)
    # Another attempt does not see it, and does not end as if there were none.
    with pytest.raises(ValueError, match=r"a row has NULL in its key \(maybe\)"):
        items(SelectRows(session, sa.select(User), User.maybe), {"maybe": 6})


def test_a_key_whose_values_cannot_be_kept_is_an_error(session: Session) -> None:
    with pytest.raises(TypeError, match="a key of type timedelta cannot be kept; allowed are str"):
        items(SelectRows(session, sa.select(User), User.gone))


# What is refused at the call.


@pytest.mark.parametrize(
    ("select", "clause"),
    [
        (sa.select(User).order_by(User.name), "ORDER BY"),
        (sa.select(User).limit(3), "LIMIT"),
        (sa.select(User).fetch(3), "LIMIT"),
        (sa.select(User).offset(3), "OFFSET"),
        (sa.select(User.name).distinct(), "DISTINCT"),
    ],
)
def test_what_has_no_pages_is_refused(session: Session, select: Any, clause: str) -> None:
    with pytest.raises(ValueError, match=f"the select has {clause}"):
        SelectRows(session, select, User.id)


def test_a_subquery_can_be_selected_from_instead(session: Session) -> None:
    inner = sa.select(User.group).distinct().subquery()
    check_reading_on(SelectRows(session, sa.select(inner), inner.c.group, page_size=2), [0, 1, 2])


def test_arguments_are_checked_at_the_call(session: Session) -> None:
    select = sa.select(User)
    refused: list[tuple[type[Exception], str, tuple[Any, ...]]] = [
        (TypeError, "not Query", (session, session.query(User), User.id)),
        (TypeError, "not CompoundSelect", (session, sa.union(select, select), User.id)),
        (TypeError, "not str", (session, "SELECT 1", User.id)),
        (TypeError, "not Engine", (session.get_bind(), select, User.id)),
        (TypeError, "not AsyncSession|asynchronous", (AsyncSession(), select, User.id)),
        (TypeError, "key must be a column", (session, select, "id")),
        (ValueError, "at least one column", (session, select, [])),
        (ValueError, "each once", (session, select, [User.id, User.id])),
        (ValueError, "page_size is 0", (session, select, User.id, 0)),
        (ValueError, "total is 'all'", (session, select, User.id, 10, "all")),
    ]
    for kind, message, arguments in refused:
        with pytest.raises(kind, match=message):
            SelectRows(*arguments)


@pytest.mark.parametrize("cursor", [7, {"name": "a"}, {"id": {"date": "x"}}, {"id": {}}])
def test_a_cursor_of_another_key_is_a_mismatch(session: Session, cursor: Any) -> None:
    with pytest.raises(CheckpointMismatch):
        SelectRows(session, sa.select(User), User.id).read(cursor)
