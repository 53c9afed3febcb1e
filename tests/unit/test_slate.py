"""Making, opening and removing a slate, and taking its pages."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import tempfile
from contextlib import suppress
from mmap import mmap
from pathlib import Path

import pytest

from celery_awa.errors import AwaError
from celery_awa.runtime import slate as slate_module
from celery_awa.runtime import slate_files
from celery_awa.runtime.slate import Slate, SlateUnavailable
from celery_awa.runtime.slate_layout import NOBODYS, Header, Layout


def create(folder: Path, pages: int = 2) -> Slate:
    return Slate.create(str(folder), pages=pages, record_bytes=300)


def test_a_slate_is_a_private_file_with_a_lock_file_that_both_go_with_it(tmp_path: Path) -> None:
    slate = create(tmp_path)
    files = sorted(tmp_path.iterdir())
    assert [str(file) for file in files] == [slate.path, f"{slate.path}.lock"]
    assert all(file.name.startswith("celery-awa-") for file in files)
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert slate.take_page() is not None
    slate.close(unlink=True)
    assert list(tmp_path.iterdir()) == []


def test_closing_without_unlink_leaves_the_files(tmp_path: Path) -> None:
    create(tmp_path).close()
    assert len(list(tmp_path.iterdir())) == 2


def test_two_slates_in_one_folder_have_names_of_their_own(tmp_path: Path) -> None:
    create(tmp_path)
    create(tmp_path)
    assert len(list(tmp_path.iterdir())) == 4


def test_nothing_but_the_mapping_keeps_the_file_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    slate = create(tmp_path)
    page = slate.take_page()
    assert page is not None
    # One duplicate belongs to the mapping.
    assert len(os.listdir("/proc/self/fd")) == before + 1
    slate.close(unlink=True)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("fault", [None, AttributeError(), OSError(errno.EOPNOTSUPP, "cannot")])
def test_the_file_has_all_its_memory_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception | None
) -> None:
    def refuse(*_: object) -> None:
        assert fault is not None
        raise fault

    if fault is not None:
        monkeypatch.setattr(os, "posix_fallocate", refuse)
    slate = Slate.create(str(tmp_path), pages=9, record_bytes=66_560)
    with open(slate.path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        assert size > 9 * 4 * 66_560
        assert os.fstat(file.fileno()).st_blocks * 512 >= size
    slate.close(unlink=True)


def test_the_folder_that_was_named_is_the_only_one_tried(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(
        SlateUnavailable, match=r"^cannot make the slate in .*missing: No such file or directory$"
    ) as caught:
        create(missing)
    assert isinstance(caught.value, AwaError)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(SlateUnavailable, match="Not a directory"):
        create(file)


def test_a_failed_allocation_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(SlateUnavailable, match=r"^no room for [\d,]+ bytes .*: No space left"):
        create(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_without_a_folder_shared_memory_is_tried_first_and_then_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, temporary = tmp_path / "shm", tmp_path / "tmp"
    shared.mkdir()
    temporary.mkdir()
    monkeypatch.setattr(slate_files, "SHARED_MEMORY", str(shared))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    slate = Slate.create(None, pages=1, record_bytes=300)
    assert Path(slate.path).parent == shared
    slate.close(unlink=True)
    shared.rmdir()
    slate = Slate.create(None, pages=1, record_bytes=300)
    assert Path(slate.path).parent == temporary
    slate.close(unlink=True)
    temporary.rmdir()
    with pytest.raises(SlateUnavailable, match=r"tmp: .*No such file"):
        Slate.create(None, pages=1, record_bytes=300)


def test_shared_memory_that_refuses_is_no_reason_to_give_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = slate_files.make

    def full_shared_memory(folder: str, layout: Layout, database: bytes) -> tuple[str, mmap]:
        if folder == "/dev":
            raise OSError(errno.ENOSPC, "full")
        return make(folder, layout, database)

    monkeypatch.setattr(slate_files, "SHARED_MEMORY", "/dev")
    monkeypatch.setattr(slate_files, "make", full_shared_memory)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    slate = Slate.create(None, pages=1, record_bytes=300)
    assert Path(slate.path).parent == tmp_path
    slate.close(unlink=True)


def flip(path: str, at: int, byte: int = 0xFF) -> None:
    with open(path, "r+b", buffering=0) as file:
        file.seek(at)
        old = file.read(1)[0]
        file.seek(at)
        file.write(bytes([old ^ byte]))


@pytest.mark.parametrize(
    ("at", "reason"),
    [(0, "this is no slate"), (8, "version 253, this is version 2"), (12, "header is damaged")],
)
def test_a_file_that_is_no_slate_of_this_version_is_refused(
    tmp_path: Path, at: int, reason: str
) -> None:
    slate = create(tmp_path)
    flip(slate.path, at)
    with pytest.raises(SlateUnavailable, match=reason):
        Slate.open(slate.path)


@pytest.mark.parametrize("size", [0, 10, 4_096, 5_000])
def test_a_file_that_was_cut_is_refused(tmp_path: Path, size: int) -> None:
    slate = create(tmp_path)
    os.truncate(slate.path, size)
    with pytest.raises(SlateUnavailable, match=r"no slate|bytes instead of"):
        Slate.open(slate.path)


def test_a_file_that_is_not_there_or_a_link_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SlateUnavailable, match="No such file"):
        Slate.open(str(tmp_path / "none"))
    slate = create(tmp_path)
    link = tmp_path / "link"
    link.symlink_to(slate.path)
    with pytest.raises(SlateUnavailable, match="symbolic"):
        Slate.open(str(link))


def test_a_process_that_is_no_child_of_the_owner_is_refused(tmp_path: Path) -> None:
    slate = create(tmp_path)
    with pytest.raises(SlateUnavailable, match=f"process {os.getpid()}, which is not the parent"):
        Slate.open(slate.path)


def test_a_page_is_not_waited_for_longer_than_a_second_and_one_warning_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(slate_module, "_LOCK_TIMEOUT", 0.02)
    slate = create(tmp_path)
    with open(f"{slate.path}.lock", "rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert slate.take_page() is None
        assert slate.take_page() is None
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "stayed locked" in caplog.text
    assert slate.take_page() is not None


def test_without_the_lock_file_there_is_no_page(tmp_path: Path) -> None:
    slate = create(tmp_path)
    os.unlink(f"{slate.path}.lock")
    assert slate.take_page() is None
    assert [str(file) for file in tmp_path.iterdir()] == [slate.path]


def test_the_pages_of_a_closed_slate_can_still_be_called(tmp_path: Path) -> None:
    slate = create(tmp_path)
    page = slate.take_page()
    assert page is not None
    page.begin("a" * 32, "task")
    slate.close(unlink=True)
    page.write_brief(1, b"{}")
    page.clear()
    page.begin("b" * 32, "task")
    assert (page.acknowledged(), page.lost()) == (0, False)
    assert list(slate.pages()) == []


# Slates of dead workers.

OURS, ANOTHERS = b"o" * 16, b"a" * 16


def left_behind(folder: Path, database: bytes = OURS) -> str:
    """The path of a slate whose worker has died."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            slate = Slate.create(str(folder), 2, 300, database)
            os.write(writing, slate.path.encode())
        os._exit(0)
    os.waitpid(pid, 0)
    path = os.read(reading, 1_000).decode()
    os.close(reading)
    os.close(writing)
    assert os.path.exists(path)
    return path


