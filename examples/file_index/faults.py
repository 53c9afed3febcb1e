"""Faults from outside: a cut connection, a killed process, a killed worker. The task knows none."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from example_worker.worker import Worker

from . import table
from .table import Beginning, Database

#: Each of the four attempts begins at a file of its own.
LEAST_FILES = 4


class Faults:
    """Strikes attempts 1, 2 and 3 after a quarter, a half and three quarters of the files."""

    def __init__(self, database: Database, worker: Worker, files: int) -> None:
        self._database = database
        self._worker = worker
        self._planned: list[tuple[int, Callable[[Beginning], str], str]] = [
            (files // 4, self._cut_connection, "its next statement raises"),
            (files // 2, self._kill_child, "Celery notices within about 10 s"),
            (files * 3 // 4, self._kill_worker, "the broker forgets the message, its row does not"),
        ]
        #: What was done, by the number of the attempt.
        self.struck: dict[int, str] = {}

    def strike_if_due(self) -> str | None:
        """Strike the latest attempt if it has come far enough; answers what to tell the viewer."""
        begun = table.beginnings(self._database)
        if len(begun) != len(self.struck) + 1 or not self._planned:
            return None
        rows, strike, consequence = self._planned[0]
        if table.count(self._database) < rows:
            return None
        del self._planned[0]
        latest = begun[-1]
        self.struck[latest.number] = strike(latest)
        return f"attempt {latest.number}: {self.struck[latest.number]}; {consequence}"

    def _cut_connection(self, attempt: Beginning) -> str:
        """The task retries for psycopg's OperationalError."""
        self._database.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s",
            (table.INDEXER,),
        )
        return "the server cut its connection"

    def _kill_child(self, attempt: Beginning) -> str:
        os.kill(attempt.pid, signal.SIGKILL)
        return f"process {attempt.pid} was killed with SIGKILL"

    def _kill_worker(self, attempt: Beginning) -> str:
        """This broker has no message left of it: the next worker sends the task again."""
        killed = self._worker.replace()
        return f"its whole worker, process {killed}, was killed with SIGKILL"
