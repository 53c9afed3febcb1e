"""One end of one attempt: what is written, what is left out when the database refuses it."""

from __future__ import annotations

import pytest

from celery_awa.errors import RowLocked, StoreRefused
from celery_awa.model import Answer, JobState, Snapshot, Transition
from celery_awa.runtime.ending import (
    MAX_ERROR_BYTES,
    Ending,
    clean,
    error_text,
    from_page,
    to_page,
    with_last_snapshot,
)
from celery_awa.runtime.slate_layout import END_BYTES
from tests.fake_store import FakeDatabase, FakeStore, Row
from tests.runtime_parts import described

FAILED = Transition(JobState.FAILED, Snapshot(3, '{"percent": 40}'), error="ValueError: boom")


@pytest.fixture
def store(database: FakeDatabase) -> FakeStore:
    return database.open()


@pytest.fixture
def row(database: FakeDatabase, store: FakeStore) -> Row:
    store.claim(described("first"))
    return database.rows["task"]


def test_an_end_with_a_lease_names_it(database: FakeDatabase, store: FakeStore, row: Row) -> None:
    ended = Ending("first", row.lease, None, FAILED).write(store)
    assert (ended.answer, ended.lease) == (Answer.DONE, row.lease)
    assert (row.state, row.progress, row.errors) == (
        JobState.FAILED,
        {"percent": 40},
        ["ValueError: boom"],
    )


def test_an_end_may_be_repeated(store: FakeStore, row: Row) -> None:
    ending = Ending("first", row.lease, None, FAILED)
    assert [ending.write(store).answer for _ in range(2)] == [Answer.DONE, Answer.REPEATED]


def test_an_end_without_a_lease_claims(database: FakeDatabase, store: FakeStore) -> None:
    ended = Ending("first", None, described("first"), FAILED).write(store)
    assert ended.answer is Answer.DONE
    assert ended.lease == database.rows["task"].lease


def test_an_end_of_which_nothing_is_known_writes_nothing(
    database: FakeDatabase, store: FakeStore
) -> None:
    assert Ending("first", None, None, FAILED).write(store).answer is Answer.GONE
    assert database.statements == []


def test_a_refused_error_text_costs_neither_the_state_nor_the_checkpoint(
    database: FakeDatabase, store: FakeStore, row: Row
) -> None:
    database.refused_errors.add("task")
    Ending("first", row.lease, None, FAILED).write(store)
    assert (row.state, row.progress, row.errors) == (JobState.FAILED, {"percent": 40}, [])


def test_a_refused_checkpoint_does_not_cost_the_state(
    database: FakeDatabase, store: FakeStore, row: Row
) -> None:
    database.refused_progress.add("task")
    Ending("first", row.lease, None, FAILED).write(store)
    assert (row.state, row.progress) == (JobState.FAILED, None)


def test_an_end_that_is_refused_altogether_says_so_after_three_tries(
    database: FakeDatabase, store: FakeStore, row: Row
) -> None:
    database.refused.add("task")
    with pytest.raises(StoreRefused):
        Ending("first", row.lease, None, FAILED).write(store)
    assert database.count("end") == 3


def test_a_locked_row_is_left_to_the_next_try(
    database: FakeDatabase, store: FakeStore, row: Row
) -> None:
    database.locked.add("task")
    with pytest.raises(RowLocked):
        Ending("first", row.lease, None, FAILED).write(store)


@pytest.mark.parametrize(
    ("known", "last", "expected"),
    [
        (None, Snapshot(0, None), None),
        (None, Snapshot(2, "{}"), Snapshot(2, "{}")),
        (Snapshot(2, "{}"), Snapshot(3, "[]"), Snapshot(3, "[]")),
        # What a busy page could not tell, or what the next attempt has written there.
        (Snapshot(2, "{}"), Snapshot(0, None), Snapshot(2, "{}")),
        (Snapshot(2, "{}"), Snapshot(1, "[]"), Snapshot(2, "{}")),
    ],
)
def test_an_end_takes_the_newest_snapshot(
    known: Snapshot | None, last: Snapshot, expected: Snapshot | None
) -> None:
    assert with_last_snapshot(Transition(JobState.FAILED, known), last).snapshot == expected


def test_an_error_is_told_by_type_and_message() -> None:
    assert error_text(ValueError("boom")) == "ValueError: boom"
    assert error_text("Terminated: 9") == "Terminated: 9"


def test_an_error_text_holds_nothing_that_the_database_refuses() -> None:
    assert error_text(ValueError("a\0b\ud800c")) == "ValueError: ab?c"
    assert clean(r"the two characters \0 stay") == r"the two characters \0 stay"


def test_a_long_error_is_cut_between_two_characters() -> None:
    text = error_text("é" * MAX_ERROR_BYTES)
    assert text == "é" * (MAX_ERROR_BYTES // 2)
    assert error_text("x" + "é" * MAX_ERROR_BYTES) == "x" + "é" * (MAX_ERROR_BYTES // 2 - 1)


def test_an_error_that_cannot_be_put_into_words_is_still_told() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert error_text(Mute()) == "Mute: (RuntimeError while it was put into words)"


@pytest.mark.parametrize(
    "transition",
    [
        Transition(JobState.RETRYABLE, error="boom", run_in=2.5, unsent=True, uncounted=True),
        Transition(JobState.COMPLETED),
        Transition(None),
    ],
)
def test_an_end_comes_back_from_the_page(transition: Transition) -> None:
    assert from_page(to_page(transition)) == transition


@pytest.mark.parametrize("error", ["\x01" * MAX_ERROR_BYTES, "\ud800" * 9_000, "x" * 20_000])
def test_any_error_fits_on_the_page(error: str) -> None:
    data = to_page(Transition(JobState.FAILED, error=error))
    assert len(data) <= END_BYTES
    assert from_page(data).error


@pytest.mark.parametrize(
    "data", [b"", b"\0garbage", b"{}", to_page(FAILED).replace(b"fai", b"fia")]
)
def test_what_is_no_end_is_told_apart(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # the text is msgspec's
        from_page(data)
