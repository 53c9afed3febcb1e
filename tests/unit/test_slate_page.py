"""Pages: what the worker reads of an attempt, and what the attempt reads of the worker."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from celery_awa.model import Lease, Snapshot
from celery_awa.progress import ProgressBuffer
from celery_awa.runtime.page import Page, PageView
from celery_awa.runtime.slate import Slate
from celery_awa.runtime.slate_record import Half, Record
from tests.strikes import struck_at_every_step

FIRST, SECOND = "a" * 32, "b" * 32


@pytest.fixture
def slate(tmp_path: Path) -> Iterator[Slate]:
    slate = Slate.create(str(tmp_path), pages=2, record_bytes=300)
    yield slate
    slate.close(unlink=True)


@pytest.fixture
def page(slate: Slate) -> Page:
    page = slate.take_page()
    assert page is not None
    return page


def view_of(slate: Slate) -> PageView:
    (view,) = slate.pages()
    return view


def fill(page: Page) -> None:
    """Write everything that a page can hold for one attempt."""
    page.write_brief(1, b'{"percent":40,"message":"x"}')
    page.write_metadata(2, b'{"last_id":7}')
    page.set_lease(Lease(11, 3))
    page.set_end(b"failed")


def check_filled(view: PageView, token: str) -> None:
    snapshot = view.snapshot()
    assert view.token == token
    assert snapshot.generation == view.generation() == 2
    assert json.loads(snapshot.json or "") == {
        "percent": 40,
        "message": "x",
        "metadata": {"last_id": 7},
    }
    assert view.lease == Lease(11, 3)
    assert view.end() == b"failed"


def check_empty(view: PageView) -> None:
    assert view.snapshot() == Snapshot(0, None)
    assert view.generation() == view.acknowledged() == 0
    assert view.lease is None
    assert view.end() is None


def test_an_idle_page_is_not_shown(slate: Slate, page: Page) -> None:
    assert list(slate.pages()) == []


def test_the_worker_reads_all_that_an_attempt_wrote(slate: Slate, page: Page) -> None:
    page.begin(FIRST, "task-1")
    check_empty(view_of(slate))
    fill(page)
    view = view_of(slate)
    check_filled(view, FIRST)
    assert (view.index, view.task_id, view.pid) == (0, "task-1", os.getpid())
    assert view.alive()


def test_the_generation_is_that_of_the_newer_record(slate: Slate, page: Page) -> None:
    page.begin(FIRST, "task")
    page.write_metadata(7, b'{"a":1}')
    assert view_of(slate).snapshot() == Snapshot(7, '{"metadata":{"a":1}}')
    page.write_brief(9, b'{"percent":1}')
    assert view_of(slate).generation() == 9


def test_the_next_attempt_starts_from_an_empty_page(slate: Slate, page: Page) -> None:
    page.begin(FIRST, "task")
    fill(page)
    view_of(slate).answer(acknowledged=2, confirmed_at=1.5, lost=True, cancel=True)
    page.begin(SECOND, "task")
    check_empty(view_of(slate))
    assert (page.acknowledged(), page.confirmed_at()) == (0, None)
    assert not page.lost()
    assert not page.told().cancel


def test_a_cleared_page_is_idle_and_takes_no_late_report(slate: Slate, page: Page) -> None:
    page.begin(FIRST, "task")
    fill(page)
    page.clear()
    left = image_of(slate)
    fill(page)
    assert image_of(slate) == left
    assert list(slate.pages()) == []
    page.begin(SECOND, "task")
    check_empty(view_of(slate))


def test_a_lease_can_be_taken_back(slate: Slate, page: Page) -> None:
    page.begin(FIRST, "task")
    page.set_lease(Lease(1, 1))
    page.set_lease(None)
    assert view_of(slate).lease is None


def test_what_comes_late_for_an_earlier_attempt_does_nothing(slate: Slate, page: Page) -> None:
    page.begin(FIRST, "task")
    page.begin(SECOND, "task")
    page.set_lease(Lease(1, 1), token=FIRST)
    page.set_end(b"failed", token=FIRST)
    page.clear(token=FIRST)
    check_empty(view_of(slate))
    page.set_lease(Lease(2, 1), token=SECOND)
    page.set_end(b"retry", token=SECOND)
    view = view_of(slate)
    assert (view.lease, view.end()) == (Lease(2, 1), b"retry")
    page.clear(token=SECOND)
    assert list(slate.pages()) == []


def test_the_attempt_reads_what_the_worker_answered(slate: Slate, page: Page) -> None:
    page.begin(FIRST, "task")
    assert (page.acknowledged(), page.confirmed_at()) == (0, None)
    view = view_of(slate)
    view.answer(acknowledged=5, confirmed_at=12.25, cancel=True)
    assert (page.acknowledged(), page.confirmed_at()) == (5, 12.25)
    assert (page.lost(), page.told().cancel) == (False, True)
    view.answer(acknowledged=6, confirmed_at=14.0, lost=True)
    assert (page.acknowledged(), view_of(slate).acknowledged()) == (6, 6)
    assert (page.lost(), page.told().cancel) == (True, False)


def test_an_answer_to_an_earlier_attempt_never_reaches_the_next(slate: Slate, page: Page) -> None:
    page.begin(FIRST, "task")
    late = view_of(slate)
    page.begin(SECOND, "task")
    late.answer(acknowledged=9, confirmed_at=1.0, lost=True, cancel=True)
    assert (page.acknowledged(), page.lost(), page.told().cancel) == (0, False, False)
    view_of(slate).answer(acknowledged=1, confirmed_at=2.0)
    for _ in range(2):  # once for each half
        late.answer(acknowledged=9, confirmed_at=1.0, lost=True)
    assert (page.acknowledged(), page.lost()) == (1, False)


def test_a_view_of_an_earlier_attempt_shows_nothing_of_the_next(slate: Slate, page: Page) -> None:
    page.begin(FIRST, "task")
    fill(page)
    view = view_of(slate)
    page.begin(SECOND, "task")
    fill(page)
    assert view.snapshot() == Snapshot(0, None)
    assert view.end() is None


def test_the_page_of_a_living_process_cannot_be_freed(slate: Slate, page: Page) -> None:
    page.begin(FIRST, "task")
    with pytest.raises(ValueError, match="which lives"):
        view_of(slate).free()
    assert view_of(slate).token == FIRST


def test_a_released_page_can_be_taken_and_its_old_object_does_nothing(slate: Slate) -> None:
    first, second = slate.take_page(), slate.take_page()
    assert first is not None
    assert second is not None
    assert slate.take_page() is None
    first.begin(FIRST, "task")
    fill(first)
    first.release()
    assert list(slate.pages()) == []
    taken = slate.take_page()
    assert taken is not None
    taken.begin(SECOND, "task")
    for late in (first.clear, first.release, lambda: fill(first), lambda: first.begin(FIRST, "x")):
        late()
    check_empty(view_of(slate))
    assert slate.take_page() is None


def test_data_above_the_limits_is_refused_and_changes_nothing(slate: Slate, page: Page) -> None:
    page.begin(FIRST, "task")
    fill(page)
    with pytest.raises(ValueError, match="do not fit"):
        page.write_brief(3, b"x" * 301)
    with pytest.raises(ValueError, match="do not fit"):
        page.write_metadata(3, b"x" * 301)
    with pytest.raises(ValueError, match="do not fit"):
        page.set_end(b"x" * 8_193)
    page.set_end(b"x" * 8_192)
    page.set_end(b"failed")
    check_filled(view_of(slate), FIRST)


@pytest.mark.parametrize("token", ["", "a" * 31, "a" * 33, "é" * 17])
def test_a_token_of_another_length_is_refused(slate: Slate, page: Page, token: str) -> None:
    page.begin(FIRST, "task")
    with pytest.raises(ValueError, match="32 characters"):
        page.begin(token, "task")
    assert view_of(slate).token == FIRST


def test_any_task_id_of_512_characters_fits(slate: Slate, page: Page) -> None:
    for task_id in ("\N{GRINNING FACE}" * 512, "\ud800 lone", "x" * 2_048, ""):
        page.begin(FIRST, task_id)
        assert view_of(slate).task_id == task_id
    with pytest.raises(ValueError, match="2,048 bytes"):
        page.begin(SECOND, "x" * 2_049)
    assert view_of(slate).token == FIRST


def test_a_buffer_writes_its_progress_to_the_page(slate: Slate, page: Page) -> None:
    page.begin(FIRST, "task")
    buffer = ProgressBuffer(limit=250, sink=page)
    buffer.set_progress(40, "x")
    buffer.update_metadata({"last_id": 7})
    assert view_of(slate).snapshot() == buffer.snapshot()


class BusyTask:
    """Reports whenever the worker has read a record, as a task does on another processor."""

    def __init__(self, page: Page, seed: int) -> None:
        self.pace = 0
        self.changes: list[str] = []
        self._page = page
        self._random = random.Random(seed)

    def report(self, kind: str) -> None:
        self.changes.append(kind)
        generation = len(self.changes)
        write = self._page.write_brief if kind == "brief" else self._page.write_metadata
        write(generation, b'{"generation":%d}' % generation)

    def last(self, kind: str) -> int:
        return max(n for n, change in enumerate(self.changes, 1) if change == kind)

    def reading(self, read: Callable[[Record, int], Half]) -> Callable[[Record, int], Half]:
        def read_and_report(record: Record, seed: int) -> Half:
            half = read(record, seed)
            if record.capacity == 300:  # brief and metadata
                for _ in range(self._random.randint(0, self.pace)):
                    self.report(self._random.choice(["brief", "metadata", "metadata"]))
            return half

        return read_and_report


@pytest.mark.parametrize("seed", range(20))
def test_a_snapshot_never_claims_a_change_that_it_lacks(
    slate: Slate, page: Page, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    task = BusyTask(page, seed)
    page.begin(FIRST, "task")
    view = view_of(slate)
    monkeypatch.setattr(Record, "read", task.reading(Record.read))
    for task.pace in (0, 1, 2, 3, 4, 2, 1, 1, 0):
        task.report("brief")
        task.report("metadata")
        before = {kind: task.last(kind) for kind in ("brief", "metadata")}
        snapshot = view.snapshot()
        value = json.loads(snapshot.json or "")
        there = {"brief": value["generation"], "metadata": value["metadata"]["generation"]}
        for generation, kind in enumerate(task.changes[: snapshot.generation], 1):
            assert there[kind] >= generation
        assert all(there[kind] >= before[kind] for kind in before)
        assert snapshot.generation >= min(before.values())
    assert snapshot.generation == len(task.changes)


def image_of(slate: Slate) -> bytes:
    return Path(slate.path).read_bytes()


def put_image(slate: Slate, image: bytes) -> None:
    with open(slate.path, "r+b", buffering=0) as file:
        file.write(image)


def check_first_or_nothing_or_second(slate: Slate) -> None:
    for view in slate.pages():
        if view.token == FIRST:
            check_filled(view, FIRST)
        else:
            assert view.token == SECOND
            check_empty(view)


def test_begin_cut_off_at_any_byte_never_shows_a_mixture(slate: Slate, page: Page) -> None:
    page.begin(FIRST, "task")
    fill(page)
    view_of(slate).answer(acknowledged=2, confirmed_at=1.5, lost=True)
    earlier = view_of(slate)
    filled = image_of(slate)
    images = [filled]

    def begin_second() -> None:
        put_image(slate, filled)
        page.begin(SECOND, "another task")

    for _ in struck_at_every_step(begin_second):
        image = image_of(slate)
        if image != images[-1]:
            images.append(image)
    assert len(images) > 8
    for before, after in pairwise(images):
        torn = bytearray(before)
        for index in (index for index in range(len(torn)) if before[index] != after[index]):
            torn[index] = after[index]
            put_image(slate, bytes(torn))
            check_first_or_nothing_or_second(slate)
            if earlier.snapshot() != Snapshot(0, None):
                check_filled(earlier, FIRST)


def test_begin_can_be_repeated_after_an_exception_struck_it(slate: Slate, page: Page) -> None:
    page.begin(FIRST, "task")
    fill(page)
    for _ in struck_at_every_step(lambda: page.begin(SECOND, "task")):
        check_first_or_nothing_or_second(slate)
        page.begin(SECOND, "task")
        check_empty(view_of(slate))
        fill(page)
        check_filled(view_of(slate), SECOND)
        page.begin(FIRST, "task")
        fill(page)


def test_a_clear_that_was_struck_can_be_repeated(slate: Slate, page: Page) -> None:
    page.begin(FIRST, "task")
    fill(page)
    for _ in struck_at_every_step(page.clear):
        for view in slate.pages():
            check_filled(view, FIRST)
        page.clear()
        assert list(slate.pages()) == []
        page.begin(FIRST, "task")
        fill(page)
    assert list(slate.pages()) == []


def test_a_release_that_was_struck_can_be_repeated(slate: Slate) -> None:
    assert slate.take_page() is not None
    taken = [slate.take_page()]

    def release() -> None:
        page = taken[-1]
        assert page is not None
        page.release()

    for _ in struck_at_every_step(release):
        release()
        taken.append(slate.take_page())
        assert list(slate.pages()) == []
    assert slate.take_page() is not None


def test_a_struck_lease_or_end_leaves_the_one_before(slate: Slate, page: Page) -> None:
    page.begin(FIRST, "task")

    def write_both() -> None:
        page.set_lease(Lease(1, 1))
        page.set_lease(Lease(2, 2))
        page.set_end(b"one")
        page.set_end(b"two")

    write_both()
    for _ in struck_at_every_step(write_both):
        view = view_of(slate)
        assert view.lease in (Lease(1, 1), Lease(2, 2))
        assert view.end() in (b"one", b"two")
