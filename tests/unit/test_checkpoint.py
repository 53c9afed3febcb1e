"""What an attempt finds of earlier ones: two parts, and versions of the code that wrote them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from celery_awa.errors import InvalidProgress, NotInAttempt
from celery_awa.model import JobState, Transition
from celery_awa.runtime.checkpoint import Checkpoint
from celery_awa.runtime.desk import Terms
from celery_awa.runtime.task_process import TaskProcess
from tests.fake_store import FakeDatabase
from tests.runtime_parts import attempt, begin


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
    assert checkpoint.migrated() is None


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
    assert checkpoint.migrated() is None
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
    begin(process, first)
    first.update_metadata({"a": 1})
    assert first.flush_progress()
    assert database.rows["task"].progress == {"metadata": {"a": 1, "awa_version": 1}}
    process.end(first, Transition(JobState.RETRYABLE))

    second = attempt(desk=process, terms=Terms(version=2), retries=1)
    begin(process, second)
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
