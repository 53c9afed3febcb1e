"""What an attempt may lose its job to while it runs, and what it may not."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType

import psycopg
import pytest

from tests.acceptance.diary import Diary, Gate
from tests.acceptance.jobs import Jobs
from tests.acceptance.messages import send_and_keep
from tests.acceptance.workers import Worker
from tests.waiting import eventually

Start = Callable[..., Worker]
POOLS = pytest.mark.parametrize("pool", ["prefork", "threads"])


@POOLS
def test_a_copy_that_expires_unexecuted_leaves_the_running_attempt_alone(
    start_worker: Start, client: ModuleType, jobs: Jobs, gate: Gate, diary: Diary, pool: str
) -> None:
    worker = start_worker(pool=pool, config={"awa_claim_after": 0})
    sent, again = send_and_keep(client.report, 60, None, None, gate.path, True, expires=3)
    begun_by = time.monotonic() + 3
    diary.wait_for("reported", sent.id)
    eventually(lambda: time.monotonic() > begun_by, what="expiry")
    again()
    worker.wait_for_log(rf"Discarding revoked task: .*{sent.id}")
    expired = jobs.get(sent.id)
    assert expired is not None
    eventually(lambda: jobs.get(sent.id).heartbeat_at > expired.heartbeat_at, what="a heartbeat")
    gate.open()
    job = jobs.wait_for(sent.id, "completed")
    assert (job.attempt, job.run_lease) == (1, 1)


@POOLS
def test_a_row_that_is_deleted_meanwhile_takes_neither_result_nor_retry(
    start_worker: Start,
    client: ModuleType,
    gate: Gate,
    diary: Diary,
    database_url: str,
    pool: str,
) -> None:
    start_worker(pool=pool, config={"awa_claim_after": 0})
    sent = client.report.delay(60, gate=gate.path, flush=True)
    retried = client.retry_at_gate.delay(gate.path)
    diary.wait_for("reported", sent.id)
    diary.wait_for("reported", retried.id)
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("DELETE FROM celery_awa.jobs_hot")
    gate.open()
    assert sent.get(timeout=20) == 60
    assert retried.get(timeout=20) == "second"


def test_an_end_kept_through_an_outage_does_not_touch_the_replacement(
    start_worker: Start,
    client: ModuleType,
    jobs: Jobs,
    diary: Diary,
    gate: Gate,
    proxy_to: Callable[[str], object],
    settings: dict[str, object],
) -> None:
    proxy = proxy_to(str(settings["awa_database_url"]))
    proxied = proxy.through(str(settings["awa_database_url"]))  # type: ignore[attr-defined]
    start_worker(config={"awa_database_url": proxied})
    proxy.refuse()  # type: ignore[attr-defined]
    sent = client.replace_by.delay("report", 5, "new", None, gate.path)
    diary.wait_for("reported", sent.id)
    proxy.accept()  # type: ignore[attr-defined]
    running = jobs.wait_for(sent.id, "running")
    assert running.kind == client.report.name
    gate.open()
    assert sent.get(timeout=20) == 5
    jobs.wait_for(sent.id, "completed")
