"""The tasks of a Django project, set up as Celery's documentation says.

For workers only: a process can be of one project, with one configuration.
"""

from __future__ import annotations

import os
from typing import Any

from celery import Celery, shared_task
from celery.signals import before_task_publish

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.acceptance.apps.django_settings")

import celery_awa
from celery_awa.django import AwaTask
from tests.acceptance.diary import note
from tests.waiting import hold

app = Celery("in_django")
app.config_from_object("django.conf:settings", namespace="CELERY")
celery_awa.install(app, default_base=app.conf["test_default_base"])


@shared_task(base=AwaTask, bind=True)
def with_base(self: Any, percent: float, gate: str | None = None) -> float:
    """A task with our base for Django."""
    return _report(self, percent, gate)


@shared_task(bind=True)
def with_default(self: Any, percent: float, gate: str | None = None) -> float:
    """A task with whatever base the app has."""
    return _report(self, percent, gate)


def _report(task: Any, percent: float, gate: str | None) -> float:
    task.set_progress(percent, "django")
    bases = [base.__name__ for base in type(task).__mro__]
    note(task, "reported", percent=percent, bases=bases)
    hold(gate)
    return percent


@shared_task(base=AwaTask, bind=True)
def send_on_commit(self: Any, name: str, gate: str) -> dict[str, int]:
    """Send in a transaction that is rolled back, and in one that is committed; count messages."""
    from django.db import transaction

    published: list[str] = []

    def count(sender: str, **_: Any) -> None:
        published.append(sender)

    task = self.app.tasks[f"{__name__}.{name}"]
    before_task_publish.connect(count, sender=task.name)
    counts = {}
    try:
        with transaction.atomic():
            task.delay_on_commit(10, gate)
            raise LookupError
    except LookupError:
        counts["rolled back"] = len(published)
    with transaction.atomic():
        task.delay_on_commit(20, gate)
        task.apply_async_on_commit((30, gate))
        counts["within"] = len(published)
    counts["committed"] = len(published)
    return counts
