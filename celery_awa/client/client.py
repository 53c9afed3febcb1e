"""Runs in any process that wants to know how a job is doing: a web server, a script, a test."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import SettingsError, StoreRefused, StoreUnavailable
from ..model import Job, JobState
from ..store import canonical, embedded
from ..store.connection import check_url
from ..store.protocol import Store

T = TypeVar("T")


class Client:
    """Reads jobs. One connection, opened at the first read; not for use from two threads at once.

    ``source``: a Celery app, whose ``awa_database_url`` and ``awa_schema`` count (else the
    environment's AWA_DATABASE_URL), or a database URL. Use it as a context manager, or
    ``close()`` it. Every read raises StoreUnavailable or SchemaError if the database cannot answer.
    """

    def __init__(self, source: Any, *, schema: str | None = None) -> None:
        self._url, configured = _named_by(source)
        self._schema = schema or configured
        self._store: Store | None = None
        self._pid = os.getpid()

    def get_job(self, task_id: str) -> Job | None:
        """The job of a task: state and progress from one read; None where it has no row.

        A task that ended within a second and reported nothing never had one.
        """
        if not isinstance(task_id, str):
            raise TypeError(f"task_id must be a text, not {type(task_id).__name__}")
        try:
            return self._read(lambda store: store.get_job(task_id))
        except StoreRefused:
            return None  # Postgres takes no such text, so no job has it

    def list_jobs(
        self,
        *,
        state: JobState | str | None = None,
        kind: str | None = None,
        limit: int = 100,
        before_id: int | None = None,
    ) -> list[Job]:
        """Jobs, newest first: ``kind`` is the task's name, ``limit`` 1 to 1,000.

        For the next page pass the last job's id as ``before_id``. Raises ValueError for a state
        that does not exist and a limit that is not allowed, TypeError for what is of no use.
        """
        wanted = _state(state) if state is not None else None
        if not _is_number(limit) or not 1 <= limit <= 1_000:
            raise ValueError(f"limit is {limit!r}; it must be a whole number from 1 to 1,000")
        if before_id is not None and not _is_number(before_id):
            raise TypeError(f"before_id must be the id of a job, not {type(before_id).__name__}")
        if kind is not None and not isinstance(kind, str):
            raise TypeError(f"kind must be the name of a task, not {type(kind).__name__}")
        try:
            return self._read(
                lambda store: store.list_jobs(
                    state=wanted, kind=kind, limit=limit, before_id=before_id
                )
            )
        except StoreRefused as exc:
            raise ValueError(f"kind or before_id is nothing that a job can have: {exc}") from exc

    def close(self) -> None:
        """Close the connection; the next read opens a new one."""
        if self._pid != os.getpid():
            self._leave_inherited()
        store, self._store = self._store, None
        if store is not None:
            store.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _read(self, read: Callable[[Store], T]) -> T:
        if self._pid != os.getpid():
            self._leave_inherited()
        had_one = self._store is not None
        try:
            return read(self._opened())
        except StoreUnavailable:
            self.close()
            if not had_one:
                raise
        return read(self._opened())  # the connection had died while it was not used

    def _leave_inherited(self) -> None:
        """In a forked process: the connection is the parent's, which goes on using it."""
        store, self._store = self._store, None
        self._pid = os.getpid()
        if store is not None:
            store.abandon()

    def _opened(self) -> Store:
        if self._store is None:
            self._store = canonical.open_store(embedded.resolve(self._url), self._schema)
        return self._store


def _named_by(source: Any) -> tuple[str, str]:
    if isinstance(source, str):
        check_url(source)
        return source, "celery_awa"
    conf = getattr(source, "conf", None)
    if conf is None:
        raise SettingsError(
            f"Client() takes a Celery app or a database URL, not {type(source).__name__}"
        )
    url = getattr(source, "awa_database_url", None) or conf.get("awa_database_url")
    url = url or os.environ.get("AWA_DATABASE_URL")
    if not url:
        raise SettingsError("this app names no database: set awa_database_url")
    check_url(url)
    return url, conf.get("awa_schema") or "celery_awa"


def _state(state: JobState | str) -> JobState:
    try:
        return JobState(state)
    except ValueError:
        states = ", ".join(one.value for one in JobState)
        raise ValueError(f"state is {state!r}; it must be one of {states}") from None


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
