"""The Celery app: one long task that goes on where its last attempt came to.

The worker loads this module by name. Its environment names the folder of the broker, and the
database that both celery-awa and the task itself use.
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

from . import table
from .keeper import FOLDER_VARIABLE
from .sources import list_sources, read_source

_folder = os.environ[FOLDER_VARIABLE]

app = Celery("file_index", broker="filesystem://")
app.conf.update(
    broker_transport="file_index.transport:Transport",
    broker_transport_options={
        "data_folder_in": f"{_folder}/waiting",
        "data_folder_out": f"{_folder}/waiting",
        "control_folder": f"{_folder}/control",
        # Without these two every message passes through the system's temporary folder.
        "store_processed": True,
        "processed_folder": f"{_folder}/taken",
        "polling_interval": 0.1,
    },
    task_ignore_result=True,
    # A bar that moves twice a second is nicer to look at than the default of 2 s.
    awa_write_interval=0.5,
    # Beside the messages, so that nobody has to look for it if all of this is killed at once.
    awa_slate_dir=_folder,
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
