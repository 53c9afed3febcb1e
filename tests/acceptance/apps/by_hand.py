"""An app with the worker step, added by hand."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from celery_awa import AwaTask, HeartbeatStep
from tests.acceptance.apps.configured import Unlucky, configured_app
from tests.acceptance.diary import note

app = configured_app("by_hand")
app.steps["worker"].add(app.conf.get("test_step", HeartbeatStep))


@app.task(base=AwaTask, bind=True)
def report_until(self: Any, gate: str) -> None:
    """Report again and again until the gate opens, then once more, and fail."""
    note(self, "began")
    change = 0
    while not Path(gate).exists():
        change += 1
        self.set_progress(change % 100, "by hand")
        self.update_metadata({"last_id": 7})
        time.sleep(0.01)
    self.set_progress(None, "the last")
    raise Unlucky("on purpose")
