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

config = json.loads(os.environ[CONFIG_VARIABLE])
foreign = config.pop("test_foreign", {})
namespace = config.pop("test_namespace", "CELERY")
prefix = f"{namespace}_" if namespace else ""
names = {
    (prefix + name).upper() if prefix.isupper() else prefix + name: value
    for name, value in config.items()
}


class Configuration(SimpleNamespace):
    """Has one value that nobody can read, where the test asks for that."""

    @property
    def CELERY_AWA_SCHEMA(self) -> str:
        if "test_unreadable" in config:
            raise LookupError("the schema's name is kept elsewhere")
        return "celery_awa"


app = Celery("namespaced")
app.config_from_object(Configuration(**names, **foreign), namespace=namespace)
celery_awa.install(app)


@app.task(base=AwaTask, bind=True)
def report_too_much(self: Any, length: int) -> int | None:
    """Report that many characters; returns the limit that it met."""
    self.set_progress(10)
    try:
        self.set_progress(20, "x" * length)
    except ProgressTooLarge as too_large:
        return too_large.limit
    return None
