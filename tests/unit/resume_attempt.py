"""Stands for a run and its attempts, in tests of loops and steps; what is kept becomes JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from celery_awa.errors import ProgressTooLarge
from celery_awa.model import StopReason
from celery_awa.progress_brief import UNSET, Unset
from celery_awa.progress_values import encode_pairs
from celery_awa.resume.resumption import Resumption
from celery_awa.resume.sources.base import Unreadable

_LIMIT = 65_536


class Killed(BaseException):
    """The worker is gone, here and now."""


class LeavesTask(Exception):
    """Stands for Celery's Retry, Ignore and Reject."""


class Run:
    """What the database knows: metadata that was kept, and what transactions committed."""

    def __init__(self) -> None:
        self.metadata: dict[str, Any] = {}
        self.committed: dict[str, Any] = {}

    def attempt(self, **options: Any) -> FakeAttempt:
        return FakeAttempt(self, **options)

    def loop(self, name: str = "items") -> Any:
        return self.metadata.get("awa", {}).get("iterations", {}).get(name)

    def steps(self) -> Any:
        return self.metadata.get("awa", {}).get("steps")

    @contextmanager
    def transaction(self) -> Iterator[dict[str, Any]]:
        """A connection whose writes are there once it commits."""
        written: dict[str, Any] = {}
        yield written
        states = {**self.committed.get("awa_committed", {}), **written}
        self.committed = {"awa_committed": states}


class FakeAttempt:
    """One attempt of a run."""

    def __init__(self, run: Run, *, stop: StopReason | None = None) -> None:
        self.run = run
        self.checkpoint: Mapping[str, Any] = json.loads(json.dumps(run.metadata))
        self.committed: Mapping[str, Any] = json.loads(json.dumps(run.committed))
        self.stop_reason = stop
        self.on_item: Callable[[str, int], bool] | None = None
        self.on_step: Callable[[str], None] | None = None
        self.kept: list[Any] = []
        self.reports: list[dict[str, Any]] = []
        self.resumption = Resumption(self, let_pass=(LeavesTask,))

    def keep(self, state: Mapping[str, Any]) -> None:
        pairs = encode_pairs({"awa": state}, _LIMIT)
        if len(pairs["awa"]) > _LIMIT:
            raise ProgressTooLarge(len(pairs["awa"]), _LIMIT)
        self.run.metadata = {**self.run.metadata, **json.loads(f"{{{pairs['awa']}}}")}
        self.kept.append(self.run.metadata["awa"])

    def report(
        self,
        *,
        current: float,
        total: float | None,
        percent: float | Unset | None = UNSET,
        message: str | None = None,
        rate: float | None = None,
    ) -> None:
        self.reports.append({"current": current, "total": total, "message": message, "rate": rate})

    def commit(self, connection: dict[str, Any], values: Mapping[str, Any]) -> None:
        for name, state in values["awa_committed"].items():
            connection[name] = json.loads(json.dumps(state))

    def stop_after(self, pieces: int, reason: StopReason = StopReason.WORKER_STOPPING) -> None:
        """Ask it to stop once so many pieces are finished."""
        left = pieces

        def on_item(name: str, items: int) -> bool:
            nonlocal left
            left -= 1
            if left == 0:
                self.stop_reason = reason
            return left == 0

        self.on_item = on_item


class Records:
    """A source of items, some of which are errors and cannot be read; cursors are positions."""

    def __init__(self, items: Sequence[Any], *, total: float | None = None) -> None:
        self.items = list(items)
        self.read_from: list[Any] = []
        self.closed = 0
        self._total = total

    def total(self) -> float | None:
        return self._total

    def read(self, cursor: Any | None) -> Iterator[tuple[Any, Any]]:
        self.read_from.append(cursor)
        first = 0 if cursor is None else cursor["at"]
        for number, item in enumerate(self.items[first:], first + 1):
            yield Unreadable(item) if isinstance(item, Exception) else item, {"at": number}

    def position(self, cursor: Any, done: int) -> float | None:
        return done

    def close(self) -> None:
        self.closed += 1
