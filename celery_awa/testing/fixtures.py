"""pytest fixtures: ``pytest_plugins = ["celery_awa.testing.fixtures"]`` in a conftest.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .task_run import TaskRun, run_task


@pytest.fixture
def awa_run() -> Callable[..., TaskRun]:
    """:func:`celery_awa.testing.run_task`."""
    return run_task
