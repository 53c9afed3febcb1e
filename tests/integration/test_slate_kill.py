"""Children that are killed in the midst of writing their pages, by the hundred.

``AWA_TEST_SLATE_KILLS`` sets how many, 240 unless given. Before its end each child is stopped
(SIGSTOP) three times at any point and looked at: a stopped writer leaves the same memory as a
killed one, and costs no new process.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from celery_awa.model import Lease
from celery_awa.runtime.page import Page, PageView
from celery_awa.runtime.slate import Slate
from tests.waiting import eventually

from .slate_children import Counts, fork, running, wait

KILLS = int(os.environ.get("AWA_TEST_SLATE_KILLS", "240"))
STOPS = 3
CHILDREN = 3
#: Values are made beforehand, so that a kill strikes the writing and not the making.
VALUES = 512
BRIEFS = [
    json.dumps({"percent": n % 101, "message": f"{n} " * (1 + n % 9)}).encode()
    for n in range(VALUES)
]
METADATA = [
    json.dumps({"n": n, "fill": f"{n} " * (1 + n * 37 % 500)}).encode() for n in range(VALUES)
]


@pytest.fixture
def slate() -> Iterator[Slate]:
    slate = Slate.create(None, pages=CHILDREN, record_bytes=4_096)
    yield slate
    slate.close(unlink=True)


def token_of(number: int) -> str:
    return f"{number:032x}"


def page_of(path: str) -> Page:
    page = Slate.open(path).take_page()
    assert page is not None
    return page


def report_for_ever(page: Page, written: Counts, index: int) -> None:
    """Even generations are briefs, odd ones metadata; ``written`` is what came back to the task."""
    generation = 1
    while True:
        generation += 1
        page.write_brief(generation, BRIEFS[generation // 2 % VALUES])
        written[index] = generation
        generation += 1
        page.write_metadata(generation, METADATA[generation // 2 % VALUES])
        written[index] = generation


def check_whole(view: PageView) -> int:
    """The snapshot must be two whole values that were there together; returns the generation."""
    snapshot = view.snapshot()
    value = json.loads(snapshot.json or "{}")
    newest_brief = snapshot.generation // 2
    newest_metadata = (snapshot.generation - 1) // 2
    brief = json.loads(BRIEFS[newest_brief % VALUES]) if newest_brief else {}
    if newest_metadata > 0:
        brief["metadata"] = json.loads(METADATA[newest_metadata % VALUES])
    assert value == brief
    return snapshot.generation


def cut_off(
    slate: Slate, kills: int, begun: Counts, work: Callable[[int], None], check: Callable[[], None]
) -> None:
    """Start children, stop them at random points and kill them in the end; check each time."""
    rng = random.Random(kills)
    for _ in range(0, kills, CHILDREN):
        begun.clear()
        children = [fork(lambda index=index: work(index)) for index in range(CHILDREN)]
        try:
            eventually(lambda: all(begun[index] for index in range(CHILDREN)), interval=0.0005)
            for _ in range(STOPS):
                time.sleep(rng.random() / 500)
                stop(children)
                check()
                signal_all(children, signal.SIGCONT)
            time.sleep(rng.random() / 500)
        finally:
            signal_all(children, signal.SIGKILL)
            ends = [wait(pid) for pid in children]
        assert ends == [-signal.SIGKILL] * CHILDREN
        check()
        free_all(slate)


def stop(children: list[int]) -> None:
    signal_all(children, signal.SIGSTOP)
    for pid in children:
        os.waitpid(pid, os.WUNTRACED)


def signal_all(children: list[int], number: int) -> None:
    for pid in children:
        os.kill(pid, number)


def free_all(slate: Slate) -> None:
    for view in slate.pages():
        assert not view.alive()
        view.free()
    assert list(slate.pages()) == []


def test_the_last_report_before_a_kill_is_on_the_page_and_whole(slate: Slate) -> None:
    written = Counts(CHILDREN)

    def work(index: int) -> None:
        page = page_of(slate.path)
        page.begin(token_of(index), str(index))
        report_for_ever(page, written, index)

    def check() -> None:
        views = list(slate.pages())
        assert sorted(view.token for view in views) == [token_of(n) for n in range(CHILDREN)]
        for view in views:
            # A kill may come between the writing and the counting, never the other way about.
            last = written[int(view.task_id)]
            assert check_whole(view) in (last, last + 1)

    cut_off(slate, KILLS, written, work, check)


def test_a_kill_in_the_change_from_one_attempt_to_the_next_mixes_nothing(slate: Slate) -> None:
    begun = Counts(CHILDREN)

    def work(index: int) -> None:
        page = page_of(slate.path)
        for number in range(1, 1 << 32):
            page.begin(token_of(number), str(number))
            begun[index] = number
            page.set_lease(Lease(number, 1))
            page.write_brief(2, b'{"message":"%d"}' % number)
            page.write_metadata(3, b'{"n":%d}' % number)
            page.set_end(b"%d" % number)
            if number % 2:
                page.clear()

    def check() -> None:
        for view in slate.pages():
            assert view.token == token_of(int(view.task_id))
            assert view.lease in (None, Lease(int(view.task_id), 1))
            assert view.end() in (None, view.task_id.encode())
            generation, value = view.generation(), json.loads(view.snapshot().json or "{}")
            assert value == {
                **({"message": view.task_id} if generation >= 2 else {}),
                **({"metadata": {"n": int(view.task_id)}} if generation >= 3 else {}),
            }

    cut_off(slate, KILLS // 3, begun, work, check)


def test_a_snapshot_beside_a_busy_writer_never_claims_a_change_that_it_lacks(slate: Slate) -> None:
    written = Counts(1)

    def work() -> None:
        page = page_of(slate.path)
        page.begin(token_of(1), "task")
        for generation in range(1, 1 << 32, 2):
            page.write_brief(generation, b'{"brief":%d}' % generation)
            page.write_metadata(generation + 1, b'{"n":%d}' % (generation + 1))
            written[0] = generation + 1

    with running(work):
        eventually(lambda: written[0])
        (view,) = slate.pages()
        seen: set[int] = set()

        def look() -> bool:
            confirmed = written[0]
            snapshot = view.snapshot()
            if snapshot.generation:  # else the writer was too busy: no news
                value = json.loads(snapshot.json or "")
                seen.add(snapshot.generation)
                assert snapshot.generation >= confirmed
                # What was read may be ahead of what is claimed, never behind.
                assert value["brief"] >= snapshot.generation - 1
                assert value["metadata"]["n"] >= snapshot.generation - 1
            return len(seen) > 100

        while not look():
            continue
