"""An app whose database is given to install, and whose base class for all tasks is ours."""

from __future__ import annotations

from typing import Any

import celery_awa
from celery_awa import Client
from tests.acceptance.apps.configured import configured_app
from tests.acceptance.diary import note
from tests.waiting import hold

app = configured_app("installed")
celery_awa.install(app, app.conf["test_install_url"], default_base=True)


@app.task(bind=True)
def look(self: Any, gate: str | None = None) -> dict[str, Any]:
    """Report, wait for the gate and look at the row of this very task."""
    self.set_progress(30, "x")
    note(self, "began")
    hold(gate)
    flushed = self.flush_progress()
    with Client(self.app) as client:
        job = client.get_job(self.request.id)
    return {"flushed": flushed, "progress": job.progress if job else None}
