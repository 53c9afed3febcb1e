"""Runs where the app is made, in producers and workers alike: one line puts the parts together."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from celery import Celery

from ..errors import SettingsError
from ..store.connection import check_url
from . import signals, start
from .bootstep import HeartbeatStep
from .task import AwaMixin


def install(
    app: Any,
    database_url: str | None = None,
    *,
    connect: Callable[[], Any] | None = None,
    default_base: bool = False,
) -> Any:
    """Make long tasks of this app dependable; returns the app.

    ``database_url``: a libpq URL, ``embedded:`` or ``embedded:PATH``; left out, the setting
    ``awa_database_url``, else the environment's AWA_DATABASE_URL. ``connect`` stands in place of
    a URL, for credentials that change: it is called for each new connection, on threads of ours,
    and returns an open ``psycopg.Connection`` that is ours from then on. ``default_base``: put
    AwaMixin over the app's own task class, so that every task can report. May be called more than
    once.

    Raises SettingsError for a URL that cannot be read, for URL and ``connect`` together, and for
    arguments of another type.
    """
    if not isinstance(app, Celery):
        raise SettingsError(f"install() takes a Celery app, not {type(app).__name__}")
    if default_base not in (True, False):
        kind = type(default_base).__name__
        raise SettingsError(f"default_base must be True or False, not of type {kind}")
    _name_database(app, database_url, connect)
    app.steps["worker"].add(HeartbeatStep)
    signals.connect()
    if default_base:
        _put_over_default_base(app)
    _install_in_spawned_children(app, default_base)
    return app


def _name_database(app: Any, url: str | None, connect: Any) -> None:
    if url is None and connect is None:
        return
    if url is not None and connect is not None:
        raise SettingsError("install() takes database_url or connect, not both")
    if url is not None:
        check_url(url)
    elif not callable(connect):
        raise SettingsError(
            f"connect must be a function that opens a connection, not of type "
            f"{type(connect).__name__}"
        )
    # The last call decides, whichever of the two it gave.
    setattr(app, start.URL_ATTRIBUTE, url)
    setattr(app, start.CONNECT_ATTRIBUTE, connect)


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
    connect: Callable[[], Any] | None = field(repr=False)
    default_base: bool

    def __call__(self, app: Any) -> None:
        install(app, self.database_url, connect=self.connect, default_base=self.default_base)

    def __reduce__(self) -> tuple[Any, ...]:
        connect = None if self.connect is None else _passed(self.connect)
        return _Again, (self.database_url, connect, self.default_base)


@dataclass(frozen=True)
class _Passed:
    """A ``connect`` on its way to a spawned child, pickled by itself.

    Unpickling it imports the user's modules, and the child is not ready for them before it calls.
    """

    pickled: bytes = field(repr=False)

    def __call__(self) -> Any:
        return pickle.loads(self.pickled)()


@dataclass(frozen=True)
class _NotPassed:
    """In its place one that cannot be pickled: the child starts, and says so where it calls.

    It goes to no other database: what the settings name may be for somebody else.
    """

    reason: str

    def __call__(self) -> Any:
        raise SettingsError(
            f"it cannot be passed to a spawned pool child, let it be a function of a module "
            f"({self.reason})"
        )


def _passed(connect: Callable[[], Any]) -> _Passed | _NotPassed:
    try:
        return _Passed(pickle.dumps(connect))
    except Exception as exc:  # whatever the user's object raises
        return _NotPassed(f"{type(exc).__name__}: {exc}")


def _install_in_spawned_children(app: Any, default_base: bool) -> None:
    before = [fixup for fixup in app.fixups if isinstance(fixup, _Again)]
    others = [fixup for fixup in app.fixups if not isinstance(fixup, _Again)]
    default_base = default_base or any(fixup.default_base for fixup in before)
    url = getattr(app, start.URL_ATTRIBUTE, None)
    connect = getattr(app, start.CONNECT_ATTRIBUTE, None)
    app.fixups = [*others, _Again(url, connect, default_base)]
