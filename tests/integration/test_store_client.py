"""The client's verbs for operators: what they answer, check and raise."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_awa import (
    Cancel,
    Client,
    InvalidProgress,
    ProgressTooLarge,
    Resend,
    StoreUnavailable,
)
from celery_awa.model import JobState, Transition
from celery_awa.store.canonical import CanonicalStore

from .jobs import WHOLE, Database, retried_job, running, stored

pytest_plugins = ["tests.integration.stores"]

VERBS: list[Callable[[Client, Any], object]] = [
    lambda client, task_id: client.request_cancel(task_id),
    lambda client, task_id: client.retry(task_id),
    lambda client, task_id: client.restart(task_id),
    lambda client, task_id: client.edit_checkpoint(task_id, {"a": 1}),
    lambda client, task_id: client.get_job(task_id),
]


@pytest.fixture
def client(database: Database) -> Iterator[Client]:
    """A client of the database that :func:`store` writes to."""
    with Client(database.url) as client:
        yield client


def failed(store: CanonicalStore) -> None:
    retried_job(store, "task", JobState.FAILED, envelope=WHOLE)


def test_a_failed_job_is_sent_again_to_go_on_from_its_checkpoint(
    client: Client, store: CanonicalStore
) -> None:
    failed(store)

    assert client.retry("task") is Resend.DONE

    job = client.get_job("task")
    assert job is not None
    assert (job.state, job.progress) == (JobState.AVAILABLE, stored())
    assert job.send_after is not None
    assert client.retry("task") is Resend.LIVE


def test_a_failed_job_is_sent_again_to_begin_from_nothing(
    client: Client, store: CanonicalStore
) -> None:
    failed(store)

    assert client.restart("task") is Resend.DONE

    job = client.get_job("task")
    assert job is not None
    assert job.progress is None


def test_a_running_job_is_asked_to_stop_and_a_waiting_one_cancelled(
    client: Client, store: CanonicalStore
) -> None:
    lease = running(store)

    assert client.request_cancel("task") is Cancel.REQUESTED
    job = client.get_job("task")
    assert job is not None
    assert job.cancel_requested
    store.end(lease, "first", Transition(JobState.FAILED))
    assert client.request_cancel("task") is Cancel.FINISHED
    retried_job(store, "waiting", JobState.RETRYABLE)
    assert client.request_cancel("waiting") is Cancel.CANCELLED


def test_a_checkpoint_is_edited_with_the_values_that_a_task_may_report(
    client: Client, store: CanonicalStore
) -> None:
    failed(store)

    assert client.edit_checkpoint("task", {"day": date(2020, 2, 3), "tag": "ü"}) is True
    job = client.get_job("task")
    assert job is not None
    assert job.metadata == {"day": "2020-02-03", "tag": "ü"}
    assert client.edit_checkpoint("task", None) is True
    assert client.get_job("task").metadata == {}  # type: ignore[union-attr]  # it is there
    running(store, "running")
    assert client.edit_checkpoint("running", {"a": 1}) is False


@pytest.mark.parametrize("metadata", [{"a": float("nan")}, {"a": {1}}, {1: "a"}, [1], "text", 7])
def test_a_checkpoint_that_no_task_may_report_is_refused(
    client: Client, store: CanonicalStore, metadata: Any
) -> None:
    failed(store)

    with pytest.raises(InvalidProgress, match="metadata"):
        client.edit_checkpoint("task", metadata)
    job = client.get_job("task")
    assert job is not None
    assert job.progress == stored()


def test_a_checkpoint_may_be_as_large_as_a_task_may_report(
    client: Client, database: Database, store: CanonicalStore
) -> None:
    failed(store)
    app = Celery(set_as_current=False)
    app.conf.awa_database_url, app.conf.awa_max_progress_bytes = database.url, 300
    room = len('{"metadata":{"a":""}}')

    with Client(app) as of_app:
        assert of_app.edit_checkpoint("task", {"a": "x" * (300 - room)}) is True
        with pytest.raises(ProgressTooLarge) as too_large:
            of_app.edit_checkpoint("task", {"a": "x" * (301 - room)})
    assert (too_large.value.size, too_large.value.limit) == (301, 300)
    assert client.edit_checkpoint("task", {"a": "x" * (65_536 - room)}) is True
    with pytest.raises(ProgressTooLarge):
        client.edit_checkpoint("task", {"a": "x" * 65_536})


@pytest.mark.parametrize("task_id", ["no such", "", "nul \0", "surrogate \ud800", "x" * 10_000])
def test_a_task_that_has_no_row_or_can_have_none_is_unknown(client: Client, task_id: str) -> None:
    answers = [ask(client, task_id) for ask in VERBS]

    assert answers == [Cancel.UNKNOWN, Resend.UNKNOWN, Resend.UNKNOWN, None, None]


@pytest.mark.parametrize("task_id", [None, 7, b"task"])
@pytest.mark.parametrize("ask", VERBS)
def test_what_is_no_task_id_is_a_wrong_call(
    client: Client, ask: Callable[[Client, Any], object], task_id: object
) -> None:
    with pytest.raises(TypeError, match="task_id must be a text, not "):
        ask(client, task_id)


@pytest.mark.parametrize("ask", VERBS[:4])
def test_a_row_that_stays_locked_and_one_that_the_database_refuses_are_told(
    client: Client,
    store: CanonicalStore,
    own_database: Database,
    database: Database,
    ask: Callable[[Client, Any], object],
) -> None:
    failed(store)
    with database.locked(), pytest.raises(StoreUnavailable, match="keeps the row locked"):
        ask(client, "task")

    own_database.execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE 'not this one'; END $$"
    )
    own_database.execute(
        "CREATE TRIGGER refuse BEFORE INSERT OR UPDATE OR DELETE ON {schema}.jobs_hot "
        "FOR EACH ROW EXECUTE FUNCTION refuse()"
    )
    own_database.execute(
        "INSERT INTO {schema}.scheduled_jobs (task_id, kind, state, run_token, envelope_whole) "
        "VALUES ('task', 'kind', 'retryable', 'run', true)"
    )
    with Client(own_database.url) as of_own, pytest.raises(StoreUnavailable, match="not this one"):
        ask(of_own, "task")


def test_a_connection_that_died_while_it_was_not_used_is_replaced(
    client: Client, database: Database, store: CanonicalStore
) -> None:
    failed(store)
    client.get_job("task")
    database.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )

    assert client.retry("task") is Resend.DONE


OPERATING = (Path(__file__).parents[2] / "docs" / "operating.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    """The documented code, for a task named ``task``."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", OPERATING, re.DOTALL | re.MULTILINE)
    return [block.replace("<task id>", "task") for block in found]


def test_what_is_documented_for_python_does_what_it_says(
    client: Client, store: CanonicalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    retried_job(store, "task", JobState.FAILED, envelope=WHOLE, kind="shop.import_rows")
    known = {"client": client, "celery_awa": None}

    for block in blocks("python")[1:]:
        exec(compile(block, "operating.md", "exec"), known)

    assert capsys.readouterr().out.startswith("failed 40 None {'last_id': 40}")
    job = client.get_job("task")
    assert job is not None
    assert (job.state, job.metadata) == (JobState.AVAILABLE, {})


def test_what_is_documented_for_sql_does_what_it_says(
    database: Database, store: CanonicalStore
) -> None:
    told = []
    for block in blocks("sql"):
        for statement in re.sub("--.*", "", block).split(";")[:-1]:
            retried_job(store, "task", JobState.FAILED, envelope=WHOLE)
            told += [tuple(row.values())[:1] for row in database.execute(statement)]
            database.empty()

    assert told == [("failed",), ("finished",), ("done",), ("done",), (True,), (True,)]


def test_every_answer_is_documented() -> None:
    told = set(re.findall(r"^\| `(\w+)` \|", OPERATING, re.MULTILINE))

    assert told == {answer.value for answer in (*Cancel, *Resend)}
