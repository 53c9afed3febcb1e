"""The diary: lines that tasks append to a file and tests read, across processes and kills."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import celery

from tests.waiting import eventually


def note(task: celery.Task, what: str, **facts: Any) -> None:
    """Append one line for the task; it is in the file when this returns.

    One write to a descriptor opened for appending is whole, whoever else writes.
    """
    entry = {
        "what": what,
        "task_id": task.request.id,
        "retries": task.request.retries,
        "pid": os.getpid(),
        "at": time.time(),
        **facts,
    }
    line = json.dumps(entry, default=str) + "\n"
    descriptor = os.open(task.app.conf["test_diary"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


class Diary:
    """The tests' side: read and wait for entries."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def entries(self, what: str | None = None, task_id: str | None = None) -> list[dict[str, Any]]:
        """The entries so far, oldest first, of one kind and of one task where these are given."""
        if not self.path.exists():
            return []
        # What follows the last line's end is being written at this moment.
        lines = self.path.read_text().split("\n")[:-1]
        entries = [json.loads(line) for line in lines]
        return [
            entry
            for entry in entries
            if what in (None, entry["what"]) and task_id in (None, entry["task_id"])
        ]

    def wait_for(
        self, what: str, task_id: str | None = None, *, count: int = 1, timeout: float = 10.0
    ) -> dict[str, Any]:
        """Wait until there are ``count`` such entries and return the last of these."""

        def found() -> dict[str, Any] | None:
            entries = self.entries(what, task_id)
            return entries[count - 1] if len(entries) >= count else None

        try:
            return eventually(found, timeout=timeout, what=f"{count} of {what!r} in the diary")
        except AssertionError as late:
            raise AssertionError(f"{late}; it holds {self.entries()}") from None


class Gate:
    """A file that tasks wait for: closed until the test opens it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.path = str(path)

    def open(self) -> None:
        """Let the waiting tasks go on."""
        self._path.touch()
