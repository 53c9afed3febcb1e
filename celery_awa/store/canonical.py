"""The canonical storage: everything about a job lies in its row."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import msgspec
import psycopg
from psycopg.rows import dict_row

from ..errors import RowLocked
from ..model import (
    Answer,
    Beat,
    Callback,
    Cancel,
    Claim,
    Ended,
    Envelope,
    Job,
    JobError,
    JobState,
    Lease,
    LostJob,
    NewAttempt,
    Pulse,
    Rescue,
    Resend,
    Thresholds,
    Transition,
    UnsentJob,
    Verdict,
)
from .connection import bound_answers, connect, translated
from .migrations import check_schema
from .sql_files import query

#: Bytes of snapshots in one statement; what is above goes into a further one.
MAX_STATEMENT_BYTES = 8 * 1024 * 1024

#: What may be a callback's id: that of its job, and a secret.
_CALLBACK_ID = re.compile(r"[0-9]{1,19}-[!-~]{1,200}")

Row = dict[str, Any]
_NOT_SENT = {"envelope", "began_at"}
_MESSAGE_FIELDS = tuple(f.name for f in fields(NewAttempt) if f.name not in _NOT_SENT)


def open_store(source: str | psycopg.Connection[Any], schema: str) -> CanonicalStore:
    """Connect, and make sure that the schema is ours and of our version.

    ``source`` is a URL for libpq, or a connection that was opened by ``connect_by``; that is
    the store's from then on. Raises StoreUnavailable, SchemaError or SettingsError.
    """
    connection = connect(source) if isinstance(source, str) else source
    bound_answers(connection)
    try:
        check_schema(connection, schema)
    except BaseException:
        connection.close()
        raise
    return CanonicalStore(connection, schema)


class CanonicalStore:
    """The store's verbs over one connection; see :class:`~celery_awa.store.protocol.Store`."""

    def __init__(self, connection: psycopg.Connection[Any], schema: str) -> None:
        self._connection = connection
        self._schema = schema

    def claim(self, attempt: NewAttempt) -> Claim:
        row = self._row("claim", attempt=_message(attempt), envelope=_data(attempt.envelope))
        verdict = Verdict(row["verdict"])
        if verdict is not Verdict.YOURS:
            return Claim(verdict)
        return Claim(
            verdict,
            _lease(row),
            row["attempt"],
            row["progress"],
            row["run_token"],
            row["committed"],
            row["callbacks"] or {},
        )

    def knows(self, task_id: str) -> bool:
        return bool(self._row("knows", task_id=task_id)["known"])

    def owns(self, lease: Lease) -> bool:
        return bool(self._row("owns", id=lease.job_id, run_lease=lease.run_lease)["owned"])

    def heartbeat(
        self, leases: Sequence[Lease], *, skip_locked: bool = False
    ) -> dict[Lease, Pulse]:
        if not leases:
            return {}
        return _pulses(self._rows("heartbeat", **_columns(leases), skip_locked=skip_locked))

    def heartbeat_with_progress(
        self, beats: Sequence[Beat], *, skip_locked: bool = False
    ) -> dict[Lease, Pulse]:
        pulses: dict[Lease, Pulse] = {}
        for part in _by_size(beats):
            rows = self._rows(
                "heartbeat_with_progress",
                **_columns([beat.lease for beat in part]),
                progress=[beat.snapshot.json if beat.snapshot else None for beat in part],
                generations=[beat.snapshot.generation if beat.snapshot else 0 for beat in part],
                skip_locked=skip_locked,
            )
            pulses.update(_pulses(rows))
        return pulses

    def held(self, leases: Sequence[Lease]) -> frozenset[Lease]:
        if not leases:
            return frozenset()
        rows = self._rows("held", **_columns(leases))
        return frozenset(map(_lease, rows))

    def end(self, lease: Lease, token: str, transition: Transition) -> Ended:
        row = self._row(
            "end_attempt",
            id=lease.job_id,
            run_lease=lease.run_lease,
            token=token,
            transition=_transition(transition),
            envelope=_data(transition.envelope),
        )
        return Ended(Answer(row["answer"]), lease)

    def end_unclaimed(self, attempt: NewAttempt, transition: Transition) -> Ended:
        row = self._row(
            "end_unclaimed",
            attempt=_message(attempt),
            envelope=_data(transition.envelope),
            transition=_transition(transition),
        )
        answer = Answer(row["answer"])
        if answer is Answer.GONE:
            return Ended(answer)
        return Ended(answer, _lease(row), row["run_token"])

    def record_completed(self, attempts: Sequence[NewAttempt]) -> None:
        locked: RowLocked | None = None
        for attempt in self._not_recorded(attempts):
            try:
                self.end_unclaimed(attempt, Transition(JobState.COMPLETED))
            except RowLocked as exc:
                locked = exc
        if locked is not None:
            raise locked

    def _not_recorded(self, attempts: Sequence[NewAttempt]) -> Sequence[NewAttempt]:
        """Insert what is new in one statement; returns what must be ended one by one."""
        if not attempts:
            return ()
        try:
            rows = self._rows("record_completed", attempts=f"[{','.join(map(_message, attempts))}]")
        except RowLocked:
            return attempts
        left = {row["token"] for row in rows}
        return [attempt for attempt in attempts if attempt.token in left]

    def sent(self, lease: Lease, resends: int = 0) -> None:
        self._note("sent", lease, resends)

    def expect_callback(self, lease: Lease, token: str, callback_id: str, name: str) -> bool:
        row = self._row(
            "expect_callback",
            id=lease.job_id,
            run_lease=lease.run_lease,
            token=token,
            callback_id=callback_id,
            callback_name=name,
        )
        return bool(row["expected"])

    def lost(self, thresholds: Thresholds, *, after_id: int = 0, limit: int = 100) -> list[LostJob]:
        rows = self._rows("lost", **_seconds(thresholds), after_id=after_id, limit=limit)
        return [
            LostJob(_lease(row), row["task_id"], row["kind"], row["attempted_at"]) for row in rows
        ]

    def rescue(self, leases: Sequence[Lease], thresholds: Thresholds) -> dict[Lease, Rescue]:
        if not leases:
            return {}
        rows = self._rows("rescue", **_columns(leases), **_seconds(thresholds))
        return {_lease(row): Rescue(row["rescue"]) for row in rows}

    def forsake(self, leases: Sequence[Lease]) -> None:
        if leases:
            self._run("forsake", lambda cursor: None, **_columns(leases))

    def unsent(self, *, resend_after: float, limit: int = 100) -> list[UnsentJob]:
        rows = self._rows("unsent", limit=limit, resend_after=resend_after)
        return [_unsent(row) for row in rows]

    def settle(self, lease: Lease, to: JobState, error: str | None = None) -> bool:
        row = self._row(
            "settle", id=lease.job_id, run_lease=lease.run_lease, state=to.value, error=error
        )
        return bool(row["settled"])

    def told(self, lease: Lease, resends: int = 0) -> None:
        self._note("told", lease, resends)

    def complete_callback(self, callback_id: str, payload: str) -> Callback:
        if not _CALLBACK_ID.fullmatch(callback_id):
            return Callback.UNKNOWN
        row = self._row("complete_callback", callback_id=callback_id, payload=payload)
        return Callback(row["answer"])

    def fail_callback(self, callback_id: str, error: str) -> Callback:
        if not _CALLBACK_ID.fullmatch(callback_id):
            return Callback.UNKNOWN
        return Callback(self._row("fail_callback", callback_id=callback_id, error=error)["answer"])

    def request_cancel(self, task_id: str) -> Cancel:
        return Cancel(self._row("request_cancel", task_id=task_id)["answer"])

    def resend(self, task_id: str, *, keep_progress: bool) -> Resend:
        row = self._row("resend", task_id=task_id, keep_progress=keep_progress)
        return Resend(row["answer"])

    def edit_checkpoint(self, task_id: str, metadata: str | None) -> bool | None:
        edited: bool | None = self._row("edit_checkpoint", task_id=task_id, metadata=metadata)[
            "edited"
        ]
        return edited

    def get_job(self, task_id: str) -> Job | None:
        rows = self._rows("get_job", task_id=task_id)
        return _job(rows[0]) if rows else None

    def list_jobs(
        self,
        *,
        state: JobState | None = None,
        kind: str | None = None,
        limit: int = 100,
        before_id: int | None = None,
    ) -> list[Job]:
        rows = self._rows(
            "list_jobs",
            state=state.value if state else None,
            kind=kind,
            limit=limit,
            before_id=before_id,
        )
        return [_job(row) for row in rows]

    def close(self) -> None:
        self._connection.close()

    def abandon(self) -> None:
        # The parent goes on using the socket. Under the same number stands /dev/null now, so
        # whatever the driver says while it is freed goes nowhere.
        if self._connection.closed:
            return
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, self._connection.fileno())
        os.close(nowhere)

    def _note(self, name: str, lease: Lease, resends: int) -> None:
        self._run(
            name,
            lambda cursor: None,
            id=lease.job_id,
            run_lease=lease.run_lease,
            resends=resends,
        )

    def _row(self, name: str, **parameters: object) -> Row:
        return self._rows(name, **parameters)[0]

    def _rows(self, name: str, **parameters: object) -> list[Row]:
        rows: list[Row] = self._run(name, lambda cursor: cursor.fetchall(), **parameters)
        return rows

    def _run(
        self, name: str, answer: Callable[[psycopg.Cursor[Row]], Any], **parameters: object
    ) -> Any:
        text: Any = query(name, self._schema)
        with translated(), self._connection.cursor(row_factory=dict_row) as cursor:
            cursor.execute(text, parameters)
            return answer(cursor)