def orphans(folder: Path) -> list[str]:
    return list(slate_files.orphaned(str(folder), OURS))


def test_a_slate_names_its_database_by_sixteen_bytes(tmp_path: Path) -> None:
    slate = Slate.create(str(tmp_path), 2, 300, OURS)
    with open(slate.path, "rb") as file:
        data = file.read(4_096)
    header = Header.unpacked(data, os.path.getsize(slate.path))
    assert (header.database, header.owner, header.layout) == (OURS, os.getpid(), Layout(2, 300))
    assert slate.adoptable
    assert not create(tmp_path).adoptable


def test_the_slate_of_a_dead_worker_is_found_and_taken(tmp_path: Path) -> None:
    path = left_behind(tmp_path)
    assert orphans(tmp_path) == [path]
    slate = Slate.adopt(path, OURS)
    assert slate is not None
    assert not slate.in_use()
    slate.close(unlink=True)
    assert list(tmp_path.iterdir()) == []


def test_the_slate_of_a_living_worker_is_left_alone(tmp_path: Path) -> None:
    slate = Slate.create(str(tmp_path), 2, 300, OURS)
    assert orphans(tmp_path) == []
    assert Slate.adopt(slate.path, OURS) is None


def test_the_slate_of_a_process_that_got_its_workers_number_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process is named by its start as well."""
    with monkeypatch.context() as patched:
        patched.setattr(slate_files, "started", lambda pid: 12_345)
        slate = Slate.create(str(tmp_path), 2, 300, OURS)
    assert orphans(tmp_path) == [slate.path]


def test_what_is_none_of_ours_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_behind(tmp_path, ANOTHERS)
    left_behind(tmp_path, NOBODYS)
    for at in (0, 8, 12, 40):  # no slate, another version, a damaged header
        flip(left_behind(tmp_path), at)
    os.truncate(left_behind(tmp_path), 5_000)
    (tmp_path / "celery-awa-folder").mkdir()
    (tmp_path / "celery-awa-empty").touch()
    (tmp_path / "celery-awa-link").symlink_to(left_behind(tmp_path))
    os.mkfifo(tmp_path / "celery-awa-pipe")
    path = left_behind(tmp_path)
    os.rename(path, tmp_path / "another-name")
    before = sorted(tmp_path.iterdir())
    # The one that the link leads to.
    (only,) = orphans(tmp_path)
    assert not os.path.islink(only)
    assert sorted(tmp_path.iterdir()) == before
    assert list(slate_files.orphaned(str(tmp_path), NOBODYS)) == []
    monkeypatch.setattr(os, "geteuid", lambda: 4_321)
    assert orphans(tmp_path) == []
    assert Slate.adopt(only, OURS) is None


def test_a_folder_that_is_not_there_holds_none(tmp_path: Path) -> None:
    assert orphans(tmp_path / "missing") == []


def test_without_a_folder_all_are_looked_at_in_which_a_slate_may_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, temporary = tmp_path / "shm", tmp_path / "tmp"
    for folder in (shared, temporary):
        folder.mkdir()
    monkeypatch.setattr(slate_files, "SHARED_MEMORY", str(shared))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    paths = [left_behind(shared), left_behind(temporary)]
    assert list(slate_files.orphaned(None, OURS)) == paths


def test_finding_leaves_no_descriptor_open(tmp_path: Path) -> None:
    path = left_behind(tmp_path)
    flip(left_behind(tmp_path), 0)
    before = len(os.listdir("/proc/self/fd"))
    assert orphans(tmp_path) == [path]
    assert Slate.adopt(path, ANOTHERS) is None
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_slate_is_in_use_while_a_process_lives_that_took_a_page(tmp_path: Path) -> None:
    slate = Slate.create(str(tmp_path), 2, 300, OURS)
    assert not slate.in_use()
    page = slate.take_page()
    assert page is not None
    assert slate.in_use()
    page.release()
    assert not slate.in_use()
