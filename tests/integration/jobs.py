"""Attempts that the store's tests make up, and their rows, read past the store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import psycopg
from psycopg.rows import dict_row

from celery_awa.model import (
    Beat,
    Callback,
    Cancel,
    Claim,
    Envelope,
    JobState,
    Lease,
    NewAttempt,
    Rescue,
    Resend,
    Snapshot,
    Thresholds,
    Transition,
)
from celery_awa.store.canonical import CanonicalStore
from celery_awa.store.through import checkpoint_through
from tests.conftest import SCHEMA

Row = dict[str, Any]
StoreOn = Callable[[str], CanonicalStore]
OpenStore = Callable[[], CanonicalStore]

FINISHED = (JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED)
WAITING = (JobState.RETRYABLE, JobState.SCHEDULED, JobState.WAITING_EXTERNAL)
#: No attempt is old by these.
OLD = Thresholds(stale_after=3600, duplicate_after=1800)
#: Until a message that does not come is sent again.
HOUR = 3600.0
WHOLE, IN_PART = Envelope(b"whole", whole=True), Envelope(b"in part", whole=False)


def attempt(token: str = "first", task_id: str = "task", **fields: Any) -> NewAttempt:
    """What a message says; by default one that names the run ``run``."""
    described: dict[str, Any] = {
        "kind": "shop.import_rows",
        "queue": "celery",
        "worker": "worker@host",
        "run_token": "run",
        "run_named": True,
    }
    return NewAttempt(token=token, task_id=task_id, **(described | fields))


def lost_attempt(token: str = "first", task_id: str = "task", **fields: Any) -> NewAttempt:
    """What a message says whose task is sent again if its worker dies."""
    return attempt(token, task_id, **({"lost_policy": "requeue", "envelope": WHOLE} | fields))


def snapshot(generation: int = 1, percent: int = 40) -> Snapshot:
    """A snapshot with a percent and a checkpoint that tells the same."""
    return Snapshot(generation, f'{{"percent": {percent}, "metadata": {{"last_id": {percent}}}}}')


def stored(percent: int = 40) -> dict[str, Any]:
    """What a reader finds of :func:`snapshot`."""
    return {"percent": percent, "metadata": {"last_id": percent}}


def claimed(store: CanonicalStore, new: NewAttempt) -> tuple[Claim, Lease]:
    """Claim, and fail unless the attempt got its row."""
    claim = store.claim(new)
    assert claim.lease is not None, claim
    return claim, claim.lease


def running(store: CanonicalStore, task_id: str = "task", *, token: str = "first") -> Lease:
    """A new job with a running attempt."""
    return claimed(store, attempt(token, task_id))[1]


def retried_job(store: CanonicalStore, task_id: str, state: JobState, **fields: Any) -> Lease:
    """A job that was retried once, in this state; ``fields`` are what its messages say.

    Its row says lease 2, retries 1, attempt 2, token ``second``, and has progress and one error.
    """
    _, lease = claimed(store, attempt("first", task_id, **fields))
    store.end(
        lease,
        "first",
        Transition(JobState.RETRYABLE, snapshot(), error="ValueError: boom", unsent=True),
    )
    _, lease = claimed(store, attempt("second", task_id, retries=1, from_lease=1, **fields))
    if state is not JobState.RUNNING:
        store.end(lease, "second", Transition(state, run_in=60, unsent=True))
    return lease


def use_every_verb(store: CanonicalStore) -> None:
    """Every verb of the store, by every way that ends well."""
    _, lease = claimed(store, attempt(envelope=Envelope(b"whole", whole=True)))
    store.knows("task")
    store.owns(lease)
    for skip_locked in (False, True):
        store.heartbeat([lease], skip_locked=skip_locked)
        store.heartbeat_with_progress([Beat(lease, snapshot())], skip_locked=skip_locked)
    store.end(lease, "first", Transition(JobState.RETRYABLE, error="boom", unsent=True))
    store.sent(lease)
    store.claim(attempt("second", retries=1))
    store.end_unclaimed(attempt("other", "other"), Transition(JobState.FAILED))
    store.end_unclaimed(attempt("replaced", "replaced"), Transition(None))
    store.record_completed([attempt("third", "third"), attempt("again", "other", run_token="2")])
    use_every_verb_of_rescue(store)
    use_every_verb_of_callbacks(store)
    assert len(store.list_jobs()) == 7
    assert store.get_job("task") is not None


def use_every_verb_of_rescue(store: CanonicalStore) -> None:
    """Those for lost and unsent jobs, and for operators."""
    leases = [
        claimed(store, lost_attempt("first", task_id, lost_policy=policy))[1]
        for task_id, policy in (("requeued", "requeue"), ("failed", "fail"))
    ]
    store.forsake(leases)
    assert {job.lease for job in store.lost(OLD)} >= set(leases)
    assert set(store.rescue(leases, OLD).values()) == {Rescue.REQUEUED, Rescue.FAILED}
    for job in store.unsent(resend_after=HOUR):
        (store.told if job.state.finished else store.sent)(job.lease, job.resends)
    assert store.request_cancel("requeued") is Cancel.CANCELLED
    assert store.resend("requeued", keep_progress=True) is Resend.DONE
    assert store.edit_checkpoint("requeued", '{"last_id": 1}')
    assert store.settle(leases[0], JobState.FAILED, "its message cannot be sent")


def use_every_verb_of_callbacks(store: CanonicalStore) -> None:
    """And what a task writes through a connection of its own."""
    tokens = {}
    for task_id in ("completed", "refused"):
        lease = running(store, task_id)
        tokens[task_id] = f"{lease.job_id}-secret"
        assert store.expect_callback(lease, "first", tokens[task_id], "callback")
        with store._connection.transaction():
            assert checkpoint_through(store._connection, store._schema, lease, "first", 0, "{}")
        waits = Transition(JobState.WAITING_EXTERNAL, callback_id=tokens[task_id])
        store.end(lease, "first", waits)
    assert store.complete_callback(tokens["completed"], "1") is Callback.DONE
    assert store.fail_callback(tokens["refused"], "no") is Callback.DONE


class Database:
    """A look past the store, over a connection of its own; ``{schema}`` stands for the schema."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.connection = psycopg.connect(url, autocommit=True, row_factory=dict_row)

    def execute(self, text: str, *parameters: object) -> list[Row]:
        """Run one statement and return its rows."""
        cursor = self.connection.execute(text.replace("{schema}", SCHEMA), parameters or None)
        return cursor.fetchall() if cursor.description else []

    def row(self, task_id: str = "task") -> Row:
        """All columns of a job, and as ``table`` where it lies; fails unless there is one row."""
        found = self.rows(task_id)
        assert len(found) == 1, f"{len(found)} rows of {task_id}: {found}"
        return found[0]

    def rows(self, task_id: str = "task") -> list[Row]:
        """Each table's row of a task, in one snapshot."""
        return self.execute(
            "SELECT 'jobs_hot' AS table, * FROM {schema}.jobs_hot WHERE task_id = %s "
            "UNION ALL "
            "SELECT 'scheduled_jobs', * FROM {schema}.scheduled_jobs WHERE task_id = %s",
            task_id,
            task_id,
        )

    def silence(self, seconds: float, task_id: str = "task") -> None:
        """Make the last heartbeat of a running attempt older."""
        self.execute(
            "UPDATE {schema}.jobs_hot SET heartbeat_at = heartbeat_at - make_interval(secs => %s) "
            "WHERE task_id = %s AND state = 'running'",
            seconds,
            task_id,
        )

    def count(self) -> int:
        """How many jobs there are."""
        return int(self.execute("SELECT count(*) FROM {schema}.jobs")[0]["count"])

    @contextmanager
    def transaction(self) -> Iterator[Database]:
        """A user's open transaction, rolled back at the end."""
        with ExitStack() as stack:
            another = stack.enter_context(closing(Database(self.url)))
            stack.enter_context(another.connection.transaction(force_rollback=True))
            yield another

    @contextmanager
    def locked(self, task_id: str = "task") -> Iterator[None]:
        """A user's open transaction that holds the lock on a job's row."""
        with self.transaction() as another:
            for table in ("jobs_hot", "scheduled_jobs"):
                another.execute(
                    f"SELECT FROM {{schema}}.{table} WHERE task_id = %s FOR UPDATE", task_id
                )
            yield

    def set_default(self, name: str, value: str) -> None:
        """Set what connections to this database begin with."""
        database = self.execute("SELECT quote_ident(current_database()) AS name")[0]["name"]
        self.execute(f"ALTER DATABASE {database} SET {name} = '{value}'")

    def empty(self) -> None:
        """Without any job."""
        self.execute("DELETE FROM {schema}.jobs_hot")
        self.execute("DELETE FROM {schema}.scheduled_jobs")

    def close(self) -> None:
        self.connection.close()
