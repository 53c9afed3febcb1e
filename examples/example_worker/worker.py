"""An example's side of its worker: start it, look after it, end it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from . import keeper

#: Seconds that the end of the worker and the removal of its folder may take.
_GONE_WITHIN = 15.0
#: Seconds between two looks.
_LOOK = 0.05


class Worker:
    """A Celery worker in a private temporary folder; ``pid`` is its own process."""

    def __init__(self, keeper: subprocess.Popen[bytes]) -> None:
        self._keeper = keeper
        self.folder, self.pid = self._told()

    def replace(self) -> int:
        """Kill it with SIGKILL, its children with it, and start another; the killed one's id."""
        killed = self.pid
        os.kill(killed, signal.SIGKILL)
        self._start_another()
        return killed

    def restart(self) -> None:
        """Stop it as a deploy does, wait until it has ended, and start another."""
        os.kill(self.pid, signal.SIGTERM)
        while self.running():
            time.sleep(_LOOK)
        self._start_another()

    def _start_another(self) -> None:
        assert self._keeper.stdin is not None
        self._keeper.stdin.write(b"another\n")
        self._keeper.stdin.flush()
        self.folder, self.pid = self._told()

    def _told(self) -> tuple[str, int]:
        assert self._keeper.stdout is not None
        told = json.loads(self._keeper.stdout.readline())
        return told["folder"], told["pid"]

    def running(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def log(self, lines: int) -> str:
        """The end of what the worker wrote."""
        text = (Path(self.folder) / keeper.LOG).read_text(errors="replace")
        return "\n".join(text.splitlines()[-lines:])


@contextmanager
def started_worker(app: str, name: str) -> Iterator[Worker]:
    """A worker of the app in this module, and nothing of it afterwards; see keeper.py.

    This process sends its messages to that worker's folder, whose name begins with this one.
    """
    process = subprocess.Popen(
        [sys.executable, "-I", keeper.__file__, app, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None
    try:
        worker = Worker(process)
        os.environ[keeper.FOLDER_VARIABLE] = worker.folder
        yield worker
    finally:
        process.stdin.close()
        process.wait(_GONE_WITHIN)
