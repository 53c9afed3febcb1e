"""Runs in the worker before its pool starts, and in each pool child before its first task."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from celery.concurrency.prefork import TaskPool

from ..errors import SettingsError
from ..runtime.slate import Slate, SlateUnavailable
from ..runtime.task_process import TaskProcess
from ..runtime.trouble import logger
from ..runtime.worker_pages import WorkerPages
from ..settings import Settings, read_settings
from ..store import canonical, embedded, migrations
from ..store.protocol import Store
from . import checks
from .current import Here, here, trouble
from .verdict import hear_verdicts

#: Tells children, spawned ones too, that their worker has the step; the slate's path or "".
SLATE_VARIABLE = "CELERY_AWA_SLATE"
URL_VARIABLE = "AWA_DATABASE_URL"
#: Where an app keeps the URL that was given to ``install``; Client reads it too.
URL_ATTRIBUTE = "awa_database_url"
#: Bytes of a page's record above the limit of a snapshot: keys and punctuation.
RECORD_SLACK = 1_024
#: Seconds that a stopping worker or child spends on what is left to write.
LAST_WRITES = 3.0


def start_worker(app: Any, pool_cls: Any, children: int) -> None:
    """In the worker, before the pool."""
    settings = settings_of(app)
    _start_embedded(settings)
    checks.report(app)
    if isinstance(pool_cls, type) and issubclass(pool_cls, TaskPool):
        slate = _create_slate(settings, children)
        os.environ[SLATE_VARIABLE] = slate.path if slate is not None else ""
        for task in checks.our_tasks(app):
            hear_verdicts(task)
        here.pages = WorkerPages(slate, settings, store_opener(app, settings), trouble)
        here.pages.start()
    else:
        here.process = TaskProcess(settings, store_opener(app, settings), trouble)
        here.process.start()


def _start_embedded(settings: Settings) -> None:
    """Before any child is made: children find a private server by what this leaves to them."""
    try:
        if settings.database_url is not None:
            _resolved(settings.database_url, settings.schema)
    except Exception as exc:  # of a path that is none, too
        # As the database thread would: it fails for the same reason soon, and need not say it.
        trouble.warn(
            "database", "celery-awa cannot use its database, tasks go on without it: %s", exc
        )


def _resolved(url: str, schema: str) -> str:
    """The URL to connect to. An embedded server is started, and migrated, on the way."""
    resolved = embedded.resolve(url)
    if resolved != url:
        migrations.migrate(resolved, schema)
    return resolved


def stop_worker() -> None:
    """In the worker, after the pool has drained."""
    service = here.pages or here.process
    here.pages = here.process = None
    os.environ.pop(SLATE_VARIABLE, None)
    if service is not None and not service.stop(LAST_WRITES):
        logger.warning("celery-awa: the database did not confirm all that was left to write")


def start_child(app: Any) -> None:
    """In a pool child, forked or spawned, before its first task (worker_process_init)."""
    path = os.environ.get(SLATE_VARIABLE)
    if path is None:
        return
    settings = settings_of(app, quiet=True)
    slate = None
    if path:
        try:
            slate = Slate.open(path)
        except SlateUnavailable as exc:
            trouble.warn("slate", "celery-awa: a child goes without the slate: %s", exc)
    here.is_child = True
    here.process = TaskProcess(
        settings,
        store_opener(app, settings),
        trouble,
        slate=slate,
        idle_after=settings.connection_idle,
    )


def stop_child() -> None:
    """In a pool child that leaves (worker_process_shutdown)."""
    if here.is_child and here.process is not None:
        here.process.stop(LAST_WRITES)


def settings_of(app: Any, *, quiet: bool = False) -> Settings:
    """The app's settings; what is not allowed is told in one line, and its default is used."""
    settings, problems = read_settings(lambda name: setting(app, name))
    for problem in () if quiet else problems:
        logger.error("celery-awa: %s", problem)
    return settings


def setting(app: Any, name: str) -> Any:
    """One setting: given to install, else configured, else, for the URL, the environment."""
    if name == "awa_database_url":
        return (
            getattr(app, URL_ATTRIBUTE, None) or app.conf.get(name) or os.environ.get(URL_VARIABLE)
        )
    return app.conf.get(name)


def store_opener(app: Any, settings: Settings) -> Callable[[], Store]:
    """How this process opens its store; embedded servers are started and migrated on the way."""

    def open_store() -> Store:
        if settings.database_url is None:
            raise SettingsError(
                "no database is named: pass database_url to install(), or set "
                f"awa_database_url or {URL_VARIABLE}"
            )
        resolved = _resolved(settings.database_url, settings.schema)
        return canonical.open_store(resolved, settings.schema)

    return open_store


def report(found: Here) -> dict[str, Any]:
    """What ``celery inspect stats`` shows of us."""
    service = found.pages or found.process
    if service is None:
        return {}
    return {
        "database": "answering" if service.database.answering else "away",
        "attempts": service.attempts(),
        "dropped": service.database.dropped,
    }


def _create_slate(settings: Settings, children: int) -> Slate | None:
    # Twice as many pages as children: an attempt whose end is not confirmed keeps its page.
    try:
        return Slate.create(
            settings.slate_dir, 2 * children + 2, settings.max_progress_bytes + RECORD_SLACK
        )
    except SlateUnavailable as exc:
        logger.warning(
            "celery-awa: no slate, so each child heartbeats for itself and a killed child "
            "loses what it had not written: %s",
            exc,
        )
        return None
