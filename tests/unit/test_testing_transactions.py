"""celery_awa.testing: what a task commits with its own work."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import psycopg
import pytest
from django.db import connection as django_connection
from sqlalchemy.orm import Session

from celery_awa.errors import InvalidProgress
from celery_awa.model import JobState
from celery_awa.testing import FakeTransaction, crash, run_task
from celery_awa.testing.memory_job import MemoryJob

from . import testing_tasks as tasks
from .testing_tasks import connections, diary


class Orders(FakeTransaction):
    """A connection to a table in memory."""

    def __init__(self, table: list[int]) -> None:
        super().__init__()
        self._table = table

    def insert(self, number: int) -> None:
        self.on_commit(lambda: self._table.append(number))


@pytest.fixture
def table() -> Iterator[list[int]]:
    rows: list[int] = []
    connections["orders"] = lambda: Orders(rows)
    yield rows
    connections.clear()
    diary.empty()


@pytest.mark.parametrize("number", range(5))
def test_a_crash_in_the_transaction_undoes_item_and_cursor(table: list[int], number: int) -> None:
    diary.call = lambda line: crash() if line == number else None
    run = run_task(tasks.committing)
    assert run.state is JobState.RUNNING
    assert table == list(range(number))
    assert run.items.get("items", 0) == number
    diary.call = lambda line: None
    assert run.resume().result == 5
    assert table == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("number", range(1, 6))
def test_a_crash_after_the_transaction_leaves_item_and_cursor(
    table: list[int], number: int
) -> None:
    run = run_task(tasks.committing, crash_after=number)
    assert table == list(range(number))
    assert run.items == {"items": number}
    assert run.resume().result == 5
    assert table == [0, 1, 2, 3, 4]


def test_an_error_in_the_transaction_undoes_item_and_cursor(table: list[int]) -> None:
    diary.call = lambda line: 1 / 0 if line == 2 else None
    run = run_task(tasks.committing)
    assert (run.state, table, run.items) == (JobState.FAILED, [0, 1], {"items": 2})


def test_a_transaction_in_which_the_lease_is_lost_holds_the_job_until_it_commits() -> None:
    run = run_task(tasks.committing_around_a_step, lose_lease_after="only")
    assert (run.lease_lost, run.steps, run.checkpoint["paid"]) == (True, ["only"], 1)


def test_a_transaction_can_be_committed_and_rolled_back_by_hand(table: list[int]) -> None:
    orders = Orders(table)
    orders.insert(1)
    orders.rollback()
    orders.insert(2)
    assert table == []
    orders.commit()
    orders.commit()
    with orders.transaction() as same:
        same.insert(3)
    assert (table, same) == ([2, 3], orders)


def test_any_other_object_commits_at_once(table: list[int]) -> None:
    connections["anything"] = lambda: nullcontext(object())
    diary.call = lambda line: crash() if line == "after 2" else None
    run = run_task(tasks.committing, "anything")
    assert run.items == {"items": 3}


@pytest.mark.parametrize(
    ("connection", "name"),
    [
        (django_connection, "django.utils.connection.ConnectionProxy"),
        (psycopg.Connection.__new__(psycopg.Connection), "psycopg.Connection"),
        (Session(), "sqlalchemy.orm.session.Session"),
        (sqlite3.connect(":memory:"), "sqlite3.Connection"),
    ],
    ids=["django", "psycopg", "sqlalchemy", "sqlite3"],
)
def test_a_real_connection_is_refused(table: list[int], connection: Any, name: str) -> None:
    connections["real"] = lambda: nullcontext(connection)
    run = run_task(tasks.committing, "real")
    assert (run.state, run.items) == (JobState.FAILED, {})
    assert isinstance(run.error, TypeError)
    assert re.search(
        f"whether the transaction of a {name} commits.*FakeTransaction", str(run.error)
    )


@pytest.mark.parametrize("values", ["a set", {"awa": {}}, "text"])
def test_what_is_committed_is_checked(values: Any) -> None:
    run = run_task(tasks.committing_values, values)
    assert isinstance(run.error, InvalidProgress)


def test_what_was_committed_goes_before_what_is_reported() -> None:
    run = run_task(tasks.committing_both)
    assert run.checkpoint == {"paid": 1, "told": 1}
    again = run.resume()
    assert isinstance(again.error, InvalidProgress)
    assert "an earlier attempt wrote this key with checkpoint_in" in str(again.error)


def test_what_is_committed_is_merged_as_the_database_does_it() -> None:
    job = MemoryJob("fail")
    job.commit({"a": 1, "awa_committed": {"rows": {"done": 1}, "files": {"done": 1}}})
    job.commit({"b": 1, "awa_committed": {"rows": {"done": 2}}})
    assert job.committed == {
        "a": 1,
        "b": 1,
        "awa_committed": {"rows": {"done": 2}, "files": {"done": 1}},
    }
    # What other code committed is left behind.
    job.commit({"c": 1, "awa_version": 2})
    assert job.committed == {"c": 1, "awa_version": 2}
