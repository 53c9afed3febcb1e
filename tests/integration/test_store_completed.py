"""Completed rows of attempts that succeeded before they were claimed, a batch at a time."""

from __future__ import annotations

import time
from typing import Any

import pytest

from celery_awa.errors import RowLocked, StoreRefused
from celery_awa.model import JobState, NewAttempt, Transition
from celery_awa.store.canonical import CanonicalStore

from .jobs import Database, attempt, claimed, retried_job, running, snapshot

pytest_plugins = ["tests.integration.stores"]


def completed(task_id: str, token: str = "", **fields: Any) -> NewAttempt:
    """An attempt of a task that has succeeded, which may have run for a while."""
    return attempt(token or f"token of {task_id}", task_id, **fields)


def states(database: Database) -> dict[str, tuple[str, int]]:
    """State and lease of every job."""
    found = database.execute("SELECT task_id, state, run_lease FROM {schema}.jobs")
    return {job["task_id"]: (job["state"], job["run_lease"]) for job in found}


def test_new_tasks_get_completed_rows(store: CanonicalStore, database: Database) -> None:
    store.record_completed([completed(f"{n}", retries=2, group_index=n) for n in range(300)])

    assert states(database) == {f"{n}": ("completed", 1) for n in range(300)}
    job = database.row("7")
    assert (job["attempt"], job["retries"], job["group_index"]) == (3, 2, 7)
    assert (job["progress"], job["envelope"]) == (None, None)
    assert job["finalized_at"] is not None


def test_rows_are_made_in_the_order_of_their_tasks_so_that_two_batches_cannot_deadlock(
    store: CanonicalStore, database: Database
) -> None:
    store.record_completed([completed(task_id) for task_id in "cebad"])

    made = database.execute("SELECT task_id FROM {schema}.jobs_hot ORDER BY id")
    assert [job["task_id"] for job in made] == list("abcde")


def test_a_batch_whose_answer_was_lost_is_repeated_without_effect(
    store: CanonicalStore, database: Database
) -> None:
    batch = [completed("a"), completed("b")]
    store.record_completed(batch)
    before = [database.row("a"), database.row("b")]

    store.record_completed([*batch, completed("c")])

    assert [database.row("a"), database.row("b")] == before
    assert states(database)["c"] == ("completed", 1)


def test_tasks_that_have_a_row_are_ended_by_the_rules_of_a_claim(
    store: CanonicalStore, database: Database
) -> None:
    retried_job(store, "retried", JobState.RETRYABLE)
    retried_job(store, "copied", JobState.RETRYABLE)
    retried_job(store, "failed", JobState.FAILED)
    retried_job(store, "failed, new run", JobState.FAILED)
    running(store, "held")
    running(store, "claimed", token="token of claimed")

    store.record_completed(
        [
            completed("retried", retries=2, from_lease=2),
            completed("copied"),
            completed("failed"),
            completed("failed, new run", run_token="run 2"),
            completed("held", began_at=time.monotonic() - 60),
            completed("claimed"),
            completed("new"),
        ]
    )

    assert states(database) == {
        "retried": ("completed", 3),
        "copied": ("retryable", 2),
        "failed": ("failed", 2),
        "failed, new run": ("completed", 3),
        "held": ("running", 1),
        "claimed": ("completed", 1),
        "new": ("completed", 1),
    }
    assert database.row("retried")["progress"] is None


def test_two_runs_of_one_task_in_a_batch_both_count(
    store: CanonicalStore, database: Database
) -> None:
    store.record_completed(
        [completed("a", "1", run_token="run 1"), completed("a", "2", run_token="run 2")]
    )

    assert states(database) == {"a": ("completed", 2)}


def test_a_claim_that_follows_is_told_that_its_attempt_has_ended(store: CanonicalStore) -> None:
    store.record_completed([completed("a")])

    assert store.claim(completed("a")).verdict.value == "ended"


def test_a_locked_row_keeps_no_other_from_being_recorded(
    store: CanonicalStore, database: Database
) -> None:
    running(store, "b", token="token of b")
    running(store, "c", token="token of c")
    batch = [completed("a"), completed("b"), completed("c"), completed("d")]

    with database.locked("b"), pytest.raises(RowLocked):
        store.record_completed(batch)

    assert {state for state, _ in states(database).values()} == {"completed", "running"}
    assert states(database)["c"] == ("completed", 1)
    store.record_completed(batch)
    assert {state for state, _ in states(database).values()} == {"completed"}


def test_a_new_row_that_another_is_about_to_make_keeps_no_other_from_being_recorded(
    store: CanonicalStore, database: Database
) -> None:
    with database.transaction() as others:
        others.execute(
            "INSERT INTO {schema}.jobs_hot (task_id, kind, state, run_token) "
            "VALUES ('b', 'k', 'running', 'r')"
        )
        with pytest.raises(RowLocked):
            store.record_completed([completed("a"), completed("b"), completed("c")])

    assert {"a", "c"} <= states(database).keys()


def test_a_refused_one_lets_the_batch_be_refused_as_a_whole(
    store: CanonicalStore, database: Database
) -> None:
    with pytest.raises(StoreRefused):
        store.record_completed([completed("a"), completed("x" * 513)])

    assert states(database) == {}


def test_a_task_that_retries_again_after_its_row_was_recorded_begins_a_new_run(
    store: CanonicalStore, database: Database
) -> None:
    store.record_completed([completed("a")])
    _, lease = claimed(store, attempt("next", "a", run_token="run 2"))
    store.end(lease, "next", Transition(JobState.RETRYABLE, snapshot()))

    assert states(database) == {"a": ("retryable", 2)}
