"""A Redis server of one test, to be stopped and started again."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.processes import Process
from tests.services.ports import answers, free_port
from tests.services.required import program
from tests.waiting import eventually


class PrivateRedis:
    """One server on a port of 127.0.0.1; what it held is gone when it stops."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder = folder
        self._program = program("redis-server")
        self.start()

    def start(self) -> None:
        """Start it and wait until it accepts connections."""
        self.process = Process(
            [
                *(self._program, "--port", str(self.port), "--bind", "127.0.0.1"),
                *("--save", "", "--appendonly", "no", "--dir", str(self._folder)),
            ],
            log=self._folder / "redis.log",
        )
        eventually(self._accepts, what=f"Redis on port {self.port}")

    def stop(self) -> None:
        """Stop it; connections are closed and new ones refused."""
        self.process.kill(signal.SIGTERM)
        self.process.wait()

    def end(self) -> None:
        """Kill it if it runs."""
        self.process.end()

    def _accepts(self) -> bool:
        assert self.process.running, f"Redis ended: {self.process.log()[-2000:]}"
        return answers(self.port)
