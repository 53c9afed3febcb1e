"""Runs in the worker before its pool starts, and in each pool child before its first task."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from celery.concurrency.prefork import TaskPool

from ..errors import SettingsError
from ..runtime.adoption import Adoption
from ..runtime.database_digest import database_digest
from ..runtime.rescuer import Rescuer
from ..runtime.slate import Slate, SlateUnavailable
from ..runtime.task_process import TaskProcess
from ..runtime.trouble import logger
from ..runtime.worker_pages import WorkerPages
from ..settings import Settings, read_settings
from ..store import canonical, embedded, migrations
from ..store.connection import connect_by
from ..store.protocol import Store
from . import checks
from .current import Here, bugs_told, here, trouble
from .sending import Courier
from .verdict import hear_verdicts

#: Tells children, spawned ones too, that their worker has the step; the slate's path or "".
SLATE_VARIABLE = "CELERY_AWA_SLATE"
URL_VARIABLE = "AWA_DATABASE_URL"
#: Where an app keeps the URL that was given to ``install``; Client reads it too.
URL_ATTRIBUTE = "awa_database_url"
#: The same for what opens a connection.
CONNECT_ATTRIBUTE = "awa_connect"
#: What ends a pool child. billiard masks it while it holds the lock of the pipe that the children
#: share for their results; taken by another thread it would end the child there, and its siblings
#: would wait for the lock for ever.
ENDING_CHILDREN = (signal.SIGTERM, signal.SIGQUIT)
#: Bytes of a page's record above the limit of a snapshot: keys and punctuation.
RECORD_SLACK = 1_024
#: Seconds that a stopping worker or child spends on what is left to write, and for which a
#: stopping worker waits for the job that its rescuer has at hand.
LAST_WRITES, LAST_RESCUE = 3.0, 2.0


def start_worker(worker: Any, children: int) -> None:
    """In the worker, before the pool of at most so many children."""
    app, pool_cls = worker.app, worker.pool_cls
    settings = settings_of(app)
    _start_embedded(settings)
    with bugs_told("what is set up wrongly cannot be told"):
        checks.report(app)
    here.time_limit = worker.time_limit
    for task in checks.our_tasks(app):
        hear_verdicts(task)
    connects = getattr(app, CONNECT_ATTRIBUTE, None) is not None
    digest = database_digest(
        settings.database_url, settings.schema, app=str(app.main) if connects else None
    )
    adoption = Adoption(digest, settings, trouble, _wake_rescuer)
    opener = store_opener(app, settings)
    if isinstance(pool_cls, type) and issubclass(pool_cls, TaskPool):
        slate = _create_slate(settings, children, digest)
        os.environ[SLATE_VARIABLE] = slate.path if slate is not None else ""
        here.pages = WorkerPages(slate, settings, opener, trouble, adoption=adoption)
        here.pages.start()
    else:
        here.process = TaskProcess(settings, opener, trouble, adoption=adoption)
        here.process.start()
    _start_rescuer(app, settings)


def _start_rescuer(app: Any, settings: Settings) -> None:
    service = here.pages or here.process
    if service is None or not settings.rescue_in_workers or not names_database(app):
        return
    here.rescuer = Rescuer(service.database, Courier(app), settings, trouble)
    here.rescuer.start()


def _wake_rescuer() -> None:
    if here.rescuer is not None:
        here.rescuer.wake()


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


def worker_stopping() -> None:
    """In the worker, also in a signal's handler: its attempts may look for this and stop."""
    service = here.pages or here.process
    if service is not None:
        service.worker_stopping()


def attempts_go_on() -> bool:
    """Whether tasks run in this very process that have not ended."""
    running = [] if here.process is None else here.process.in_flight.all()
    return any(not attempt.ended for attempt in running)


def stop_worker(*, dying: bool = False) -> None:
    """In the worker, after the pool has drained; ``dying``: whatever still runs ends as well."""
    service = here.pages or here.process
    rescuer = here.rescuer
    here.pages = here.process = here.rescuer = None
    os.environ.pop(SLATE_VARIABLE, None)
    if rescuer is not None:
        rescuer.stop(LAST_RESCUE)
    if service is not None and not service.stop(LAST_WRITES, dying=dying):
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
        blocks=ENDING_CHILDREN,
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
    """One setting: given to install, else configured, else, for the URL, the environment.

    Where ``install`` was given something that opens connections, no URL counts.
    """
    if name == "awa_database_url":
        if getattr(app, CONNECT_ATTRIBUTE, None) is not None:
            return None
        return (
            getattr(app, URL_ATTRIBUTE, None) or app.conf.get(name) or os.environ.get(URL_VARIABLE)
        )
    return app.conf.get(name)


def store_opener(app: Any, settings: Settings) -> Callable[[], Store]:
    """How this process opens its store; embedded servers are started and migrated on the way."""

    def open_store() -> Store:
        connect = getattr(app, CONNECT_ATTRIBUTE, None)
        if connect is not None:
            return canonical.open_store(connect_by(connect), settings.schema)
        if settings.database_url is None:
            raise SettingsError(
                "no database is named: pass database_url to install(), or set "
                f"awa_database_url or {URL_VARIABLE}"
            )
        resolved = _resolved(settings.database_url, settings.schema)
        return canonical.open_store(resolved, settings.schema)

    return open_store


def names_database(app: Any) -> bool:
    """Whether it is said anywhere which database to use."""
    named = setting(app, "awa_database_url") is not None
    return named or getattr(app, CONNECT_ATTRIBUTE, None) is not None


def report(found: Here) -> dict[str, Any]:
    """What ``celery inspect stats`` shows of us."""
    service = found.pages or found.process
    if service is None:
        return {}
    database = service.database
    reason = {} if database.answering else {"reason": database.reason}
    rescued = {} if found.rescuer is None else {"rescues": asdict(found.rescuer.totals())}
    return {
        "database": "answering" if database.answering else "away",
        **reason,
        "attempts": service.attempts(),
        "dropped": database.dropped,
        **rescued,
    }


def _create_slate(settings: Settings, children: int, database: bytes) -> Slate | None:
    # Twice as many pages as children: an attempt whose end is not confirmed keeps its page.
    pages, record_bytes = 2 * children + 2, settings.max_progress_bytes + RECORD_SLACK
    try:
        return Slate.create(settings.slate_dir, pages, record_bytes, database)
    except SlateUnavailable as exc:
        logger.warning(
            "celery-awa: no slate, so each child heartbeats for itself and a killed child "
            "loses what it had not written: %s",
            exc,
        )
        return None
