"""An app with tasks of ours that was not set up."""

from __future__ import annotations

from typing import Any

from celery_awa import AwaTask
from tests.acceptance.apps.configured import configured_app

app = configured_app("uninstalled")


@app.task(base=AwaTask, bind=True)
def report(self: Any) -> dict[str, Any]:
    """Report, retry once, and return what can be seen of the reports."""
    found = dict(self.checkpoint)
    self.set_progress(30, "x")
    self.update_metadata({"last_id": 7})
    if not self.request.retries:
        raise self.retry(countdown=0)
    return {
        "checkpoint": found,
        "progress": self.progress,
        "flushed": self.flush_progress(),
        "number": self.attempt.number,
    }


@app.task(base=AwaTask)
def other() -> None:
    """Another of them."""
