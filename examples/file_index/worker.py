"""The demo's side of its worker: start it, look after it, end it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from . import keeper

#: Seconds that the end of the worker and the removal of its folder may take.
_GONE_WITHIN = 15.0


class Worker:
    """A Celery worker in a private temporary folder, for a ``with``; see keeper.py."""

    def __init__(self) -> None:
        self._keeper = subprocess.Popen(
            [sys.executable, "-I", keeper.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._keeper.stdout is not None
        told = json.loads(self._keeper.stdout.readline() or "{}")
        if not told:
            raise RuntimeError("the worker could not be started")
        self.folder: str = told["folder"]
        self._pid: int = told["worker"]

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        self._keeper.wait(_GONE_WITHIN)

    def running(self) -> bool:
        try:
            os.kill(self._pid, 0)
        except ProcessLookupError:
            return False
        return True

    def log(self, lines: int) -> str:
        """The end of what the worker wrote."""
        text = (Path(self.folder) / keeper.LOG).read_text(errors="replace")
        return "\n".join(text.splitlines()[-lines:])
