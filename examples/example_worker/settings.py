"""Celery's settings for an example: messages are files, and nothing is left outside its folder."""

from __future__ import annotations

import os

from .keeper import FOLDER_VARIABLE

SETTINGS = {
    "broker_url": "filesystem://",
    "broker_transport": "example_worker.transport:Transport",
    "broker_transport_options": {"polling_interval": 0.1},
    "task_ignore_result": True,
    "awa_write_interval": 0.2,
    # Beside the messages, so that nobody has to look for it if all of this is killed at once.
    "awa_slate_dir": os.environ.get(FOLDER_VARIABLE),
}
