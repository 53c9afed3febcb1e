"""Attempts in memory for the tests of loops and steps: what one leaves, the next one finds."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from celery_awa.model import StopReason
from celery_awa.resume.resumption import Resumption


class Row:
    """What the database and the page hold of a job between attempts."""

    def __init__(self) -> None:
        self.metadata: dict[str, Any] = {}
        self.committed: dict[str, Any] = {}
        self.reports: list[dict[str, Any]] = []

    def attempt(self) -> MemoryAttempt:
        """The next attempt."""
        return MemoryAttempt(self)


class MemoryAttempt:
    """One attempt. What it keeps is in the row at once, as a page is what a kill leaves."""

    on_item: Callable[[str, int], bool] | None = None
    on_step: Callable[[str], None] | None = None

    def __init__(self, row: Row) -> None:
        self._row = row
        self.checkpoint: Mapping[str, Any] = copy.deepcopy({**row.metadata, **row.committed})
        self.committed: Mapping[str, Any] = copy.deepcopy(row.committed)
        self.stop_reason: StopReason | None = None
        self.keeps = 0
        self.resumption = Resumption(self, let_pass=(KeyError,))

    def keep(self, state: Mapping[str, Any]) -> None:
        self.keeps += 1
        self._row.metadata["awa"] = copy.deepcopy(dict(state))

    def report(self, **brief: Any) -> None:
        self._row.reports.append(brief)

    def commit(self, connection: Transaction, values: Mapping[str, Any]) -> None:
        connection.values = copy.deepcopy(dict(values))

    def apply(self, values: Mapping[str, Any]) -> None:
        """What the database does with the values of a transaction that commits."""
        states = {**self._row.committed.get("awa_committed", {}), **values["awa_committed"]}
        self._row.committed["awa_committed"] = states


class Transaction:
    """A transaction of the task's own, with the rows that it writes."""

    def __init__(self, attempt: MemoryAttempt, table: list[Any]) -> None:
        self._attempt = attempt
        self._table = table
        self.values: dict[str, Any] = {}
        self.rows: list[Any] = []

    def commit(self) -> None:
        self._table += self.rows
        if self.values:
            self._attempt.apply(self.values)
