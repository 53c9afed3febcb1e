"""What must hold, whatever was broken: looked at during a round, after it, and at the end."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import psycopg
from celery.result import AsyncResult
from psycopg.rows import dict_row

from celery_awa.model import JobState
from tests.chaos.script import Job
from tests.chaos.site import WRITE_INTERVAL, Broker, Site

#: Seconds after which a task without a row, which may not be run again, will get none: see
#: SETTLED_WITHIN.
NO_ROW_AFTER = 130.0
_FINISHED = ("completed", "failed", "cancelled")

#: Notes every write of progress whose author is not the attempt that has the lease.
AUDIT = """
CREATE TABLE {schema}_audit (task_id text, author text, owner text);
CREATE FUNCTION {schema}_note_foreign_write() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.progress IS NOT NULL AND NEW.progress IS DISTINCT FROM OLD.progress
        AND NEW.progress #>> '{{metadata,by}}' IS DISTINCT FROM NEW.attempt_token THEN
        INSERT INTO public.{schema}_audit
        VALUES (NEW.task_id, NEW.progress #>> '{{metadata,by}}', NEW.attempt_token);
    END IF;
    RETURN NEW;
END
$$;
CREATE TRIGGER foreign_write AFTER UPDATE ON {schema}.jobs_hot
FOR EACH ROW EXECUTE FUNCTION public.{schema}_note_foreign_write();
"""


class Database:
    """A look at one broker's jobs past the proxy; connects anew after a restart of the server.

    Writes that foreign attempts make are noted from here on.
    """

    def __init__(self, site: Site, broker: Broker) -> None:
        self._site = site
        self._schema = broker.schema
        self.rows(AUDIT)

    def rows(self, text: str, *parameters: object) -> list[dict[str, Any]]:
        """The rows of one statement, in which ``{schema}`` stands for the schema."""
        with psycopg.connect(
            self._site.postgres.url(self._site.database),
            autocommit=True,
            application_name="tests",
            row_factory=dict_row,
        ) as connection:
            named = text.format(schema=self._schema)
            cursor = connection.execute(named, parameters or None)
            return cursor.fetchall() if cursor.description else []

    def job(self, task_id: str) -> dict[str, Any] | None:
        """A task's row in either table."""
        found = self.rows(
            "SELECT * FROM {schema}.jobs_hot WHERE task_id = %s"
            " UNION ALL SELECT * FROM {schema}.scheduled_jobs WHERE task_id = %s",
            task_id,
            task_id,
        )
        return found[0] if found else None


def settled(row: dict[str, Any] | None, job: Job, waited: float) -> bool:
    """Whether nothing more is to happen to the task, ``waited`` seconds after the last fault."""
    if row is None:
        # One that died before it had a row is lost where Celery had acknowledged its message.
        return job.name != "late" and waited > NO_ROW_AFTER
    return row["state"] in _FINISHED and row["send_after"] is None


def of_task(
    row: dict[str, Any] | None,
    result: AsyncResult[Any],
    job: Job,
    entries: list[dict[str, Any]],
    *,
    could_ask: bool,
) -> Iterator[str]:
    """What is wrong with a task that is settled.

    ``could_ask``: no attempt ended while the database was away. One that did may have published
    its result without knowing that it had been rescued.
    """
    yield from _of_checkpoints(entries)
    if row is None:
        # Under "requeue" without acks_late an attempt takes its row before its body begins; what is
        # killed between Celery's acknowledgement and that is lost, which docs/reliability.md says.
        if job.name == "late" or (job.name == "early" and entries):
            yield "it has no row"
        return
    if row["state"] != "completed" and not _may_fail(job, row["errors"]):
        yield f"it is {row['state']}: {row['errors']}"
    word = JobState(row["state"]).celery_state
    if result.state != word:
        yield f"its row says {row['state']}, its result {result.state}"
    elif could_ask and word == "SUCCESS" and result.result != row["attempt_token"]:
        yield f"the result is attempt {result.result}'s, the row attempt {row['attempt_token']}'s"
    if row["state"] == "completed" and row["progress"] is not None:
        yield f"it is completed and has progress {row['progress']}"


def _may_fail(job: Job, errors: list[dict[str, Any]]) -> bool:
    verdict = errors[-1]["error"] if errors else ""
    of_celery = "Worker exited prematurely" in verdict
    return job.name == "once" or (job.name == "early" and of_celery)


def _of_checkpoints(entries: list[dict[str, Any]]) -> Iterator[str]:
    """No attempt began behind what an earlier one had confirmed."""
    confirmed = [entry for entry in entries if entry["what"] == "confirmed"]
    for began in (entry for entry in entries if entry["what"] == "began"):
        earlier = [entry["done"] for entry in confirmed if entry["lease"] < began["lease"]]
        if began["done"] < max(earlier, default=0):
            yield f"lease {began['lease']} began at {began['done']} behind {max(earlier)}"
    leases = [entry["lease"] for entry in entries if entry["what"] == "began"]
    if len(leases) != len(set(leases)):
        yield f"two attempts had the same lease: {leases}"


def of_tables(database: Database) -> Iterator[str]:
    """What the tables alone show; may be asked at any moment."""
    for row in database.rows(
        "SELECT task_id FROM {schema}.jobs_hot JOIN {schema}.scheduled_jobs USING (task_id)"
    ):
        yield f"task {row['task_id']} is in both tables"
    for row in database.rows("SELECT * FROM {schema}_audit"):
        yield f"attempt {row['author']} wrote to a job of attempt {row['owner']}"


def of_site(site: Site) -> Iterator[str]:
    """What a stopped site has left behind."""
    for name in site.slates_left():
        yield f"{name} is left"
    for name in site.postgres.connections():
        yield f"a connection of {name} is left"
    for worker in site.workers():
        if worker.running:
            yield f"{worker.name} did not stop"


_LINE = re.compile(r"^(\S+ \S+) \S+ \[(\d+)\] ", re.MULTILINE)


def of_statements(log: str) -> Iterator[str]:
    """Backends of a worker's thread that sent more than two heartbeats a cycle.

    A backend that claims is a pool child's, whose flushes are not heartbeats.
    """
    beats: dict[str, list[datetime]] = defaultdict(list)
    children = set()
    pieces = _LINE.split(log)
    for at, pid, text in zip(pieces[1::3], pieces[2::3], pieces[3::3], strict=True):
        if ".claim(" in text or ".end_attempt(" in text:
            children.add(pid)
        if ".heartbeat" in text and "STATEMENT" not in text:
            beats[pid].append(datetime.fromisoformat(at))
    for pid, times in beats.items():
        cycles = (times[-1] - times[0]).total_seconds() / WRITE_INTERVAL + 1
        if pid not in children and len(times) > 2 * cycles + 2:
            yield f"backend {pid} sent {len(times)} heartbeats in {cycles:.1f} cycles"
