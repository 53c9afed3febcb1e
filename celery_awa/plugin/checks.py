"""Runs in the worker at its start: tells what is set up wrongly, a line each, and goes on."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from contextlib import suppress
from types import CodeType, FunctionType
from typing import Any

from celery.utils.imports import symbol_by_name
from celery.utils.text import match_case

from ..runtime.trouble import logger
from ..settings import PREFIX, unknown_settings
from .current import is_ours


def report(app: Any) -> None:
    """Settings that have no effect, and tasks whose calls never reach us."""
    names = dict(_our_names(app.conf))
    for line in (*unknown_settings(names.values()), *_unread_settings(app.conf, names)):
        logger.error("celery-awa: %s", line)
    for task in our_tasks(app):
        culprit = bypassing_class(task.__class__)  # a proxy's own type is not the task's
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


def has_step(app: Any, step: type) -> bool:
    """Whether the app asked for this step; it may have done so by the step's import path."""
    return any(symbol_by_name(one) is step for one in app.steps["worker"])


def bypassing_class(cls: type) -> str | None:
    """The name of the class before ours whose ``__call__`` never passes the call on."""
    before = list(itertools.takewhile(lambda base: "awa_task" not in vars(base), cls.__mro__))
    if len(before) == len(cls.__mro__):
        return None  # a proxy's own class: not ours to judge
    for position, base in enumerate(before):
        call = vars(base).get("__call__")
        above = {"super", "AwaMixin", *(one.__name__ for one in before[position + 1 :])}
        if call is not None and not _passes_on(call, above, depth=3):
            return base.__name__
    return None


def _passes_on(call: Any, above: set[str], depth: int) -> bool:
    """Whether a ``__call__`` names that of super or of a class above, or a function that does."""
    function = _unwrapped(call)
    if not isinstance(function, FunctionType):
        return True  # not ours to judge
    names = set(_names_in(function.__code__))
    if "__call__" in names and names & above:
        return True
    return depth > 0 and any(
        _passes_on(other, above, depth - 1) for other in _functions_behind(function, names)
    )


def _names_in(code: CodeType) -> Iterator[str]:
    """What the code refers to by name, functions and expressions within it included."""
    yield from (*code.co_names, *code.co_freevars)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _functions_behind(function: FunctionType, names: set[str]) -> list[FunctionType]:
    """The functions that a function may call: of its closure, and of its module."""
    reached = [function.__globals__.get(name) for name in names]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # an empty cell
            reached.append(cell.cell_contents)
    # By type: a look at any attribute of a foreign object, a proxy say, may start something.
    return [one for one in reached if type(one) is FunctionType]


def _unwrapped(call: Any) -> Any:
    try:
        return inspect.unwrap(call)
    except ValueError:  # it wraps itself
        return call


def _our_names(conf: Any) -> Iterator[tuple[str, str]]:
    """The names that are meant for us, as the configuration has them and as we ask for them.

    Namespaced names appear raw among foreign ones: of others' only those in small letters count.
    """
    prefix = (conf.prefix or "").lower()
    for raw in map(str, list(conf)):
        if raw.startswith(PREFIX):
            yield raw, raw
        elif raw.lower().startswith(prefix + PREFIX):
            yield raw, raw.lower()[len(prefix) :]


def _unread_settings(conf: Any, names: dict[str, str]) -> Iterator[str]:
    """One line for each name that Celery does not find because of its case."""
    prefix = conf.prefix or ""
    for raw, name in names.items():
        found_as = match_case(prefix + name, prefix)
        if raw not in (name, found_as) and not unknown_settings([name]):
            yield f"setting {raw} has no effect; write {found_as}"
