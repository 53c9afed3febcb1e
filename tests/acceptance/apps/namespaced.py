"""An app whose configuration is an object with a namespace, among names of others."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import Any

from celery import Celery

import celery_awa
from celery_awa import AwaTask, ProgressTooLarge
from tests.acceptance.apps.configured import CONFIG_VARIABLE
from tests.acceptance.diary import note

config = json.loads(os.environ[CONFIG_VARIABLE])
foreign = config.pop("test_foreign", {})
names = {f"CELERY_{name.upper()}": value for name, value in config.items()}

app = Celery("namespaced")
app.config_from_object(SimpleNamespace(**names, **foreign), namespace="CELERY")
celery_awa.install(app)


@app.task(base=AwaTask, bind=True)
def report_too_much(self: Any, length: int) -> int | None:
    """Report that many characters; returns the limit that it met."""
    self.set_progress(10)
    note(self, "reported", flushed=self.flush_progress())
    try:
        self.set_progress(20, "x" * length)
    except ProgressTooLarge as too_large:
        return too_large.limit
    return None
