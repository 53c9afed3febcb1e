"""Celery workers as real processes, and as a thread for the in-memory broker."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import celery
import pytest
from celery import _state, signals
from celery.app.defaults import NAMESPACES
from celery.contrib.testing import worker as celery_testing
from celery.result import AsyncResult

from tests import processes
from tests.acceptance.apps.configured import CONFIG_VARIABLE
from tests.processes import Process
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
DEFAULT_APP = "tests.acceptance.apps.basic"

#: Celery 5.7 and later start a pool's processes afresh where they are told to.
CAN_SPAWN = "pool_start_method" in NAMESPACES["worker"]

#: The pools of greenlets; their libraries come with the extra ``dev``.
GREEN_POOLS = [
    pytest.param(
        {"pool": name, "concurrency": 60},
        id=name,
        marks=pytest.mark.skipif(not importlib.util.find_spec(name), reason=f"needs {name}"),
    )
    for name in ("gevent", "eventlet")
]

POOLS = [
    pytest.param({"pool": "prefork", "start_method": "fork"}, id="fork"),
    *([pytest.param({"pool": "prefork", "start_method": "spawn"}, id="spawn")] * CAN_SPAWN),
    pytest.param({"pool": "threads"}, id="threads"),
    pytest.param({"pool": "solo", "concurrency": 1}, id="solo"),
    *GREEN_POOLS,
]


#: Settings with which a lost task is rescued within a second or two.
FAST = {
    "awa_write_interval": 0.2,
    "awa_heartbeat_interval": 0.3,
    "awa_stale_after": 1.5,
    "awa_rescue_interval": 0.3,
    "awa_claim_after": 0,
}


@dataclass(frozen=True)
class WorkerOptions:
    """What to start. ``options`` are further arguments of ``celery worker``."""

    app: str = DEFAULT_APP
    pool: str = "prefork"
    concurrency: int = 2
    start_method: str = "fork"
    options: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)


class Worker:
    """One ``celery worker``: started, watched, stopped or killed by a test."""

    def __init__(self, name: str, wanted: WorkerOptions, folder: Path) -> None:
        self.name = f"{name}@localhost"
        self.wanted = wanted
        self._folder = folder
        self._starts = 0
        self.start()

    def start(self) -> None:
        """Start the process, also again under the same name; nothing of the first may be left."""
        if self._starts:
            self.end()
        self._starts += 1
        self.process = Process(
            self._command(),
            log=self._folder / f"{self.name}.{self._starts}.log",
            env=self._environment(),
            cwd=ROOT,
        )

    @property
    def pid(self) -> int:
        """The id of the worker's own process."""
        return self.process.pid

    @property
    def running(self) -> bool:
        """Whether the worker's own process has not ended."""
        return self.process.running

    @property
    def returncode(self) -> int | None:
        """The exit status; None while it runs."""
        return self.process.returncode

    def ready(self, *, timeout: float = 20.0) -> Worker:
        """Wait until the worker takes tasks."""
        self.wait_for_log(rf"{re.escape(self.name)} ready\.", timeout=timeout)
        return self

    def children(self) -> list[int]:
        """Ids of the pool's processes; empty in the pools that have none.

        The worker's other children, such as the tracker that comes with spawn, do not count.
        """
        own = processes.command_line(self.pid)
        return [pid for pid in processes.children(self.pid) if _serves_pool(pid, own)]

    def wait_until_replaced(self, child: int) -> None:
        """Wait until the pool has another process in the place of this one.

        To be called before the next task is sent wherever Celery ends a child: it says so before
        it does, by result and log, and what the child is handed meanwhile is lost with it.
        """

        def replaced() -> bool:
            now = self.children()
            return child not in now and len(now) == self.wanted.concurrency

        eventually(replaced, what=f"another child of {self.name} in place of {child}")

    def kill(self, sig: int = signal.SIGKILL) -> None:
        """Signal the worker's own process."""
        self.process.kill(sig)

    def stop(self, sig: int = signal.SIGTERM, *, timeout: float = 30.0) -> int:
        """Stop it warm, or cold by SIGQUIT, wait for its end and return the exit status.

        Raises AssertionError with the log when that takes longer; the worker is killed then.
        """
        self.kill(sig)
        try:
            if str(self.wanted.config["broker_url"]).startswith("filesystem:"):
                self._wake_until_stopped(timeout)
            return self.process.wait(timeout)
        except AssertionError as late:
            self.kill(signal.SIGKILL)
            raise AssertionError(f"no stop: {late}\n{self.log()[-4000:]}") from None

    def _wake_until_stopped(self, timeout: float) -> None:
        # Where it polls, a worker looks up from waiting for messages every 2 s only, and twice
        # until it stops. Any message has it look at once.
        with celery.Celery(set_as_current=False) as app:
            app.conf.update(self.wanted.config)

            def stopped() -> bool:
                app.control.broadcast("ping", destination=[self.name])
                return not self.running

            eventually(stopped, timeout=timeout, what=f"end of {self.name}", interval=0.1)

    def log(self) -> str:
        """What this start of the worker and its children wrote so far."""
        return self.process.log()

    def wait_for_log(self, pattern: str, *, timeout: float = 10.0) -> re.Match[str]:
        """Wait until a line of the log matches the pattern."""
        return self.process.wait_for_log(pattern, timeout=timeout)

    def end(self) -> None:
        """Kill it if it still runs, and fail if anything that it started is left."""
        # Celery's own: a child that is being spawned when its worker is killed does not notice.
        self.process.end(alone=self.wanted.start_method == "spawn")

    def _command(self) -> list[str]:
        wanted = self.wanted
        return [
            *(sys.executable, "-m", "celery", "-A", wanted.app, "worker"),
            *("--pool", wanted.pool, "--concurrency", str(wanted.concurrency)),
            *("--hostname", self.name, "--loglevel", "INFO"),
            # Asking the other workers at start takes a second, and there is nothing to hear.
            *("--without-mingle", "--without-gossip"),
            *wanted.options,
        ]

    def _environment(self) -> dict[str, str]:
        config = dict(self.wanted.config)
        if self.wanted.start_method != "fork":
            config["worker_pool_start_method"] = self.wanted.start_method
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith("AWA_")
        }
        return {
            **inherited,
            "PYTHONUNBUFFERED": "1",
            CONFIG_VARIABLE: json.dumps(config),
            **self.wanted.env,
        }


