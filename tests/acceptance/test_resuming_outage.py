"""Tasks that cannot know where to begin, or leave off, while the database is away."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from celery_awa.store.migrations import migrate
from tests.acceptance.diary import Diary, Gate
from tests.acceptance.jobs import Jobs, outcome
from tests.acceptance.workers import FAST, Worker
from tests.services.postgres import PrivatePostgres

Start = Callable[..., Worker]
APP = "tests.acceptance.apps.resuming"


@pytest.fixture
def database_url(private_postgres: PrivatePostgres) -> str:
    """A migrated database on the server that the test may break."""
    url = private_postgres.url(private_postgres.create_database())
    migrate(url)
    return url


@pytest.fixture
def settings(settings: dict[str, Any]) -> dict[str, Any]:
    return {**settings, **FAST, "awa_stale_after": 60}


@pytest.mark.parametrize("name", ["loop", "in_steps"])
def test_a_task_that_cannot_know_where_to_begin_goes_on_later_and_does_not_fail(
    start: Start,
    client: ModuleType,
    jobs: Jobs,
    diary: Diary,
    private_postgres: PrivatePostgres,
    name: str,
) -> None:
    private_postgres.stop()
    worker = start()
    sent = client.loop.delay(3, None) if name == "loop" else client.in_steps.delay()
    worker.wait_for_log("a task goes on later, since StoreUnavailable", timeout=20)
    private_postgres.start()
    done = 3 if name == "loop" else ["first", "second", "third"]
    assert outcome(sent, timeout=60) == done
    assert len(diary.entries("item" if name == "loop" else "step", sent.id)) == 3
    job = jobs.wait_for(sent.id, "completed")
    assert (job.attempt, job.retries, job.errors) == (1, 0, ())


def test_a_loop_that_is_stopped_without_the_database_goes_on_once_it_is_back(
    start: Start,
    client: ModuleType,
    jobs: Jobs,
    diary: Diary,
    gate: Gate,
    private_postgres: PrivatePostgres,
) -> None:
    first = start()
    sent = client.loop.delay(6, 2)
    diary.wait_for("item", sent.id, count=3)
    assert jobs.wait_for(sent.id, "running").run_lease == 1
    private_postgres.stop()
    first.stop(timeout=40)
    private_postgres.start()
    start()
    assert outcome(sent, timeout=60) == 6
    # What the stopping worker could not write is done again, and no more.
    items = [entry["item"] for entry in diary.entries("item", sent.id)]
    assert sorted(set(items)) == list(range(6))
    assert len(items) <= 9
    job = jobs.wait_for(sent.id, "completed")
    assert job.retries == 0
