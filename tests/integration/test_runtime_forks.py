"""Processes that are forked while a connection is open, with and without encryption."""

from __future__ import annotations

from contextlib import closing

import pytest

from celery_awa.model import JobState, Transition
from celery_awa.runtime.task_process import TaskProcess
from celery_awa.runtime.trouble import Trouble
from celery_awa.store.canonical import open_store
from celery_awa.store.migrations import migrate
from tests.conftest import SCHEMA, with_database
from tests.runtime_parts import SOON, StartProcess, begin, claimed, settings
from tests.services.postgres import PrivatePostgres

from . import slate_children

pytest_plugins = ["tests.integration.stores", "tests.integration.runtime"]

FLUSHES, CHILDREN = 100, 4


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
def url(request: pytest.FixtureRequest, private_postgres: PrivatePostgres) -> str:
    """A migrated database, over an encrypted connection or not."""
    url = with_database(private_postgres.url(tls=request.param), private_postgres.create_database())
    migrate(url)
    return url


def flush_in_child(url: str, name: str) -> None:
    """What a pool child does: attempts of its own, over a connection of its own."""
    process = TaskProcess(settings(), lambda: open_store(url, SCHEMA), Trouble(), idle_after=10.0)
    one = begin(process, name)
    for number in range(FLUSHES):
        one.set_progress(current=number, total=FLUSHES)
        assert one.flush_progress() is True
    ended = process.end(one, Transition(JobState.FAILED))
    assert ended is not None
    assert process.stop(SOON)


def test_children_forked_beside_an_open_connection_flush_over_their_own(
    start_process: StartProcess, private_postgres: PrivatePostgres, url: str
) -> None:
    parent = start_process(url)
    one = claimed(parent)
    logged = len(private_postgres.log())
    children = [
        slate_children.fork(lambda name=f"child {n}": flush_in_child(url, name))
        for n in range(CHILDREN)
    ]
    for number in range(FLUSHES):
        one.set_progress(current=number, total=FLUSHES)
        assert one.flush_progress() is True
    assert [slate_children.wait(child) for child in children] == [0] * CHILDREN
    one.set_progress(99)
    assert one.flush_progress() is True
    assert parent.stop(SOON)
    with closing(open_store(url, SCHEMA)) as jobs:
        assert {job.task_id: (job.state, job.progress) for job in jobs.list_jobs()} == {
            f"child {n}": (
                JobState.FAILED,
                {"percent": 99, "current": FLUSHES - 1, "total": FLUSHES},
            )
            for n in range(CHILDREN)
        } | {"task": (JobState.RUNNING, {"percent": 99})}
    trouble = [
        line
        for line in private_postgres.log()[logged:].splitlines()
        if "unexpected EOF" in line or "could not" in line or "SSL error" in line
    ]
    assert trouble == []


def test_a_process_forked_by_a_task_reports_nothing_and_breaks_nothing(
    start_process: StartProcess, private_postgres: PrivatePostgres, url: str
) -> None:
    process = start_process(url)
    one = claimed(process)
    one.set_progress(10)
    one.flush_progress()

    def forked() -> None:
        process.detach()
        one.set_progress(99)
        one.update_metadata({"of": "the child"})
        assert one.flush_progress() is True

    for _ in range(5):
        slate_children.run(forked)
        one.set_progress(11)
        assert one.flush_progress() is True
        assert one.progress == {"percent": 11}
    with closing(open_store(url, SCHEMA)) as jobs:
        job = jobs.get_job("task")
        assert job is not None
        assert job.progress == {"percent": 11}
    assert len(private_postgres.connections()) == 1
