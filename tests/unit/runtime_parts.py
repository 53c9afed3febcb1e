"""Attempts, settings and a clock for the tests of the runtime."""

from __future__ import annotations

import itertools
import time
from types import ModuleType
from typing import Any

import pytest

from celery_awa.model import NewAttempt
from celery_awa.runtime.attempt import Attempt, Desk
from celery_awa.settings import Settings

#: Seconds that nothing here may take; what waits longer waits for ever.
SOON = 5.0
_tokens = itertools.count(1)


class Clock:
    """Stands for the module ``time`` in others; the test moves it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
        self.now = time.monotonic()
        for module in modules:
            monkeypatch.setattr(module, "time", self)

    def monotonic(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


def new_token() -> str:
    return f"{next(_tokens):032x}"


def settings(**changed: Any) -> Settings:
    """Settings under which nothing happens by itself for a long while, but what is changed."""
    slow: dict[str, Any] = {
        "write_interval": 500.0,
        "heartbeat_interval": 500.0,
        "stale_after": 1000.0,
        "claim_after": 500.0,
    }
    return Settings(**(slow | changed))


def described(token: str, task_id: str = "task", **fields: Any) -> NewAttempt:
    known: dict[str, Any] = {
        "kind": "kind",
        "queue": None,
        "worker": None,
        "run_token": "run",
        "run_named": True,
        "envelope": b"envelope",
    }
    return NewAttempt(token=token, task_id=task_id, **(known | fields))


def attempt(task_id: str = "task", desk: Desk | None = None, **fields: Any) -> Attempt:
    """A new attempt of a task; ``fields`` are what its message says."""

    def describe(token: str, late: bool) -> NewAttempt:
        return described(token, task_id, late=late, **fields)

    return Attempt(new_token(), task_id, describe, desk, limit=65_536)


def undescribable(task_id: str = "task", desk: Desk | None = None) -> Attempt:
    """An attempt whose task has an argument that cannot be shown."""

    def describe(token: str, late: bool) -> NewAttempt:
        raise RuntimeError("a repr of the user's")

    return Attempt(new_token(), task_id, describe, desk, limit=65_536)
