"""Runs where the app is made, in producers and workers alike: one line puts the parts together."""

from __future__ import annotations

from typing import Any


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

    Raises SettingsError for a URL that cannot be read.
    """
    if not hasattr(app, "steps") or not hasattr(app, "conf"):
        raise SettingsError(f"install() takes a Celery app, not {type(app).__name__}")
    if database_url is not None:
        if not isinstance(database_url, str) or not database_url:
            raise SettingsError(f"database_url is {database_url!r}; it must be a text")
        if not database_url.startswith("embedded:"):
            check_url(database_url)
        setattr(app, start.URL_ATTRIBUTE, database_url)
    app.steps["worker"].add(HeartbeatStep)
    signals.connect()
    if default_base:
        _put_over_default_base(app)
    return app


def _put_over_default_base(app: Any) -> None:
    base = app.Task
    if issubclass(base, AwaMixin):
        return
    own = type("AwaTask", (AwaMixin, base), {"abstract": True, "__module__": base.__module__})
    app.task_cls = own
    # The class that the app bound before stays in this cached property otherwise.
    app.__dict__.pop("Task", None)
