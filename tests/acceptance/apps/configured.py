"""A Celery app whose whole configuration comes from one environment variable, as JSON."""

from __future__ import annotations

import json
import os

from celery import Celery

CONFIG_VARIABLE = "AWA_TEST_CELERY_CONFIG"


class Unlucky(Exception):
    """The failure that tasks raise on purpose.

    Not beside the tasks: Celery pickles what tasks raise, and that imports this module.
    """


def configured_app(name: str) -> Celery:
    """The app: broker, result backend, ``awa_`` settings and, under ``test_``, the tests' own."""
    app = Celery(name)
    app.conf.update(json.loads(os.environ[CONFIG_VARIABLE]))
    return app
