"""Runs wherever a Django project's tasks do: the task base that keeps ``delay_on_commit``."""

from __future__ import annotations

from celery.contrib.django.task import DjangoTask

from ..plugin.task import AwaMixin


class AwaTask(AwaMixin, DjangoTask):  # type: ignore[misc]  # celery ships no types
    """DjangoTask with progress and checkpoints: ``@shared_task(base=AwaTask, bind=True)``."""

    abstract = True


__all__ = ["AwaTask"]
