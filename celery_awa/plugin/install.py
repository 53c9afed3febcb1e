"""Runs where the app is made, in producers and workers alike: one line puts the parts together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from celery import Celery

from ..errors import SettingsError
from ..store.connection import check_url
from . import signals, start
from .bootstep import HeartbeatStep
from .task import AwaMixin


def install(app: Any, database_url: str | None = None, *, default_base: bool = False) -> Any:
    """Make long tasks of this app dependable; returns the app.

    ``database_url``: a libpq URL, ``embedded:`` or ``embedded:PATH``; left out, the setting
    ``awa_database_url``, else the environment's AWA_DATABASE_URL. ``default_base``: put AwaMixin
    over the app's own task class, so that every task can report. May be called more than once.

    Raises SettingsError for a URL that cannot be read, and for arguments of another type.
    """
    if not isinstance(app, Celery):
        raise SettingsError(f"install() takes a Celery app, not {type(app).__name__}")
    if default_base not in (True, False):
        kind = type(default_base).__name__
        raise SettingsError(f"default_base must be True or False, not of type {kind}")
    if database_url is not None:
        check_url(database_url)
        setattr(app, start.URL_ATTRIBUTE, database_url)
    app.steps["worker"].add(HeartbeatStep)
    signals.connect()
    if default_base:
        _put_over_default_base(app)
    _install_in_spawned_children(app, default_base)
    return app


def _put_over_default_base(app: Any) -> None:
    base = app.Task
    if not issubclass(base, AwaMixin):
        body = {"abstract": True, "__module__": base.__module__}
        # Not as app.task_cls: that is pickled for spawned children, and such a class cannot be.
        app.Task = type("Task", (AwaMixin, base), body)


@dataclass(frozen=True)
class _Again:
    """A fix-up, which Celery pickles with the app and calls where a spawned child unpickles it."""

    database_url: str | None = field(repr=False)
    default_base: bool

    def __call__(self, app: Any) -> None:
        install(app, self.database_url, default_base=self.default_base)


def _install_in_spawned_children(app: Any, default_base: bool) -> None:
    before = [fixup for fixup in app.fixups if isinstance(fixup, _Again)]
    others = [fixup for fixup in app.fixups if not isinstance(fixup, _Again)]
    default_base = default_base or any(fixup.default_base for fixup in before)
    app.fixups = [*others, _Again(getattr(app, start.URL_ATTRIBUTE, None), default_base)]
