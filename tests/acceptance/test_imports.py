"""A large import that is killed again and again, and a rolling restart under long tasks."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psycopg
import pytest

from tests.acceptance.diary import Diary, Gate
from tests.acceptance.jobs import Jobs, outcome
from tests.acceptance.workers import FAST, Worker
from tests.waiting import eventually

Start = Callable[..., Worker]
APP = "tests.acceptance.apps.importing"
ROWS = 100_000
#: As many as the promise names in CI; a run is rescued 20 times at most, so most kill a child.
KILLS = int(os.environ.get("AWA_TEST_IMPORT_KILLS", "8"))


@pytest.fixture
def settings(settings: dict[str, Any], database_url: str) -> dict[str, Any]:
    return {**settings, **FAST, "test_target": database_url}


@pytest.fixture
def target(database_url: str) -> Iterator[psycopg.Connection[Any]]:
    """The user's own table. Without a unique key, so that what came twice shows."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS imported")
        connection.execute("CREATE TABLE imported (number integer, name text)")
        yield connection


@pytest.fixture
def csv_file(tmp_path: Path) -> Path:
    path = tmp_path / "rows.csv"
    lines = (f'{number},"name {number},\nof two lines"' for number in range(ROWS))
    path.write_text("number,name\n" + "\n".join(lines) + "\n")
    return path


def counts(target: psycopg.Connection[Any]) -> tuple[int, int, int]:
    """Rows, rows that are different, and rows that are as in the file."""
    row = target.execute(
        "SELECT count(*), count(DISTINCT number),"
        " count(*) FILTER (WHERE name = 'name ' || number || E',\\nof two lines') FROM imported"
    ).fetchone()
    assert row is not None
    return row[0], row[1], row[2]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("in_transaction", [True, False], ids=["in transaction", "after it"])
def test_an_import_that_is_killed_again_and_again_ends_with_every_row(
    start: Start,
    client: ModuleType,
    jobs: Jobs,
    target: psycopg.Connection[Any],
    csv_file: Path,
    in_transaction: bool,
) -> None:
    draw = random.Random(7)
    worker = start(concurrency=1)
    sent = client.import_csv.delay(str(csv_file), in_transaction=in_transaction, pause=0.005)
    for number in range(KILLS):
        # Somewhere in the next share of what is left, wherever the task is just then.
        seen = counts(target)[0]
        ahead = draw.uniform(0.05, 0.8) * max(0, ROWS - seen) / (KILLS - number)
        eventually(
            lambda least=seen + ahead: counts(target)[0] >= least,
            timeout=60,
            what=f"more than {seen} rows after kill {number}",
        )
        time.sleep(draw.uniform(0, 0.02))
        if number % 3 == 2:
            worker.start()
            worker.ready()
        else:
            (child,) = worker.children()
            os.kill(child, signal.SIGKILL)
            worker.wait_until_replaced(child)
    assert outcome(sent, timeout=120) == ROWS
    rows, different, right = counts(target)
    assert different == ROWS
    assert right == rows
    if in_transaction:
        assert rows == ROWS
    else:
        assert rows <= ROWS + KILLS * client.BATCH
    job = jobs.wait_for(sent.id, "completed")
    assert job.retries == 0
    assert job.rescues <= KILLS // 3


def test_a_kill_at_any_point_between_two_commits_does_nothing_twice(
    start: Start, client: ModuleType, jobs: Jobs, target: psycopg.Connection[Any]
) -> None:
    worker = start(concurrency=1)
    for point in (
        "before the first statement",
        "after the rows",
        "after the cursor",
        "after the commit",
    ):
        (child,) = worker.children()
        sent = client.import_and_die.delay(point)
        worker.wait_until_replaced(child)
        assert outcome(sent, timeout=30) == 6
        rows = target.execute(
            "SELECT number FROM imported WHERE name = %s ORDER BY number", (sent.id,)
        ).fetchall()
        assert [row[0] for row in rows] == [0, 1, 2, 3, 4, 5], point
        assert jobs.wait_for(sent.id, "completed").attempt == 2


@pytest.mark.timeout(240)
def test_a_rolling_restart_waits_for_no_task_and_loses_none(
    start: Start, client: ModuleType, jobs: Jobs, diary: Diary, gate: Gate
) -> None:
    workers = [start(concurrency=2) for _ in range(2)]
    sent = [client.endless.delay(gate.path) for _ in range(10)]
    for _ in range(2):
        for worker in workers:
            seen = len(diary.entries("item"))
            eventually(
                lambda least=seen + 40: len(diary.entries("item")) >= least,
                timeout=30,
                what="tasks at work",
            )
            # None of them ends by itself, so that none is waited for.
            worker.stop(timeout=20)
            worker.start()
            worker.ready()
    gate.open()
    for one in sent:
        assert outcome(one, timeout=60) == "done"
        items = [entry["item"] for entry in diary.entries("item", one.id)]
        assert items == list(range(len(items)))
        job = jobs.wait_for(one.id, "completed")
        assert (job.attempt, job.retries, job.rescues, job.errors) == (1, 0, 0, ())
    assert len(diary.entries("began")) > len(sent)
