"""A PostgreSQL server of an example's own."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import celery_awa
from celery_awa.store import embedded

from .keeper import FOLDER_VARIABLE


def started_server() -> str:
    """The URL of a server that goes with this process. In its worker: the same server's."""
    if FOLDER_VARIABLE in os.environ:
        return os.environ["AWA_DATABASE_URL"]
    # In a thread, which signals do not interrupt: a half-started server would be stopped too,
    # but only after this process has ended.
    with ThreadPoolExecutor(1) as thread:
        url = thread.submit(embedded.resolve, "embedded:").result()
    celery_awa.migrate(url)
    os.environ["AWA_DATABASE_URL"] = url
    return url
