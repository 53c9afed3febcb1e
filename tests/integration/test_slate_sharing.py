"""A slate between real processes: who gets a page, who keeps it, and who may not write it."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import celery_awa.runtime.slate as slate_module
from celery_awa.model import Lease, Snapshot
from celery_awa.runtime.page import Page
from celery_awa.runtime.slate import Slate, SlateUnavailable
from celery_awa.runtime.slate_files import exclusive, orphaned
from tests.waiting import eventually

from .slate_children import Counts, Signal, fork, kill, run, running, wait

ROOT = Path(slate_module.__file__).parents[2]
NOBODY = 65_534
FORKED, SPAWNED = 20, 3
#: Digests of databases.
OURS, ANOTHERS = b"o" * 16, b"a" * 16

SPAWNED_CHILD = """
import os, sys
from celery_awa.runtime.slate import Slate
page = Slate.open(sys.argv[1]).take_page()
page.begin(f"{os.getpid():032d}", "spawned")
page.write_brief(1, b'{"percent":1}')
sys.stdin.read()
"""


@pytest.fixture
def slate() -> Iterator[Slate]:
    slate = Slate.create(None, pages=FORKED + SPAWNED, record_bytes=300)
    yield slate
    slate.close(unlink=True)


@pytest.fixture
def narrow() -> Iterator[Slate]:
    """A slate with a single page."""
    slate = Slate.create(None, pages=1, record_bytes=300, database=OURS)
    yield slate
    slate.close(unlink=True)


def token(number: int = 1) -> str:
    return f"{number:032d}"


def begun(path: str) -> Page:
    """A page of this process that carries an attempt."""
    page = Slate.open(path).take_page()
    assert page is not None
    page.begin(token(os.getpid()), "task")
    return page


def spawn(path: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", SPAWNED_CHILD, path],
        stdin=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )


def test_many_processes_at_once_get_a_page_each_and_the_dead_ones_come_back(slate: Slate) -> None:
    start, end = Signal(), Signal()

    def work() -> None:
        start.wait()
        begun(slate.path)
        end.wait()

    forked = [fork(work) for _ in range(FORKED)]
    spawned = [spawn(slate.path) for _ in range(SPAWNED)]
    try:
        start.set(FORKED)
        pids = {*forked, *(process.pid for process in spawned)}
        eventually(lambda: {view.pid for view in slate.pages()} == pids, timeout=30)
        assert {view.token for view in slate.pages()} == {token(pid) for pid in pids}
        assert all(view.alive() for view in slate.pages())
        run(lambda: _expect_no_page(slate.path))
    finally:
        for pid in forked:
            kill(pid)
        for process in spawned:
            process.kill()
            process.communicate()
    # Nobody takes a dead child's attempt away; the worker alone lets go of it.
    run(lambda: _expect_no_page(slate.path))
    for view in slate.pages():
        assert not view.alive()
        view.free()
    run(lambda: _expect_pages(slate.path, FORKED + SPAWNED))


def _expect_no_page(path: str) -> None:
    assert Slate.open(path).take_page() is None


def _expect_pages(path: str, count: int) -> None:
    slate = Slate.open(path)
    taken = [slate.take_page() for _ in range(count + 1)]
    assert taken.index(None) == count


def test_a_page_is_never_given_to_two_processes() -> None:
    slate = Slate.create(None, pages=120, record_bytes=300)
    start, done, end, taken = Signal(), Signal(), Signal(), Counts(4)

    def work(index: int) -> None:
        own = Slate.open(slate.path)
        start.wait()
        while own.take_page() is not None:
            taken[index] += 1
        done.set()
        end.wait()  # with its death its pages would come back

    children = [fork(lambda index=index: work(index)) for index in range(4)]
    start.set(4)
    for _ in children:
        done.wait()
    end.set(4)
    assert [wait(pid) for pid in children] == [0] * 4
    slate.close(unlink=True)
    assert sum(taken[index] for index in range(4)) == 120


def test_pages_that_carry_nothing_come_back_with_the_death_of_their_process(narrow: Slate) -> None:
    def idle() -> None:
        begun(narrow.path).clear()

    for _ in range(3):
        run(idle)
    run(lambda: _expect_pages(narrow.path, 1))


def test_a_zombie_is_dead(narrow: Slate) -> None:
    pid = fork(lambda: begun(narrow.path))
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    (view,) = narrow.pages()
    assert not view.alive()
    view.free()
    wait(pid)


def test_a_live_child_keeps_its_page_whatever_else_opens_and_closes_the_file(narrow: Slate) -> None:
    opened, go_on, written = Signal(), Signal(), Signal()

    def work() -> None:
        page = begun(narrow.path)
        for path in (narrow.path, f"{narrow.path}.lock"):
            for _ in range(3):
                open(path, "rb").close()
                os.close(os.open(path, os.O_RDWR))
        Slate.open(narrow.path).close()
        look_for_orphans()
        opened.set()
        go_on.wait()
        page.write_brief(5, b'{"percent":5}')
        written.set()
        go_on.wait()

    def look_for_orphans() -> None:
        """As every worker does from time to time, the owner too."""
        for database in (OURS, ANOTHERS):
            assert narrow.path not in orphaned(str(Path(narrow.path).parent), database)
            assert Slate.adopt(narrow.path, database) is None

    with running(work) as pid:
        opened.wait()
        look_for_orphans()
        run(look_for_orphans)
        run(lambda: _expect_no_page(narrow.path))
        (view,) = narrow.pages()
        assert (view.pid, view.alive()) == (pid, True)
        go_on.set()
        written.wait()
        assert view.snapshot() == Snapshot(5, '{"percent":5}')


def test_a_process_forked_by_a_task_changes_nothing(narrow: Slate) -> None:
    def meddle(slate: Slate, page: Page) -> None:
        page.write_brief(9, b'{"percent":9}')
        page.write_metadata(10, b'{"a":1}')
        page.set_lease(Lease(9, 9))
        page.set_end(b"end")
        page.begin(token(9), "other")
        page.clear()
        page.release()
        assert (page.acknowledged(), page.lost(), page.told().cancel) == (0, False, False)
        assert slate.take_page() is None
        with pytest.raises(SlateUnavailable, match="not the parent"):
            Slate.open(slate.path)
        slate.close(unlink=True)

    def work() -> None:
        slate = Slate.open(narrow.path)
        page = slate.take_page()
        assert page is not None
        page.begin(token(), "task")
        page.write_brief(1, b'{"percent":1}')
        run(lambda: meddle(slate, page))
        page.write_metadata(2, b'{"last_id":7}')

    run(work)
    (view,) = narrow.pages()
    assert (view.token, view.lease, view.end()) == (token(), None, None)
    assert view.snapshot() == Snapshot(2, '{"percent":1,"metadata":{"last_id":7}}')
    assert os.path.exists(narrow.path)


def test_a_child_that_inherits_the_owners_object_opens_anew_and_leaves_the_file(
    narrow: Slate,
) -> None:
    def work() -> None:
        assert narrow.take_page() is None
        begun(narrow.path)
        narrow.close(unlink=True)

    run(work)
    (view,) = narrow.pages()
    assert view.task_id == "task"
    assert os.path.exists(narrow.path)
    assert os.path.exists(f"{narrow.path}.lock")


def test_a_process_forked_while_a_page_is_taken_does_not_keep_the_others_out(
    narrow: Slate,
) -> None:
    end = Signal()
    with exclusive(narrow.path, 1.0):
        forked = fork(end.wait)
    try:
        run(lambda: _expect_pages(narrow.path, 1))
    finally:
        end.set()
        assert wait(forked) == 0


def test_a_full_file_system_is_noticed_when_the_slate_is_made(tmp_path: Path) -> None:
    def work() -> None:
        # The kernel refuses, as on a file system without room: no file may grow beyond this.
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, 64 << 10))
        with pytest.raises(SlateUnavailable, match="File too large"):
            Slate.create(str(tmp_path), pages=8, record_bytes=66_560)

    run(work)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_a_full_tmpfs_is_noticed_when_the_slate_is_made(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let us mount")
    try:
        with pytest.raises(SlateUnavailable, match="No space left"):
            Slate.create(str(tmp_path), pages=8, record_bytes=66_560)
        assert list(tmp_path.iterdir()) == []
        slate = Slate.create(str(tmp_path), pages=2, record_bytes=66_560)
        slate.close(unlink=True)
        remount = ["mount", "-o", "remount,ro", str(tmp_path)]
        subprocess.run(remount, capture_output=True, check=True)
        with pytest.raises(SlateUnavailable, match="Read-only file system"):
            Slate.create(str(tmp_path), pages=1, record_bytes=300)
    finally:
        subprocess.run(["umount", str(tmp_path)], capture_output=True, check=True)


def test_a_folder_that_may_not_be_written_is_refused_with_the_reason() -> None:
    # Not tmp_path: its parents are closed to other users.
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o555)

        def work() -> None:
            if os.geteuid() == 0:
                os.setegid(NOBODY)
                os.seteuid(NOBODY)
            with pytest.raises(SlateUnavailable, match="Permission denied"):
                Slate.create(folder, pages=1, record_bytes=300)

        run(work)
