"""Runs where a message is published, producers included: names the run of each new message."""

from __future__ import annotations

from typing import Any

from celery import current_app

from . import message
from .current import is_ours, trouble


def name_run(sender: Any = None, headers: dict[str, Any] | None = None, **_: Any) -> None:
    """before_task_publish: a message without the name of its run begins a new one.

    Retries bring the name along. Tasks of other classes are left alone; a task that this
    producer does not know by class may be ours, and a header more does no harm.
    """
    try:
        if headers is None or "id" not in headers or message.RUN in headers:
            return
        if headers.get("retries") or message.FROM in headers:
            return  # it continues a run that has no name
        if _may_be_ours(sender):
            headers[message.RUN] = message.new_token()
    except Exception as exc:
        trouble.warn("bug", "celery-awa: a run was not named", exc_info=exc)


def _may_be_ours(name: Any) -> bool:
    task = current_app.tasks.get(name)
    return task is None or is_ours(task)
