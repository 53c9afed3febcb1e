"""Runs in any process that has to do with jobs of others: a web server, a script, a test."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from ..errors import (
    InvalidProgress,
    ProgressTooLarge,
    RowLocked,
    SettingsError,
    StoreRefused,
    StoreUnavailable,
)
from ..model import Callback, Cancel, Job, JobState, Resend
from ..progress import DEFAULT_LIMIT
from ..progress_values import encode_pairs
from ..runtime.ending import clean, error_text, is_storable
from ..settings import read_settings
from ..store import canonical, embedded
from ..store.connection import check_url, connect_by
from ..store.protocol import Store

T = TypeVar("T")


class Client:
    """Reads jobs, and does what operators ask of them.

    ``source``: a database URL, or a Celery app: what ``install`` was given counts, else its
    ``awa_database_url``, else the environment's AWA_DATABASE_URL; and its ``awa_schema``. It has
    one connection, opened at the first call, and is not for use from two threads at once. Use it
    as a context manager, or ``close()`` it. Every method raises StoreUnavailable or SchemaError
    if the database cannot answer, or keeps the row locked; then call it again.
    """

    def __init__(self, source: Any, *, schema: str | None = None) -> None:
        self._connect, configured, self._max_progress_bytes = _named_by(source)
        self._schema = schema or configured
        self._store: Store | None = None
        self._pid = os.getpid()

    def get_job(self, task_id: str) -> Job | None:
        """The job of a task: state and progress from one read; None where it has no row.

        A task that ended within a second and reported nothing never had one.
        """
        return self._of_task(task_id, lambda store: store.get_job(task_id), None)

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
            return self._ask(
                lambda store: store.list_jobs(
                    state=wanted, kind=kind, limit=limit, before_id=before_id
                )
            )
        except StoreRefused as exc:
            raise ValueError(f"kind or before_id is nothing that a job can have: {exc}") from exc

    def request_cancel(self, task_id: str) -> Cancel:
        """Cancel a job that waits; ask one that runs to stop, by its ``should_stop``.

        Its result becomes revoked where it waited, and where it would retry or is lost later.
        """
        return self._of_task(task_id, lambda store: store.request_cancel(task_id), Cancel.UNKNOWN)

    def retry(self, task_id: str) -> Resend:
        """Have a failed or cancelled task sent again under its id, to go on from its checkpoint.

        A worker's next look at unsent jobs publishes it (``awa_rescue_interval``).
        """
        return self._resend(task_id, keep_progress=True)

    def restart(self, task_id: str) -> Resend:
        """As :meth:`retry`, from the beginning: its progress is discarded.

        Also of a task that waits, for instance for its next retry.
        """
        return self._resend(task_id, keep_progress=False)

    def edit_checkpoint(self, task_id: str, metadata: Mapping[str, Any] | None) -> bool | None:
        """Replace the metadata that the next attempt begins with; None takes it away.

        True: done. False: the job runs or was completed, and nothing was changed. None: it has
        no row. The values are checked as ``update_metadata`` checks them: InvalidProgress,
        ProgressTooLarge.
        """
        text = None if metadata is None else _encoded(metadata, self._max_progress_bytes)
        return self._of_task(task_id, lambda store: store.edit_checkpoint(task_id, text), None)

    def complete_callback(self, token: str, payload: Any = None) -> Callback:
        """Answer the callback that a task waits for, or is going to; the task goes on with this.

        ``token`` is what its ``callback_token()`` gave. A worker's next look at unsent jobs sends
        a task that waits (``awa_rescue_interval``). ``payload``: any value that
        ``update_metadata`` takes for a key, of at most ``awa_max_progress_bytes`` as JSON:
        InvalidProgress, ProgressTooLarge. Only the first answer to a token counts: repeated, even
        because the first call's own answer never came, it is refused.
        """
        text = _payload(payload, self._max_progress_bytes)
        return self._answer(token, lambda store: store.complete_callback(token, text))

    def fail_callback(self, token: str, error: str) -> Callback:
        """Answer a callback with an error: the task that waits for it has failed.

        Its result is a CallbackFailed with ``error``, a text that is kept up to 4,096 bytes of
        UTF-8; TypeError or ValueError for what is none, or empty. For the rest see
        :meth:`complete_callback`.
        """
        if not isinstance(error, str):
            raise TypeError(f"error must be a text, not {type(error).__name__}")
        if not clean(error).strip():
            raise ValueError("error is empty; it must say why the callback failed")
        text = error_text(error)
        return self._answer(token, lambda store: store.fail_callback(token, text))

    def close(self) -> None:
        """Close the connection; the next call opens a new one."""
        if self._pid != os.getpid():
            self._leave_inherited()
        store, self._store = self._store, None
        if store is not None:
            store.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _resend(self, task_id: str, *, keep_progress: bool) -> Resend:
        return self._of_task(
            task_id,
            lambda store: store.resend(task_id, keep_progress=keep_progress),
            Resend.UNKNOWN,
        )

    def _of_task(self, task_id: str, question: Callable[[Store], T], unknown: T) -> T:
        """Ask about one task; ``unknown`` where no job can have this id."""
        if not isinstance(task_id, str):
            raise TypeError(f"task_id must be a text, not {type(task_id).__name__}")
        return self._of_job(question) if is_storable(task_id) else unknown

    def _answer(self, token: str, question: Callable[[Store], Callback]) -> Callback:
        if not isinstance(token, str):
            raise TypeError(f"token must be a text, not {type(token).__name__}")
        return self._of_job(question)

    def _of_job(self, question: Callable[[Store], T]) -> T:
        """Ask about one row, which may be locked, or be refused by a trigger of the user's."""
        try:
            return self._ask(question)
        except RowLocked as exc:
            raise StoreUnavailable(f"another transaction keeps the row locked: {exc}") from exc
        except StoreRefused as exc:
            raise StoreUnavailable(f"the database refused this: {exc}") from exc

    def _ask(self, question: Callable[[Store], T]) -> T:
        if self._pid != os.getpid():
            self._leave_inherited()
        had_one = self._store is not None
        try:
            return question(self._opened())
        except StoreUnavailable:
            self.close()
            if not had_one:
                raise
        return question(self._opened())  # the connection had died while it was not used

    def _leave_inherited(self) -> None:
        """In a forked process: the connection is the parent's, which goes on using it."""
        store, self._store = self._store, None
        self._pid = os.getpid()
        if store is not None:
            store.abandon()

    def _opened(self) -> Store:
        if self._store is None:
            self._store = canonical.open_store(self._connect(), self._schema)
        return self._store