@translated()
def _message(attempt: NewAttempt) -> str:
    began_at = attempt.began_at
    message: dict[str, Any] = {name: getattr(attempt, name) for name in _MESSAGE_FIELDS}
    message["began_ago"] = None if began_at is None else time.monotonic() - began_at
    message["envelope_whole"] = _is_whole(attempt.envelope)
    return msgspec.json.encode(message).decode()


@translated()
def _transition(transition: Transition) -> str:
    snapshot = transition.snapshot
    return msgspec.json.encode(
        {
            "state": transition.to.value if transition.to else None,
            "progress": msgspec.Raw(snapshot.json) if snapshot and snapshot.json else None,
            "generation": snapshot.generation if snapshot else None,
            "error": transition.error,
            "run_in": transition.run_in,
            "unsent": transition.unsent,
            "uncounted": transition.uncounted,
            "envelope_whole": _is_whole(transition.envelope),
            "callback_id": transition.callback_id,
            "callback_timeout": transition.callback_timeout,
        }
    ).decode()


def _data(envelope: Envelope | None) -> bytes | None:
    return None if envelope is None else envelope.data


def _is_whole(envelope: Envelope | None) -> bool:
    return envelope is not None and envelope.whole


def _seconds(thresholds: Thresholds) -> dict[str, float]:
    return {
        "stale_after": thresholds.stale_after,
        "duplicate_after": thresholds.duplicate_after,
    }


