"""A broker that goes away with all that it held, and comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import psycopg
import pytest

from tests.acceptance.brokers import Broker, redis_broker
from tests.acceptance.diary import Diary, Gate
from tests.acceptance.jobs import Jobs, outcome
from tests.acceptance.workers import FAST, Worker
from tests.services.redis import PrivateRedis

Start = Callable[..., Worker]
APP = "tests.acceptance.apps.rescued"
LEFT = {"last_id": 7}
pytestmark = pytest.mark.redis


@pytest.fixture
def broker(private_redis: PrivateRedis, tmp_path: Path) -> Iterator[Broker]:
    """Messages in the Redis that the test may stop; results in files, which stay."""
    results = tmp_path / "results"
    results.mkdir()
    with redis_broker(private_redis.url) as opened:
        yield replace(opened, config={**opened.config, "result_backend": f"file://{results}"})


@pytest.fixture
def settings(settings: dict[str, Any]) -> dict[str, Any]:
    return {**settings, **FAST}


def test_what_cannot_be_published_meanwhile_is_published_once_when_it_is_back(
    start: Start,
    client: ModuleType,
    jobs: Jobs,
    diary: Diary,
    gate: Gate,
    broker: Broker,
    private_redis: PrivateRedis,
    tmp_path: Path,
    database_url: str,
) -> None:
    doomed = start()
    lost = client.resume_late.delay(gate.path, "value")
    diary.wait_for("left", lost.id)
    worker = start(options=["--queues", f"{broker.queue},retrying"])
    before_retry = Gate(tmp_path / "another gate")
    retrying = client.retry_once.apply_async((0, before_retry.path), queue="retrying")
    diary.wait_for("left", retrying.id)

    private_redis.stop()
    doomed.kill()
    before_retry.open()
    worker.wait_for_log(rf"the message of task {lost.id} cannot be sent now")
    # kombu tries for a second or so.
    worker.wait_for_log(rf"\[{retrying.id}\] ignored")
    for one in (lost, retrying):
        assert jobs.wait_for(one.id, "retryable").metadata == LEFT
        assert unsent(database_url, one.id)
        assert len(diary.entries("began", one.id)) == 1

    private_redis.start()
    make_due(database_url)
    for one in (lost, retrying):
        again = diary.wait_for("began", one.id, count=2, timeout=20)
        assert again["checkpoint"] == LEFT
        assert not unsent(database_url, one.id)
    gate.open()
    for one, returned, rescues in ((lost, "value", 1), (retrying, LEFT, 0)):
        assert outcome(one) == returned
        job = jobs.wait_for(one.id, "completed")
        assert (job.attempt, job.run_lease, job.rescues) == (2, 2, rescues)
    # Once: a second message would have met the attempt of the first, or its end.
    assert "is dropped" not in worker.log()


def make_due(url: str) -> None:
    """Whatever is unsent is to be sent now, and not ten seconds after it was written."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "UPDATE celery_awa.scheduled_jobs SET send_after = now() WHERE send_after IS NOT NULL"
        )


def unsent(url: str, task_id: str) -> bool:
    """Whether the task's job needs a message that is not known to be published."""
    with psycopg.connect(url) as connection:
        row = connection.execute(
            "SELECT send_after IS NOT NULL FROM celery_awa.jobs WHERE task_id = %s", [task_id]
        ).fetchone()
    assert row is not None
    return bool(row[0])
