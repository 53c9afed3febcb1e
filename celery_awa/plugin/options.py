"""Runs where a task is bound to its app: the options that a task of ours may have, checked.

Celery has applied ``task_annotations`` by then, so what they set is checked as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import SettingsError

#: More does not fit into their columns.
_MOST = 2**31 - 1
#: Seconds; the bound of every duration among the settings.
_LONGEST = 1e9


def check(task: Any) -> None:
    """Raises SettingsError naming the task, the value and what is allowed."""
    for name, (allows, allowed) in _OPTIONS.items():
        value = getattr(task, name)
        if not allows(value):
            raise SettingsError(f"{name} of task {task.name} is {value!r}; it must be {allowed}")


def _is_policy(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value in ("requeue", "fail"))


def _is_stall_policy(value: Any) -> bool:
    return isinstance(value, str) and value in ("show", "stop")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not _is_flag(value) and 0 <= value <= _MOST


def _is_duration(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not _is_flag(value)
    return value is None or (number and 0 < value < _LONGEST)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


_COUNT = _is_count, f"a whole number from 0 to {_MOST:,}"
_DURATION = _is_duration, "a number of seconds greater than 0, or None"
_OPTIONS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "lost_policy": (_is_policy, "'requeue', 'fail' or None"),
    "max_rescues": _COUNT,
    "deadline": _DURATION,
    "max_runtime": _DURATION,
    "stall_after": _DURATION,
    "stall_policy": (_is_stall_policy, "'show' or 'stop'"),
    "checkpoint_version": _COUNT,
}