def _lease(row: Row) -> Lease:
    return Lease(row["id"], row["run_lease"])


def _unsent(row: Row) -> UnsentJob:
    data = row["envelope"]
    return UnsentJob(
        _lease(row),
        row["task_id"],
        row["kind"],
        JobState(row["state"]),
        row["run_token"],
        None if data is None else Envelope(bytes(data), row["envelope_whole"]),
        row["attempted_at"],
        row["run_at"],
        row["error"],
        row["resends"],
    )


def _columns(leases: Sequence[Lease]) -> dict[str, list[int]]:
    return {
        "ids": [lease.job_id for lease in leases],
        "run_leases": [lease.run_lease for lease in leases],
    }


def _pulses(rows: list[Row]) -> dict[Lease, Pulse]:
    return {_lease(row): Pulse(row["progress_generation"], row["cancel_requested"]) for row in rows}


def _by_size(beats: Sequence[Beat]) -> list[list[Beat]]:
    parts: list[list[Beat]] = []
    room = 0
    for beat in beats:
        size = len((beat.snapshot.json or "").encode(errors="replace")) if beat.snapshot else 0
        if not parts or size > room:
            parts.append([])
            room = MAX_STATEMENT_BYTES
        parts[-1].append(beat)
        room -= size
    return parts


def _job(row: Row) -> Job:
    errors = tuple(msgspec.convert(error, JobError, strict=False) for error in row.pop("errors"))
    return Job(**(row | {"state": JobState(row["state"])}), errors=errors)
