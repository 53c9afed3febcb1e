"""The settings of a Django project: the configuration of the test, in Celery's namespace."""

from __future__ import annotations

import json
import os

from tests.acceptance.apps.configured import CONFIG_VARIABLE

_config = json.loads(os.environ[CONFIG_VARIABLE])
globals().update({f"CELERY_{name.upper()}": value for name, value in _config.items()})

SECRET_KEY = "of a test"
USE_TZ = True
DATABASES = {
    "default": {"ENGINE": "django.db.backends.sqlite3", "NAME": _config["test_sqlite"]},
}
#: A setting of somebody else's.
AWA_OTHER = "foreign"
