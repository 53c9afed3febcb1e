"""Rows of an SQL query in pages by a key, on the connections that tasks have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest
from psycopg.pq import TransactionStatus
from sqlalchemy.orm import Session

from celery_awa.errors import CheckpointMismatch
from celery_awa.resume.sources import Query

from .user_connections import (
    Open,
    by_django,
    by_psycopg,
    by_psycopg2,
    by_psycopg_with_factories,
    engine_on,
)

each_connection = pytest.mark.parametrize(
    "opened",
    [by_psycopg, by_psycopg_with_factories, by_psycopg2, by_django],
    ids=lambda way: way.__name__,
)


@pytest.fixture
def connection(module_database_url: str) -> Iterator[psycopg.Connection[Any]]:
    """A connection whose tables are gone after the test."""
    with psycopg.connect(module_database_url) as connection:
        yield connection
        connection.rollback()


def table(connection: Any, columns: str, rows: str) -> None:
    connection.execute(f"CREATE TABLE sold ({columns})")
    connection.execute(f"INSERT INTO sold {rows}")


def items(source: Any, cursor: Any = None) -> list[Any]:
    return [item for item, _ in source.read(cursor)]


def check_reading_on(source: Query, expected: list[dict[str, Any]]) -> None:
    """Reading at one go gives the rows, and so does reading with a stop after any of them."""
    whole = list(source.read(None))
    assert [item for item, _ in whole] == expected
    for number, (_, cursor) in enumerate(whole):
        kept = json.loads(json.dumps(cursor))
        assert list(source.read(kept)) == whole[number + 1 :]


@each_connection
@pytest.mark.parametrize("params", [None, [2], {"least": 2}], ids=["none", "sequence", "mapping"])
def test_rows_are_dicts_and_read_on_from_any_of_them(
    module_database_url: str, opened: Open, params: Any
) -> None:
    place = {"NoneType": "2", "list": "%s", "dict": "%(least)s"}[type(params).__name__]
    sql = f"SELECT n AS id, n * 10 AS price FROM generate_series(1, 8) n WHERE n >= {place}"
    with opened(module_database_url) as user:
        source = Query(user.connection, sql, "id", params, page_size=3)
        check_reading_on(source, [{"id": n, "price": n * 10} for n in range(2, 9)])


@each_connection
def test_a_total_may_be_counted(module_database_url: str, opened: Open) -> None:
    with opened(module_database_url) as user:
        counted = Query(user.connection, "SELECT generate_series(1, 7) AS n", "n", total="count")
        assert (counted.total(), counted.total()) == (7, 7)
        with_params = Query(
            user.connection,
            "SELECT n FROM generate_series(1, 7) n WHERE n > %(least)s AND n % 4 = 1".replace(
                "% ", "%% "
            ),
            "n",
            {"least": 1},
            total="count",
        )
        assert with_params.total() == 1


def test_a_total_is_counted_once_or_given_or_unknown(connection: psycopg.Connection[Any]) -> None:
    table(connection, "id int", "SELECT generate_series(1, 3)")
    counted = Query(connection, "SELECT id FROM sold", "id", total="count")
    assert counted.total() == 3
    connection.execute("DELETE FROM sold")
    assert counted.total() == 3
    assert Query(connection, "SELECT id FROM sold", "id", total=70).total() == 70
    assert Query(connection, "SELECT id FROM sold", "id").total() is None


KEYS = {
    "int": "VALUES (-5), (3), (20), (100)",
    "bigint": "VALUES (-9223372036854775808), (9007199254740993), (9223372036854775807)",
    "numeric": "VALUES (-1e30), (0.10), (0.1000001), (1e20), (1e300), ('NaN')",
    "float8": "VALUES (-1e300), (0.1), (0.30000000000000004), ('Infinity')",
    "float4": "VALUES (0.1), (0.2), (0.3), (16777216)",
    "boolean": "VALUES (false), (true)",
    "text": """VALUES (''), ('a'), ('A'), ('a''b'), ('%s'), ('a\\b'), ('é"'), ('日本'), (' ')""",
    "char(4)": "VALUES ('a'), ('b'), ('ab')",
    "uuid": "SELECT gen_random_uuid() FROM generate_series(1, 4)",
    "date": "VALUES ('0001-01-01'), ('2024-02-29'), ('9999-12-31')",
    "time": "VALUES ('00:00'), ('12:34:56.789012')",
    "timestamp": "VALUES ('0001-01-01'), ('2024-02-29 12:00'), ('2024-02-29 12:00:00.000001')",
    "timestamptz": "VALUES ('2024-10-27 00:30+00'), ('2024-10-27 01:30+00'), ('2024-10-27 02:30Z')",
    "interval": "VALUES ('-1 day'), ('1 month 2 days'), ('3 years 04:05:06.789')",
    "bytea": r"VALUES ('\x'::bytea), ('\x00ff'), ('\x27')",
    "inet": "VALUES ('10.0.0.1'), ('10.0.0.0/8'), ('::1')",
    "int[]": "VALUES ('{}'::int[]), ('{1,2}'), ('{10}')",
}


@pytest.mark.parametrize("kind", KEYS)
def test_keys_of_any_type_are_read_on_from(connection: psycopg.Connection[Any], kind: str) -> None:
    connection.execute("SET LOCAL TimeZone = 'Europe/Berlin'")
    table(connection, f"k {kind}", f"SELECT c::{kind} FROM ({KEYS[kind]}) v(c)")
    expected = [{"k": k} for (k,) in connection.execute("SELECT k FROM sold ORDER BY k")]
    assert len(expected) >= 2
    for page_size in (1, 2, 100):
        source = Query(connection, "SELECT k FROM sold", "k", page_size=page_size)
        # NaN is not equal to itself, but to its text.
        assert str(items(source)) == str(expected)
        for number, (_, cursor) in enumerate(source.read(None)):
            kept = json.loads(json.dumps(cursor))
            assert str(items(source, kept)) == str(expected[number + 1 :])


def test_a_key_of_several_columns_is_compared_as_one(
    connection: psycopg.Connection[Any],
) -> None:
    table(
        connection,
        "day date, name text, n int",
        "SELECT date '2024-01-01' + a, chr(97 + b), a * 3 + b"
        " FROM generate_series(0, 2) a, generate_series(0, 2) b",
    )
    expected = [
        {"n": n, "day": day, "name": name}
        for n, day, name in connection.execute("SELECT n, day, name FROM sold ORDER BY day, name")
    ]
    source = Query(connection, "SELECT n, day, name FROM sold", ("day", "name"), page_size=2)
    check_reading_on(source, expected)
    assert next(source.read(None))[1] == {"day": "2024-01-01", "name": "a"}


def test_a_page_reads_no_more_rows_than_it_has(connection: psycopg.Connection[Any]) -> None:
    table(
        connection,
        "id int PRIMARY KEY, name text",
        "SELECT n, 'x' FROM generate_series(1, 20000) n",
    )
    connection.execute("ANALYZE sold")

    class Explained:
        """Explains what is asked."""

        plan: Any = None

        def cursor(self) -> Any:
            cursor = connection.cursor()
            explained = self

            class Cursor:
                def execute(self, statement: str, parameters: Any) -> None:
                    found = connection.execute(
                        f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", parameters
                    ).fetchone()
                    assert found is not None
                    explained.plan = found[0][0]["Plan"]
                    cursor.execute(statement, parameters)

                def __getattr__(self, name: str) -> Any:
                    return getattr(cursor, name)

            return Cursor()

    explained = Explained()
    source = Query(explained, "SELECT * FROM sold", "id", page_size=10)
    next(source.read({"id": "15000"}))

    plan = explained.plan
    while "Plans" in plan:
        assert plan["Actual Rows"] <= 11
        (plan,) = plan["Plans"]
    assert (plan["Node Type"], plan["Actual Rows"]) == ("Index Scan", 11)


# Keys that would lose a row.


@pytest.mark.parametrize("page_size", [1, 2, 3, 10])
def test_a_key_that_comes_twice_is_an_error_before_its_first_row(
    connection: psycopg.Connection[Any], page_size: int
) -> None:
    table(connection, "id int, n int", "VALUES (1, 1), (2, 2), (3, 3), (3, 4), (5, 5)")
    source = Query(connection, "SELECT * FROM sold", "id", page_size=page_size)
    seen: list[int] = []
    with pytest.raises(ValueError, match="several rows have the key id='3'"):
        seen.extend(row["n"] for row, _ in source.read(None))
    assert set(seen) <= {1, 2}
    with pytest.raises(ValueError, match="several rows have the key"):
        items(source, {"id": "2"})


def test_numbers_that_are_equal_come_twice_though_they_look_otherwise(
    connection: psycopg.Connection[Any],
) -> None:
    table(connection, "id numeric", "VALUES (1.0), (1.00)")
    with pytest.raises(ValueError, match="several rows have the key"):
        items(Query(connection, "SELECT * FROM sold", "id", page_size=1))


def test_texts_that_a_collation_has_equal_come_twice(
    connection: psycopg.Connection[Any],
) -> None:
    try:
        connection.execute(
            "CREATE COLLATION any_case"
            " (provider = icu, locale = 'und-u-ks-level2', deterministic = false)"
        )
    except psycopg.errors.FeatureNotSupported:
        pytest.skip("this PostgreSQL was built without ICU, so its collations are deterministic")
    table(connection, "name text COLLATE any_case", "VALUES ('a'), ('A')")
    with pytest.raises(ValueError, match="several rows have the key"):
        items(Query(connection, "SELECT * FROM sold", "name", page_size=1))


@pytest.mark.parametrize("page_size", [1, 2, 10])
def test_null_in_a_key_is_an_error(connection: psycopg.Connection[Any], page_size: int) -> None:
    table(connection, "id int", "VALUES (1), (2), (NULL)")
    source = Query(connection, "SELECT * FROM sold", "id", page_size=page_size)
    with pytest.raises(ValueError, match=r"a row has NULL in its key \(id\)"):
        items(source)
    # Another attempt does not see it, and does not end as if there were none.
    with pytest.raises(ValueError, match=r"a row has NULL in its key \(id\)"):
        items(source, {"id": "2"})


@pytest.mark.parametrize("page_size", [1, 10])
def test_null_in_a_later_column_of_a_key_is_an_error(
    connection: psycopg.Connection[Any], page_size: int
) -> None:
    table(connection, "a int, b int", "VALUES (1, 1), (1, NULL), (2, 1)")
    source = Query(connection, "SELECT * FROM sold", ["a", "b"], page_size=page_size)
    with pytest.raises(ValueError, match=r"a row has NULL in its key \(a, b\)"):
        items(source)


# Statements and their parameters.


def test_without_params_a_percent_sign_is_itself(connection: psycopg.Connection[Any]) -> None:
    sql = "SELECT n, 'a%s%(b)s%%' AS text FROM generate_series(1, 4) n WHERE n % 2 = 0"
    source = Query(connection, sql, "n", page_size=1, total="count")
    assert items(source) == [{"n": n, "text": "a%s%(b)s%%"} for n in (2, 4)]
    assert source.total() == 2


@pytest.mark.parametrize("end", [";", " ;\n", " -- all of them", "\n/* ; */;;"])
def test_an_end_of_a_statement_or_a_comment_does_no_harm(
    connection: psycopg.Connection[Any], end: str
) -> None:
    source = Query(connection, f"SELECT 1 AS id{end}", "id", total="count")
    assert (items(source), source.total()) == ([{"id": 1}], 1)


@pytest.mark.parametrize("name", ['we"ird', "UPPER", "per%cent %s", "ein ü", "awa_limit"])
@pytest.mark.parametrize("params", [None, [1], {"one": 1}], ids=["none", "sequence", "mapping"])
def test_any_name_of_a_column_can_be_the_key(
    connection: psycopg.Connection[Any], name: str, params: Any
) -> None:
    quoted = '"{}"'.format(name.replace('"', '""'))
    table(connection, f"{quoted} int", "VALUES (1), (2), (3)")
    place = {"NoneType": "1", "list": "%s", "dict": "%(one)s"}[type(params).__name__]
    sql = f"SELECT * FROM sold WHERE {place} = 1"
    source = Query(connection, sql, name, params, page_size=1)
    check_reading_on(source, [{name: n} for n in (1, 2, 3)])


def test_two_columns_of_one_name_are_an_error(connection: psycopg.Connection[Any]) -> None:
    with pytest.raises(ValueError, match="two columns of the query are called 'a'"):
        items(Query(connection, "SELECT 1 AS id, 2 AS a, 3 AS a", "id"))


def test_what_the_database_refuses_is_its_own_error(connection: psycopg.Connection[Any]) -> None:
    with pytest.raises(psycopg.errors.UndefinedColumn):
        items(Query(connection, "SELECT 1 AS id", "nope"))


# Transactions.


def test_with_autocommit_nothing_stays_open_between_pages(module_database_url: str) -> None:
    with psycopg.connect(module_database_url, autocommit=True) as connection:
        reader = Query(connection, "SELECT generate_series(1, 3) AS n", "n", page_size=1).read(None)
        next(reader)
        assert connection.info.transaction_status is TransactionStatus.IDLE


def test_without_autocommit_the_transaction_may_end_between_rows(module_database_url: str) -> None:
    with psycopg.connect(module_database_url) as connection:
        seen = []
        source = Query(connection, "SELECT generate_series(1, 5) AS n", "n", page_size=2)
        for row, _ in source.read(None):
            assert (
                connection.info.transaction_status is TransactionStatus.INTRANS or row["n"] % 2 == 0
            )
            seen.append(row["n"])
            connection.commit()
    assert seen == [1, 2, 3, 4, 5]


# What is refused at the call.


def test_arguments_are_checked_at_the_call(connection: psycopg.Connection[Any]) -> None:
    def query(**other: Any) -> Query:
        given: dict[str, Any] = {"connection": connection, "sql": "SELECT 1 AS id", "key": "id"}
        return Query(**(given | other))

    refused: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (TypeError, "sql must be a str", {"sql": b"SELECT 1"}),
        (TypeError, "key must be a column's name", {"key": 7}),
        (TypeError, "key must be a column's name", {"key": ["a", 7]}),
        (ValueError, "at least one column", {"key": []}),
        (ValueError, "at least one column", {"key": ""}),
        (ValueError, "each once", {"key": ("a", "a")}),
        (TypeError, "params must be None, a sequence or a mapping", {"params": "abc"}),
        (TypeError, "params must be None, a sequence or a mapping", {"params": {1, 2}}),
        (ValueError, "names with awa_ are Query's own", {"params": {"awa_limit": 1}}),
        (ValueError, "page_size is 0", {"page_size": 0}),
        (TypeError, "page_size is 1.5", {"page_size": 1.5}),
        (ValueError, "total is 'all'", {"total": "all"}),
        (ValueError, "total is -1", {"total": -1}),
        (ValueError, "total is True", {"total": True}),
        (TypeError, "connection must be of psycopg.*, not builtins.str", {"connection": "url"}),
    ]
    for kind, message, other in refused:
        with pytest.raises(kind, match=message):
            query(**other)


def test_connections_of_other_kinds_are_refused(module_database_url: str) -> None:
    with pytest.raises(TypeError, match=r"sqlalchemy\.orm\.session\.Session: use SelectRows"):
        Query(Session(), "SELECT 1 AS id", "id")
    engine = engine_on(module_database_url)
    with engine.connect() as connection, pytest.raises(TypeError, match="use SelectRows"):
        Query(connection, "SELECT 1 AS id", "id")
    with closing(engine.raw_connection()) as raw:
        assert items(Query(raw, "SELECT 1 AS id", "id")) == [{"id": 1}]
    engine.dispose()
    made = psycopg.AsyncConnection.__new__(psycopg.AsyncConnection)
    with pytest.raises(TypeError, match="the asynchronous psycopg"):
        Query(made, "SELECT 1 AS id", "id")


@pytest.mark.parametrize(
    "cursor", [7, {}, {"other": "7"}, {"id": "7", "name": "a"}, {"id": {"x": 1}}]
)
def test_a_cursor_of_another_key_is_a_mismatch(
    connection: psycopg.Connection[Any], cursor: Any
) -> None:
    with pytest.raises(CheckpointMismatch):
        Query(connection, "SELECT 1 AS id", "id").read(cursor)
