"""Imports of a file into a table of the user's own, and tasks without an end of their own."""

from __future__ import annotations

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
