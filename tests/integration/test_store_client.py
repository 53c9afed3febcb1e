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
from celery_awa.model import Callback, JobState, Transition
from celery_awa.store.canonical import CanonicalStore

from .jobs import WHOLE, Database, retried_job, running, stored

pytest_plugins = ["tests.integration.stores"]

#: Answers to callbacks, by a token.
ANSWERS: list[Callable[[Client, Any], object]] = [
    lambda client, token: client.complete_callback(token, {"paid": 7}),
    lambda client, token: client.fail_callback(token, "refused by the bank"),
]
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


def waiting(store: CanonicalStore) -> str:
    """A job that waits for a callback; its token."""
    lease = running(store)
    token = f"{lease.job_id}-secret"
    store.expect_callback(lease, "first", token, "callback")
    store.end(lease, "first", Transition(JobState.WAITING_EXTERNAL, callback_id=token))
    return token


def payload_of(database: Database) -> object:
    return database.row()["callbacks"]["callback"]["payload"]


@pytest.mark.parametrize(
    ("payload", "stored"),
    [
        (None, None),
        (7, 7),
        ("ü", "ü"),
        ([1, (2, 3)], [1, [2, 3]]),
        ({"day": date(2020, 2, 3)}, {"day": "2020-02-03"}),
        (date(2020, 2, 3), "2020-02-03"),
        (1e300, 1e300),
    ],
)
def test_a_callback_is_completed_with_any_value_that_a_task_may_report(
    client: Client, store: CanonicalStore, database: Database, payload: Any, stored: object
) -> None:
    token = waiting(store)

    assert client.complete_callback(token, payload) is Callback.DONE

    assert payload_of(database) == stored
    job = client.get_job("task")
    assert job is not None
    assert job.state is JobState.AVAILABLE
    assert client.complete_callback(token, payload) is Callback.REFUSED
    assert client.fail_callback(token, "no") is Callback.REFUSED


def test_a_callback_may_be_completed_without_a_payload(
    client: Client, store: CanonicalStore, database: Database
) -> None:
    assert client.complete_callback(waiting(store)) is Callback.DONE
    assert payload_of(database) is None


@pytest.mark.parametrize(
    ("payload", "path"),
    [
        (float("nan"), "payload: a number"),
        ({1}, "payload: type set"),
        ("nul \0", "payload: a NUL"),
        ("surrogate \ud800", "payload: a lone"),
        ({"a": [1, {2}]}, r"payload\['a'\]\[1\]: type set"),
        ({1: "a"}, r"payload\[1\]: keys must"),
        (2**64, "payload: an integer"),
    ],
)
def test_a_payload_that_no_task_may_report_is_refused_and_changes_nothing(
    client: Client, store: CanonicalStore, database: Database, payload: Any, path: str
) -> None:
    token = waiting(store)
    before = database.row()

    with pytest.raises(InvalidProgress, match=f"^{path}"):
        client.complete_callback(token, payload)
    assert database.row() == before


def test_a_payload_may_be_as_large_as_a_task_may_report(
    client: Client, store: CanonicalStore, database: Database
) -> None:
    token = waiting(store)
    app = Celery(set_as_current=False)
    app.conf.awa_database_url, app.conf.awa_max_progress_bytes = database.url, 300

    with Client(app) as of_app, pytest.raises(ProgressTooLarge) as too_large:
        of_app.complete_callback(token, "x" * 299)
    assert (too_large.value.size, too_large.value.limit) == (301, 300)
    for payload in ("x" * 65_535, ["x"] * 1_000_000):
        with pytest.raises(ProgressTooLarge):
            client.complete_callback(token, payload)
    assert client.complete_callback(token, "x" * 65_534) is Callback.DONE


def test_a_failed_callback_fails_its_job_with_the_error_cut(
    client: Client, store: CanonicalStore
) -> None:
    token = waiting(store)

    assert client.fail_callback(token, "no\0 " + "ü" * 4_096) is Callback.DONE

    job = client.get_job("task")
    assert job is not None
    assert job.state is JobState.FAILED
    assert [one.error for one in job.errors] == ["CallbackFailed: no " + "ü" * 2_046]


@pytest.mark.parametrize(
    ("error", "raised", "match"),
    [
        (None, TypeError, "error must be a text, not NoneType"),
        (ValueError("no"), TypeError, "error must be a text, not ValueError"),
        ("", ValueError, "error is empty"),
        (" \0\n", ValueError, "error is empty"),
    ],
)
def test_an_error_that_says_nothing_is_a_wrong_call(
    client: Client,
    store: CanonicalStore,
    database: Database,
    error: Any,
    raised: type[Exception],
    match: str,
) -> None:
    token = waiting(store)
    before = database.row()

    with pytest.raises(raised, match=match):
        client.fail_callback(token, error)
    assert database.row() == before


@pytest.mark.parametrize("answer", ANSWERS)
def test_what_can_be_no_token_is_unknown_or_a_wrong_call(
    client: Client, answer: Callable[[Client, Any], object]
) -> None:
    for token in ("", "no such", "7-nul \0", "7-\ud800", "9" * 10_000, "7-secret"):
        assert answer(client, token) is Callback.UNKNOWN
    for token in (None, 7, b"7-secret"):
        with pytest.raises(TypeError, match="token must be a text, not "):
            answer(client, token)


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_whose_row_stays_locked_can_be_given_again(
    client: Client,
    store: CanonicalStore,
    database: Database,
    answer: Callable[[Client, Any], object],
) -> None:
    token = waiting(store)
    with database.locked(), pytest.raises(StoreUnavailable, match="keeps the row locked"):
        answer(client, token)

    assert answer(client, token) is Callback.DONE


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

    # Blocks about callbacks and loops are about other jobs than this one.
    of_other_jobs = ("<token>", '["awa"]', "rows.item()")
    for block in blocks("python")[1:]:
        if any(part in block for part in of_other_jobs):
            continue
        exec(compile(block, "operating.md", "exec"), known)

    assert capsys.readouterr().out.startswith("failed 40 None None {'last_id': 40}")
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

    done, unknown = ("done",), ("unknown",)  # no job has given out the token
    assert told == [
        *(("failed",), ("finished",), done, done, unknown, unknown),
        *((True,), (True,)),
    ]


def test_every_answer_is_documented() -> None:
    told = set(re.findall(r"^\| `(\w+)` \|", OPERATING, re.MULTILINE))

    assert told == {answer.value for answer in (*Callback, *Cancel, *Resend)}
