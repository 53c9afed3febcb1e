"""A RabbitMQ server of the tests' own, to be stopped, killed and started again."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import kombu

from tests.processes import Process
from tests.services.ports import answers, free_port
from tests.services.required import program
from tests.waiting import eventually

#: Debian's program on the PATH changes to a user of its own and to its folders; this does not.
_UNWRAPPED = "/usr/lib/rabbitmq/bin/rabbitmq-server"
#: Two schedulers that sleep when there is nothing to do, and no port to be reached from outside.
_MODEST = "+S 2:2 +sbwt none +sbwtdcpu none +sbwtdio none"
_LOCAL = "-kernel inet_dist_use_interface {127,0,0,1}"


class PrivateRabbitMQ:
    """One server on a port of 127.0.0.1 that keeps its durable queues over restarts."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"amqp://guest:guest@127.0.0.1:{self.port}//"
        self._folder = folder
        self._program = _UNWRAPPED if os.path.exists(_UNWRAPPED) else program("rabbitmq-server")
        self._epmd_port, self._distribution_port = free_port(), free_port()
        folder.mkdir(exist_ok=True)
        # The server would start one that outlives it.
        self._epmd = Process(
            [program("epmd"), "-port", str(self._epmd_port), "-address", "127.0.0.1"],
            log=folder / "epmd.log",
            env=self._env(),
            cwd=folder,
        )
        eventually(lambda: answers(self._epmd_port), what=f"epmd on port {self._epmd_port}")
        self.start()

    def start(self) -> None:
        """Start it and wait until it takes connections, which takes 4 to 15 seconds."""
        self.process = Process(
            [self._program], log=self._folder / "rabbitmq.log", env=self._env(), cwd=self._folder
        )
        what = f"RabbitMQ on port {self.port}"
        try:
            eventually(self._answers, timeout=60, what=what, interval=0.1)
        except BaseException:
            self.end()
            raise

    def stop(self, *, immediate: bool = False) -> None:
        """Stop it; with ``immediate`` it is killed, and keeps only what is on the disk."""
        # The shell script around the server passes no SIGKILL on.
        for pid in self.process.family() if immediate else [self.process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if immediate else signal.SIGTERM)
        self.process.wait(30)
        eventually(lambda: not self.process.family(), timeout=30, what="end of RabbitMQ")

    @property
    def running(self) -> bool:
        """Whether it has not been stopped."""
        return self.process.running

    def restore(self) -> None:
        """Start it if a test left it stopped."""
        if not self.running:
            self.start()

    def end(self) -> None:
        """Kill it if it runs, and fail if a process of it is left."""
        try:
            if self.running:
                self.stop(immediate=True)
            self.process.end()
        finally:
            self._epmd.end()

    def _answers(self) -> bool:
        assert self.running, f"RabbitMQ ended: {self.process.log()[-2000:]}"
        # It listens a moment before it knows its users.
        with kombu.Connection(self.url, connect_timeout=5) as connection:
            try:
                connection.connect()
            except connection.connection_errors:
                return False
        return True

    def _env(self) -> dict[str, str]:
        def inside(name: str) -> str:
            return str(self._folder / name)

        return {
            "HOME": str(self._folder),
            "PATH": os.environ.get("PATH", ""),
            "LC_ALL": "C.UTF-8",
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": str(self._epmd_port),
            "RABBITMQ_NODENAME": f"rabbit{self.port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(self._distribution_port),
            "RABBITMQ_MNESIA_BASE": inside("mnesia"),
            "RABBITMQ_LOG_BASE": inside("logs"),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_PID_FILE": inside("pid"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": inside("plugins"),
            "RABBITMQ_CONF_ENV_FILE": inside("rabbitmq-env.conf"),
            "RABBITMQ_CONFIG_FILE": inside("rabbitmq.conf"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": f"{_MODEST} {_LOCAL}",
        }
