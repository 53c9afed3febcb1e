"""The Celery app: one long task that goes on where its last attempt came to.

The worker loads this module by name. Its environment names the database that both celery-awa and
the task itself use.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from pathlib import Path

import psycopg
from celery import Celery

import celery_awa
from celery_awa import AwaTask
from example_worker.settings import SETTINGS

from . import table
from .sources import list_sources, read_source

app = Celery("file_index")
app.conf.update(
    SETTINGS,
    # A bar that moves twice a second is nicer to look at than the default of 2 s.
    awa_write_interval=0.5,
)
celery_awa.install(app)


@app.task(
    base=AwaTask,
    bind=True,
    acks_late=True,
    reject_on_worker_lost=True,
    autoretry_for=(psycopg.OperationalError,),
    retry_kwargs={"countdown": 2},
)
def index_files(self: AwaTask, root: str, most: int | None, pace: float) -> None:
    """Index the first ``most`` source files below ``root``; each takes ``pace`` seconds longer."""
    files = list_sources(Path(root))[:most]
    done = bisect_right(files, self.checkpoint.get("last", ""))
    with table.connect(os.environ["AWA_DATABASE_URL"], table.INDEXER) as database:
        table.note_beginning(database, self.attempt.number, os.getpid(), done)
        for count, path in enumerate(files[done:], done + 1):
            time.sleep(pace)
            # The row first. A kill between the two costs one row written twice, which changes
            # nothing in it; the other way about it would cost a row.
            table.put(database, read_source(Path(root), path))
            self.update_metadata({"last": path})
            self.set_progress(current=count, total=len(files), message=path)