def _named_by(source: Any) -> tuple[Callable[[], Any], str, int]:
    """What answers a URL to connect to, or a connection; the schema; bytes of a snapshot."""
    if isinstance(source, str):
        return _resolved(source), "celery_awa", DEFAULT_LIMIT
    conf = getattr(source, "conf", None)
    if conf is None:
        raise SettingsError(
            f"Client() takes a Celery app or a database URL, not {type(source).__name__}"
        )
    schema = conf.get("awa_schema") or "celery_awa"
    limit = read_settings(conf.get)[0].max_progress_bytes
    connect = getattr(source, "awa_connect", None)
    if connect is not None:
        return partial(connect_by, connect), schema, limit
    url = getattr(source, "awa_database_url", None) or conf.get("awa_database_url")
    url = url or os.environ.get("AWA_DATABASE_URL")
    if not url:
        raise SettingsError("this app names no database: set awa_database_url")
    return _resolved(url), schema, limit


def _resolved(url: str) -> Callable[[], str]:
    check_url(url)
    return partial(embedded.resolve, url)


def _encoded(metadata: Mapping[str, Any], limit: int) -> str:
    """The checkpoint as JSON, checked as an attempt's own."""
    text = f"{{{','.join(encode_pairs(metadata, limit).values())}}}"
    size = len(f'{{"metadata":{text}}}'.encode())
    if size > limit:
        raise ProgressTooLarge(size, limit)
    return text


def _payload(value: Any, limit: int) -> str:
    """The payload of a callback as JSON, checked as a value of an attempt's metadata."""
    try:
        pair = encode_pairs({"payload": value}, limit)["payload"]
    except ProgressTooLarge:
        raise
    except InvalidProgress as exc:
        path = exc.field.replace("metadata['payload']", "payload", 1)
        raise InvalidProgress(path, exc.reason) from None
    text = pair.removeprefix('"payload":')
    size = len(text.encode())
    if size > limit:
        raise ProgressTooLarge(size, limit)
    return text


def _state(state: JobState | str) -> JobState:
    try:
        return JobState(state)
    except ValueError:
        states = ", ".join(one.value for one in JobState)
        raise ValueError(f"state is {state!r}; it must be one of {states}") from None


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
