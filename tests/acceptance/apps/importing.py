"""Imports of a file into a table of the user's own, and tasks without an end of their own."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import psycopg

import celery_awa
from celery_awa import AwaTask
from celery_awa.resume import CsvRows
from tests.acceptance.apps.configured import configured_app
from tests.acceptance.diary import note

app = configured_app("importing")
celery_awa.install(app)

#: Rows in one transaction.
BATCH = 500
_INSERT = "INSERT INTO imported (number, name) VALUES (%(number)s, %(name)s)"


@app.task(
    base=AwaTask,
    bind=True,
    acks_late=True,
    reject_on_worker_lost=True,
    name="import_csv",
)
def import_csv(self: Any, path: str, *, in_transaction: bool, pause: float) -> int:
    """Insert each row of the file; with the cursor in the same transaction, or kept after it."""
    rows = self.iterate(CsvRows(path), batch_size=BATCH)
    with psycopg.connect(app.conf["test_target"], autocommit=True) as connection:
        for batch in rows:
            with connection.transaction(), connection.cursor() as cursor:
                cursor.executemany(_INSERT, batch)
                if in_transaction:
                    rows.checkpoint_in(connection)
            time.sleep(pause)
    return rows.done


@app.task(
    base=AwaTask,
    bind=True,
    acks_late=True,
    reject_on_worker_lost=True,
    name="import_and_die",
)
def import_and_die(self: Any, die_at: str) -> int:
    """Insert numbers in batches of two; in its first attempt, die at a point of the second."""

    def pass_by(point: str) -> None:
        if point == die_at and self.attempt.number == 1 and rows.done == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    rows = self.iterate(range(6), batch_size=2)
    with psycopg.connect(app.conf["test_target"]) as connection:
        for batch in rows:
            pass_by("before the first statement")
            for number in batch:
                connection.execute(
                    "INSERT INTO imported VALUES (%s, %s)", (number, self.request.id)
                )
            pass_by("after the rows")
            rows.checkpoint_in(connection)
            pass_by("after the cursor")
            connection.commit()
            pass_by("after the commit")
    return rows.done


@app.task(base=AwaTask, bind=True, acks_late=True, name="endless")
def endless(self: Any, gate: str) -> str:
    """Do item after item until the gate is open."""
    note(self, "began", attempt=self.attempt.number)
    for number in self.iterate(range(1_000_000)):
        note(self, "item", item=number)
        if Path(gate).exists():
            return "done"
        time.sleep(0.02)
    return "ran out of items"
