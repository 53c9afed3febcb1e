"""The reporting verbs of an AwaTask, doing nothing: the same tasks on plain Celery."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery import Task


class Silent:
    """The verbs."""

    progress: dict[str, Any] | None = None
    checkpoint: Mapping[str, Any] = {}
    number: int | None = None

    @property
    def attempt(self) -> Silent:
        """Stands in for the handle of the attempt."""
        return self

    def set_progress(self, percent: float | None = None, message: str | None = None) -> None:
        """Say how far the work is, to nobody."""

    def update_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Set a checkpoint that nobody keeps."""

    def flush_progress(self, timeout: float = 5.0) -> bool:
        """Confirm nothing."""
        return True


class SilentTask(Silent, Task):
    """A plain Celery task that can be told to report and does not."""


def current_attempt() -> Silent:
    """Stands in for the handle of whichever attempt runs."""
    return Silent()
