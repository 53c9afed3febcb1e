"""Runs in the worker at its start: tells what is set up wrongly, a line each, and goes on."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from types import FunctionType
from typing import Any


from ..runtime.trouble import logger
from ..settings import unknown_settings
from .current import is_ours


def report(app: Any, setting_names: Iterable[str]) -> None:
    """Misspelt settings, and tasks whose calls never reach us."""
    for line in unknown_settings(setting_names):
        logger.error("celery-awa: %s", line)
    for task in our_tasks(app):
        culprit = bypassing_class(type(task))
        if culprit is not None:
            logger.warning(
                "celery-awa: task %s has no progress and no checkpoint: %s.__call__ does not call "
                "super().__call__(); let it do so, or let AwaMixin go first among the bases",
                task.name,
                culprit,
            )


def our_tasks(app: Any) -> Iterator[Any]:
    """The registered tasks of our classes."""
    return (task for task in list(app.tasks.values()) if is_ours(task))


def bypassing_class(cls: type) -> str | None:
    """The name of the class before ours whose ``__call__`` never passes the call on."""
    for base in cls.__mro__:
        if "awa_task" in vars(base):
            return None
        call = vars(base).get("__call__")
        if call is not None and not _passes_on(call, depth=3):
            return base.__name__
    return None


def _passes_on(call: Any, depth: int) -> bool:
    """Whether a ``__call__`` calls super, a base by name, or wraps a function that does."""
    function = inspect.unwrap(call)
    if not isinstance(function, FunctionType) or depth == 0:
        return True  # not ours to judge
    names = {*function.__code__.co_names, *function.__code__.co_freevars}
    if names & {"super", "__class__", "AwaMixin", "AwaTask"}:
        return True
    wrapped = [cell.cell_contents for cell in function.__closure__ or () if _is_call(cell)]
    return any(_passes_on(one, depth - 1) for one in wrapped)


def _is_call(cell: Any) -> bool:
    try:
        return isinstance(cell.cell_contents, FunctionType)
    except ValueError:  # an empty cell
        return False


def uninstalled_tasks(app: Any) -> list[str]:
    """Names of tasks of ours on an app whose worker has no step of ours."""
    steps = {getattr(step, "__name__", str(step)) for step in app.steps["worker"]}
    if "HeartbeatStep" in steps:
        return []
    return sorted(task.name for task in our_tasks(app))