def _serves_pool(pid: int, parents_command: str) -> bool:
    command = processes.command_line(pid)
    return command == parents_command or "billiard.spawn import spawn_main" in command


class OftenPolled(AsyncResult):
    """A result that a test waits for: one in a file announces nothing, so it is polled."""

    def get(self, timeout: float | None = None, **options: Any) -> Any:
        """As Celery's, but for looking ten times as often."""
        return super().get(timeout, **{"interval": 0.05, **options})


def load_app(name: str, config: Mapping[str, Any]) -> ModuleType:
    """A fresh copy of an app module under this configuration, for the side that sends tasks.

    Its tasks have the same names as the worker's; ``.app`` is the Celery app. It is not entered
    into ``sys.modules``, so each test has its own.
    """
    spec = importlib.util.find_spec(name)
    assert spec, f"no module {name}"
    assert spec.loader, f"{name} is no module to execute"
    module = importlib.util.module_from_spec(spec)
    with _configured(config), _for_this_app_alone():
        spec.loader.exec_module(module)
        module.app.finalize()
    module.app.AsyncResult = module.app.subclass_with_self(OftenPolled)
    return module


@contextmanager
def worker_thread(app: celery.Celery) -> Iterator[Any]:
    """A solo worker in a thread of this process: the one that can serve the memory broker."""
    stopping, stopped = threading.Event(), threading.Event()
    waker = threading.Thread(target=_wake, args=(app, stopping, stopped))
    with (
        _logging_left_alone(),
        celery_testing.start_worker(app, pool="solo", perform_ping_check=False) as controller,
    ):
        waker.start()
        try:
            yield controller
        finally:
            stopping.set()
    stopped.set()
    waker.join()


@contextmanager
def _logging_left_alone() -> Iterator[None]:
    # Celery would set the level of this process's root logger, and tests to come would miss
    # warnings. Where somebody else says that he sees to the logging it does nothing.
    def see_to_it(**_: Any) -> None:
        pass

    signals.setup_logging.connect(see_to_it)
    try:
        yield
    finally:
        signals.setup_logging.disconnect(see_to_it)


def _wake(app: celery.Celery, stopping: threading.Event, stopped: threading.Event) -> None:
    # For the same reason as in Worker.stop.
    stopping.wait()
    while not stopped.wait(0.05):
        app.control.broadcast("ping")


def merged(*configs: Mapping[str, Any]) -> dict[str, Any]:
    """One configuration of several: later ones win, mappings in them are merged as well."""
    result: dict[str, Any] = {}
    for config in configs:
        for key, value in config.items():
            both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
            result[key] = merged(result[key], value) if both else value
    return result


@contextmanager
def _configured(config: Mapping[str, Any]) -> Iterator[None]:
    before = os.environ.get(CONFIG_VARIABLE)
    os.environ[CONFIG_VARIABLE] = json.dumps(dict(config))
    try:
        yield
    finally:
        if before is None:
            del os.environ[CONFIG_VARIABLE]
        else:
            os.environ[CONFIG_VARIABLE] = before


@contextmanager
def _for_this_app_alone() -> Iterator[None]:
    # Celery gives each task to every app of the process, those to come included.
    finalizers, others = set(_state._on_app_finalizers), list(_state._apps)
    _state._apps.clear()
    try:
        yield
    finally:
        _state._on_app_finalizers.intersection_update(finalizers)
        _state._apps.update(others)
