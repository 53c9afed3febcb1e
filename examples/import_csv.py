"""Import a CSV file into a table, each row exactly once, though a process is killed on the way.

Needs no service: PostgreSQL is embedded, the messages are files, the worker is started here. What
matters is the task; the rest kills its process and looks whether all is well.
"""

from __future__ import annotations

import csv
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import psycopg
from celery import Celery

import celery_awa
from celery_awa import AwaTask
from celery_awa.resume import CsvRows
from example_worker import example
from example_worker.server import started_server
from example_worker.settings import SETTINGS
from example_worker.worker import Worker

ROWS, BATCH = 5_000, 100
URL = started_server()

app = Celery("import_csv")
# Otherwise Celery waits for 10 s whether a lost process comes back.
app.conf.update(SETTINGS, worker_lost_wait=0.5)
celery_awa.install(app, database_url=URL)


@app.task(base=AwaTask, bind=True, acks_late=True, reject_on_worker_lost=True)
def import_csv(self: AwaTask, path: str) -> None:
    """Insert all rows of the file."""
    self.update_metadata({"process": os.getpid()})
    rows = self.iterate(CsvRows(path), batch_size=BATCH)
    with psycopg.connect(URL, autocommit=True) as database:
        for batch in rows:
            with database.transaction(), database.cursor() as cursor:
                cursor.executemany(
                    "INSERT INTO people (number, name) VALUES (%(number)s, %(name)s)", batch
                )
                rows.checkpoint_in(database)  # commits with the rows, or not at all
            time.sleep(0.03)  # heavier work


def play(worker: Worker) -> Iterator[str]:
    path = os.path.join(worker.folder, "people.csv")
    write_people(path)
    with psycopg.connect(URL, autocommit=True) as database, celery_awa.Client(app) as client:
        # No unique key: what comes twice is to be seen.
        database.execute("CREATE TABLE people (number integer, name text)")
        sent = import_csv.delay(path)
        job = example.wait_for_percent(client, sent.id, 30)
        process = job.metadata["process"]
        os.kill(process, signal.SIGKILL)
        print(f"its process {process} was killed with SIGKILL")
        job = example.wait_for_end(client, sent.id)
        if (job.state, job.run_lease) != ("completed", 2):
            yield f"the job is {job.state} after {job.run_lease} executions: {job.errors}"
        yield from faults_in(database)


def write_people(path: str) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["number", "name"])
        writer.writerows([number, f"person {number},\nof two lines"] for number in range(ROWS))


def faults_in(database: psycopg.Connection[Any]) -> Iterator[str]:
    found = database.execute("SELECT number, name FROM people ORDER BY number").fetchall()
    if len(found) != ROWS:
        yield f"{len(found)} rows in the table, {ROWS} in the file"
    if {*found} != {(number, f"person {number},\nof two lines") for number in range(ROWS)}:
        yield "the rows in the table are not those of the file"
    print(f"{len(found)} rows in the table, {len({*found})} of them different, {ROWS} in the file")


if __name__ == "__main__":
    example.main("import_csv", play)
