"""What an attempt finds of earlier ones: two parts, and versions of the code that wrote them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from celery_awa.errors import CallbackFailed, InvalidProgress, NotInAttempt
from celery_awa.model import Claim, JobState, Lease, Transition, Verdict
from celery_awa.runtime.attempt import Attempt
from celery_awa.runtime.checkpoint import Checkpoint
from celery_awa.runtime.desk import Terms
from celery_awa.runtime.ending import from_page, to_page
from celery_awa.runtime.task_process import TaskProcess
from tests.fake_store import FakeDatabase
from tests.runtime_parts import SOON, attempt


def take_row(process: TaskProcess, one: Attempt) -> None:
    """Begin an attempt; it has its row when this returns."""
    process.begin(one, claim=False)
    process.learn(one, SOON)


def found(
    metadata: Any, committed: Any = None, version: int = 0, migrate: Any = None
) -> Checkpoint:
    checkpoint = Checkpoint(version, migrate)
    checkpoint.found(metadata, committed)
    return checkpoint


def test_what_was_committed_goes_before_what_was_reported() -> None:
    checkpoint = found({"a": 1, "b": 1}, {"b": 2})
    assert checkpoint.values == {"a": 1, "b": 2}
    assert checkpoint.committed == {"b": 2}


@pytest.mark.parametrize("odd", [None, [], "text", 3])
def test_what_is_no_object_is_no_checkpoint(odd: Any) -> None:
    assert found(odd, odd).values == {}


@pytest.mark.parametrize(
    "kept", [{"a": 1}, {"a": 1, "awa_version": 1}, {"a": 1, "awa_version": "x"}]
)
def test_a_checkpoint_of_another_version_is_discarded(kept: dict[str, Any]) -> None:
    checkpoint = Checkpoint(2)
    assert not checkpoint.found(kept, None)
    assert checkpoint.values == {}
    assert checkpoint.migrated() == {}


def test_a_checkpoint_of_this_version_is_kept() -> None:
    kept = {"a": 1, "awa_version": 2}
    checkpoint = Checkpoint(2)
    assert checkpoint.found(kept, {"b": 1, "awa_version": 2})
    assert checkpoint.values == {"a": 1, "b": 1, "awa_version": 2}


def test_what_older_code_committed_does_not_go_before_newer_metadata() -> None:
    checkpoint = found({"a": 2, "awa_version": 1}, {"a": 1}, version=1)
    assert checkpoint.values == {"a": 2, "awa_version": 1}
    assert checkpoint.committed == {}


def test_the_task_migrates_both_parts_once() -> None:
    asked: list[tuple[dict[str, Any], int]] = []

    def migrate(old: dict[str, Any], version: int) -> Mapping[str, Any]:
        asked.append((old, version))
        return {"row": old["line"] - 1, "awa_version": 7}

    checkpoint = found({"line": 4, "more": 1}, {"line": 5}, version=1, migrate=migrate)
    assert checkpoint.migrated() == {"row": 4}
    assert checkpoint.values == {"row": 4}
    assert checkpoint.migrated() == {}
    assert asked == [({"line": 5, "more": 1}, 0)]


def test_a_migration_that_fails_is_tried_again_and_loses_nothing() -> None:
    def migrate(old: dict[str, Any], version: int) -> None:
        raise KeyError("line")

    checkpoint = found({"a": 1}, version=1, migrate=migrate)
    for _ in range(2):
        with pytest.raises(KeyError):
            checkpoint.migrated()


def test_an_attempt_stamps_its_reports_and_the_next_one_of_another_version_begins_anew(
    process: TaskProcess, database: FakeDatabase
) -> None:
    first = attempt(desk=process, terms=Terms(version=1))
    take_row(process, first)
    first.update_metadata({"a": 1})
    assert first.flush_progress()
    assert database.rows["task"].progress == {"metadata": {"a": 1, "awa_version": 1}}
    process.end(first, Transition(JobState.RETRYABLE))

    second = attempt(desk=process, terms=Terms(version=2), retries=1)
    take_row(process, second)
    assert second.checkpoint == {}
    second.update_metadata({"b": 1})
    assert second.flush_progress()
    assert database.rows["task"].progress == {"metadata": {"b": 1, "awa_version": 2}}


@pytest.mark.parametrize("key", ["awa", "awa_committed", "awa_version"])
def test_keys_of_our_own_cannot_be_reported(process: TaskProcess, key: str) -> None:
    one = attempt(desk=process)
    with pytest.raises(InvalidProgress, match=rf"metadata\['{key}'\]"):
        one.update_metadata({"fine": 1, key: 1})
    assert one.buffer.value() is None


def test_a_key_that_was_committed_cannot_be_reported() -> None:
    one = attempt()
    one.start_from({"metadata": {"a": 1}}, {"last_id": 7})
    with pytest.raises(InvalidProgress, match="checkpoint_in"):
        one.update_metadata({"last_id": 8})
    one.update_metadata({"a": 2})
    assert one.checkpoint == {"a": 1, "last_id": 7}


def test_without_a_row_what_is_committed_is_kept_with_the_rest_and_loops_keep_each_their_own() -> (
    None
):
    one = attempt()
    one.commit(object(), {"awa_committed": {"rows": {"done": 1}}})
    one.commit(object(), {"awa_committed": {"files": {"done": 2}}})
    again = attempt()
    again.start_from(one.buffer.value())
    assert again.committed["awa_committed"] == {"rows": {"done": 1}, "files": {"done": 2}}


def test_nobody_calls_back_where_there_is_no_row() -> None:
    with pytest.raises(NotInAttempt):
        attempt().callback_token("callback")


def late(process: TaskProcess, left: dict[str, Any], **terms: Any) -> Any:
    """An attempt that reported before its claim brought what another version had left."""
    first = attempt(desk=process)
    take_row(process, first)
    first.buffer.update_metadata(left)
    first.flush_progress()
    process.end(first, Transition(JobState.RETRYABLE))
    second = attempt(desk=process, terms=Terms(**terms), retries=1)
    second.set_progress(1)
    take_row(process, second)
    return second


def test_a_claim_that_comes_late_loses_nothing_of_what_another_version_left(
    process: TaskProcess, database: FakeDatabase
) -> None:
    second = late(process, {"line": 4}, version=1, migrate=lambda old, _: {"row": old["line"] - 1})
    # Written by a heartbeat before the task has looked.
    assert second.snapshot().json == '{"percent":1,"metadata":{"line":4}}'
    second.update_metadata({"more": 1})
    assert second.flush_progress()
    metadata = {"row": 3, "more": 1, "awa_version": 1}
    assert database.rows["task"].progress == {"percent": 1, "metadata": metadata}


def test_what_was_reported_before_such_a_claim_lies_over_what_is_migrated(
    process: TaskProcess, database: FakeDatabase
) -> None:
    first = attempt(desk=process)
    take_row(process, first)
    first.buffer.update_metadata({"line": 4})
    first.flush_progress()
    process.end(first, Transition(JobState.RETRYABLE))
    terms = Terms(version=1, migrate=lambda old, _: {"row": 3, "more": 0})
    second = attempt(desk=process, terms=terms, retries=1)
    second.update_metadata({"more": 1})
    take_row(process, second)
    assert second.checkpoint == {"row": 3, "more": 0}
    assert second.progress == {"metadata": {"row": 3, "more": 1, "awa_version": 1}}


def test_an_early_report_of_a_new_run_gets_its_version_with_the_claim(
    process: TaskProcess, database: FakeDatabase
) -> None:
    one = attempt(desk=process, terms=Terms(version=2))
    one.update_metadata({"a": 1})
    take_row(process, one)
    assert one.flush_progress()
    assert database.rows["task"].progress == {"metadata": {"a": 1, "awa_version": 2}}


def test_a_migrated_checkpoint_is_written_before_the_first_values_are_committed(
    process: TaskProcess, database: FakeDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = late(process, {"line": 4}, version=1, migrate=lambda old, _: {"row": 3})
    written: list[Any] = []

    def commit(attempt: Any, connection: Any, values: Mapping[str, Any]) -> bool:
        written.append(database.rows["task"].progress["metadata"])
        return True

    monkeypatch.setattr(process, "commit", commit)
    for _ in range(2):
        second.checkpoint_in(object(), {"last_id": 7})
    assert written == [{"row": 3, "awa_version": 1}] * 2


def test_a_callback_that_failed_while_the_task_ran_fails_it_where_it_would_ask_again() -> None:
    one = attempt()
    answers = {"bank": {"error": "no"}, "carrier": {"payload": 7}}
    one.claimed(Claim(Verdict.YOURS, Lease(1, 2), 1, callbacks=answers), 0.0)
    one._desk = object()  # type: ignore[assignment]  # nobody is to be asked
    with pytest.raises(CallbackFailed, match="no"):
        one.callback_token("bank")
    with pytest.raises(ValueError, match="was answered"):
        one.callback_token("carrier")
    assert one.callbacks == {"carrier": 7}
    one.answers.raise_if_failed("carrier")


def test_the_end_of_a_task_that_waits_comes_whole_from_its_page() -> None:
    end = Transition(
        JobState.WAITING_EXTERNAL, uncounted=True, callback_id="7-secret", callback_timeout=60.0
    )
    assert from_page(to_page(end)) == end
