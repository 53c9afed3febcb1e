"""What is set up wrongly is told when the worker starts, in a line that says what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import psycopg
import pytest

from tests.acceptance.workers import Worker

Start = Callable[..., Worker]
NOWHERE = "postgresql://postgres@127.0.0.1:1/none"


@pytest.mark.parametrize(
    ("mistakes", "lines"),
    [
        ({"awa_database_url": None}, ["pass database_url to install(), or set awa_database_url"]),
        ({"awa_database_url": "postgres//x"}, ["cannot be read", "looks like postgresql://user:"]),
        ({"awa_database_url": NOWHERE}, ["port 1 failed: Connection refused"]),
        ({"awa_database_url": "embedded:/proc/no/such"}, ["the folder /proc/no/such cannot be"]),
    ],
    ids=["no database", "no URL", "no server", "no folder"],
)
def test_a_wrong_database_is_told_in_one_line_and_the_worker_works_on(
    start_worker: Start, client: ModuleType, mistakes: dict[str, Any], lines: list[str]
) -> None:
    check_start(start_worker, client, mistakes, [lines])


def test_a_missing_migration_is_told_in_one_line_and_the_worker_works_on(
    start_worker: Start, client: ModuleType, empty_database_url: str
) -> None:
    mistake = {"awa_database_url": empty_database_url}
    check_start(start_worker, client, mistake, [["run `python -m celery_awa migrate`"]])


def test_a_newer_schema_is_told_in_one_line_and_the_worker_works_on(
    start_worker: Start, client: ModuleType, database_url: str
) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO celery_awa.awa_migrations (number, name) VALUES (999, '0999_future')"
        )
    check_start(start_worker, client, {}, [["is at migration 999", "upgrade the package"]])


def test_misspelt_and_wrong_settings_are_told_in_a_line_each_and_the_worker_works_on(
    start_worker: Start, client: ModuleType
) -> None:
    mistakes = {"awa_hartbeat_interval": 5, "awa_write_interval": "often"}
    lines = [
        ["'often'; it must be a number of seconds; the default 2.0 is used"],
        ["unknown setting awa_hartbeat_interval; did you mean awa_heartbeat_interval?"],
    ]
    check_start(start_worker, client, mistakes, lines)


def check_start(
    start_worker: Start, client: ModuleType, mistakes: dict[str, Any], lines: list[list[str]]
) -> None:
    """Each line, and no other of ours, is in the log of the worker's own process."""
    worker = start_worker(config=mistakes, concurrency=1)
    worker.wait_for_log(r"MainProcess\] .*" + re.escape(lines[-1][-1]))
    assert client.report.delay(5).get(timeout=20) == 5
    told = [line for line in worker.log().splitlines() if "MainProcess] celery-awa" in line]
    assert len(told) == len(lines)
    for line, parts in zip(sorted(told), lines, strict=True):
        assert all(part in line for part in parts), line
    assert worker.running
