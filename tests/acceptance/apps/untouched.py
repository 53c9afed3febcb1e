"""A plain app in a process where another one was set up with ours."""

from __future__ import annotations

from celery import Celery

import celery_awa
from tests.acceptance.apps.configured import configured_app

other = celery_awa.install(Celery("other", set_as_current=False))
app = configured_app("untouched")


@app.task
def plain() -> str:
    """A task without the plugin."""
    return "plain"
