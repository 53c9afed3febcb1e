"""An app that opens its connections itself, by a password which it reads anew each time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg

import celery_awa
from celery_awa import AwaTask, Client, StoreUnavailable
from tests.acceptance.apps.configured import configured_app
from tests.acceptance.diary import note
from tests.waiting import hold

app = configured_app("rotating")


def connect() -> psycopg.Connection[Any]:
    """As the documentation shows it."""
    password = Path(app.conf["test_password_file"]).read_text()
    return psycopg.connect(app.conf["test_connect_url"], password=password, connect_timeout=5)


# A function that cannot be found by its name cannot be passed to a spawned child either.
celery_awa.install(app, connect=(lambda: connect()) if app.conf.get("test_nameless") else connect)


@app.task(base=AwaTask, bind=True)
def flush_at_gates(self: Any, gates: list[str]) -> dict[str, Any] | None:
    """Flush once, and once more after each gate; returns what a client then sees of the last."""
    for number, gate in enumerate([None, *gates]):
        hold(gate)
        self.set_progress(number)
        try:
            note(self, "tried", flushed=self.flush_progress())
        except StoreUnavailable as exc:
            note(self, "tried", flushed=None, reason=str(exc))
    if not gates:
        return None
    with Client(self.app) as client:
        job = client.get_job(self.request.id)
    return job.progress if job else None
