"""Runs in a process of its own: the command ``rescue``, for those who want it apart from workers.

The passes run on the main thread, the statements on the database thread.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from typing import Any

import click
from celery.app.utils import find_app

from ..errors import AwaError, SettingsError, StoreUnavailable
from ..plugin import start
from ..plugin.current import trouble
from ..plugin.sending import Courier
from ..runtime.bell import Bell
from ..runtime.database_thread import DatabaseThread
from ..runtime.periodic_thread import PAUSE, SOON
from ..runtime.rescuer import RescueCounts, Rescuer
from ..settings import Settings
from ..store import embedded
from ..store.connection import check_url

#: Seconds for what is left to write at the end.
LAST_WRITES = 3.0
_random = random.SystemRandom()


@click.command("rescue")
@click.option(
    "-A",
    "--app",
    "name",
    metavar="APP",
    required=True,
    help="Where the Celery app is, as for celery -A: proj, or proj.celery:app.",
)
@click.option(
    "--database-url",
    metavar="URL",
    help="postgresql://… or embedded:PATH; without it what the app names, else the environment.",
)
@click.option("--schema", metavar="NAME", help="Postgres schema; without it the app's.")
@click.option("--once", is_flag=True, help="One pass, and no more.")
def rescue_command(name: str, database_url: str | None, schema: str | None, once: bool) -> None:
    """Look for jobs whose worker died and for messages that were not sent, and see to them.

    Workers do this themselves unless awa_rescue_in_workers is False. Any number may run at once,
    and the app need not register the tasks. Prints a line for each pass that did something.
    SIGTERM and SIGINT end it after the job at hand.
    """
    try:
        app = _found(name)
        _name_database(app, database_url, schema)
        _run(app, start.settings_of(app), once)
    except AwaError as exc:
        raise click.ClickException(" ".join(str(exc).split())) from exc


def _found(name: str) -> Any:
    try:
        app = find_app(name)
        app.loader.import_default_modules()
    except (Exception, SystemExit) as exc:  # whatever the user's modules raise
        why = f"{type(exc).__name__}: {exc}"
        raise SettingsError(f"the app {name} cannot be loaded: {why}") from exc
    return app


def _name_database(app: Any, url: str | None, schema: str | None) -> None:
    """Let the app name what the command was given, and make sure that it names a database."""
    if url is not None:
        check_url(url)
        setattr(app, start.URL_ATTRIBUTE, url)
        setattr(app, start.CONNECT_ATTRIBUTE, None)
    if schema is not None:
        app.conf.awa_schema = schema
    if not start.names_database(app):
        raise SettingsError(
            f"which database? Give --database-url postgresql://…, or set awa_database_url or "
            f"{start.URL_VARIABLE}"
        )
    if start.setting(app, "awa_database_url") == embedded.PREFIX:
        raise SettingsError(
            "the server of embedded: would end with this command; name a folder: embedded:PATH"
        )


def _run(app: Any, settings: Settings, once: bool) -> None:
    open_store = start.store_opener(app, settings)
    # What is wrong from the start is an error, and not something to wait for.
    open_store().close()
    database = DatabaseThread(open_store, trouble, name="celery-awa")
    courier = Courier(app)
    rescuer = Rescuer(database, courier, settings, trouble)
    try:
        with _stopped_by_signals(rescuer) as stopped:
            _pass(rescuer, may_wait=not once)
            while once and rescuer.in_doubt and not stopped(SOON):
                _pass(rescuer, may_wait=False)
            while not once and not stopped(_pause(settings, rescuer)):
                _pass(rescuer, may_wait=True)
    finally:
        database.stop(LAST_WRITES)
        courier.close()


def _pause(settings: Settings, rescuer: Rescuer) -> float:
    seconds = settings.rescue_interval * _random.uniform(*PAUSE)
    return min(SOON, seconds) if rescuer.in_doubt else seconds


def _pass(rescuer: Rescuer, *, may_wait: bool) -> None:
    try:
        counts = rescuer.run_once()
    except StoreUnavailable:
        if not may_wait:
            raise
    else:
        _tell(counts)


def _tell(counts: RescueCounts) -> None:
    done = ", ".join(f"{count} {name}" for name, count in asdict(counts).items() if count)
    if done:
        click.echo(f"{datetime.now().astimezone().isoformat(timespec='seconds')} {done}")


@contextmanager
def _stopped_by_signals(rescuer: Rescuer) -> Iterator[Callable[[float], bool]]:
    """Within it SIGTERM and SIGINT end the passes; yields what waits so long for that."""
    bell, stopped = Bell(), False

    def stop(*_: Any) -> None:
        nonlocal stopped
        stopped = True
        rescuer.stop(0)
        bell.ring()

    def wait(seconds: float) -> bool:
        if not stopped:
            bell.wait(seconds)
        return stopped

    before = {sig: signal.signal(sig, stop) for sig in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield wait
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)
