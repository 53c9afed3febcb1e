"""What becomes of the slates of workers that were killed as a whole."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from celery_awa.errors import RowLocked, StoreRefused, StoreUnavailable
from celery_awa.model import JobState, Lease, Transition
from celery_awa.progress import ProgressBuffer
from celery_awa.runtime import adoption as adoption_module
from celery_awa.runtime.adoption import Adoption
from celery_awa.runtime.ending import to_page
from celery_awa.runtime.processes import started
from celery_awa.runtime.slate import Slate
from celery_awa.runtime.slate_files import exclusive
from celery_awa.runtime.trouble import Trouble
from tests.fake_store import FakeDatabase, FakeStore, Row
from tests.runtime_parts import SOON, Clock, MakeThread, described, new_token, settings
from tests.waiting import eventually

DATABASE = b"d" * 16
RETRYABLE = Transition(JobState.RETRYABLE, error="boom", run_in=5.0, unsent=True)


def is_forsaken(row: Row) -> bool:
    return row.state is JobState.RUNNING and row.heartbeat_at is None


class Left:
    """The slate of a worker that was killed, and the attempts of its children on it.

    The children are one process, which is killed with the worker unless it is to ``live``.
    """

    def __init__(
        self, folder: Path, attempts: dict[str, dict[str, Any]], *, live: bool = False
    ) -> None:
        reading, writing = os.pipe()
        worker = os.fork()
        if worker == 0:
            with suppress(BaseException):
                os.setsid()
                signal.alarm(60)
                slate = Slate.create(str(folder), 6, 66_560, DATABASE)
                child = os.fork()
                if child == 0:
                    own = Slate.open(slate.path)
                    for task_id, attempt in attempts.items():
                        _put(own, task_id, **attempt)
                    os.write(writing, f"{os.getpid()} {slate.path}".encode())
                signal.pause()
            os._exit(1)
        pid, self.path = os.read(reading, 1_000).decode().split(" ", 1)
        os.close(reading)
        os.close(writing)
        self._child = int(pid)
        if live:
            os.kill(worker, signal.SIGKILL)
        else:
            self.kill()
            os.killpg(worker, signal.SIGKILL)
        os.waitpid(worker, 0)

    @property
    def there(self) -> bool:
        return os.path.exists(self.path)

    def kill(self) -> None:
        """The children, too."""
        with suppress(ProcessLookupError):
            os.kill(self._child, signal.SIGKILL)
        # Another's child: nobody here can wait for its end.
        eventually(lambda: started(self._child) is None)


def _put(
    slate: Slate,
    task_id: str,
    *,
    token: str,
    lease: Lease | None,
    percent: int | None = 40,
    end: bytes | None = None,
) -> None:
    page = slate.take_page()
    assert page is not None
    page.begin(token, task_id)
    if percent is not None:
        ProgressBuffer(sink=page).set_progress(percent)
    page.set_lease(lease)
    if end is not None:
        page.set_end(end)


Leave = Callable[..., Left]


@pytest.fixture
def leave(tmp_path: Path, database: FakeDatabase) -> Iterator[Leave]:
    """Kills a worker with these attempts, by task; they have their rows unless told otherwise."""
    left: list[Left] = []

    def leave_one(*names: str, live: bool = False, **attempts: dict[str, Any]) -> Left:
        made = {}
        for name in (*names, *attempts):
            attempt = {"token": new_token(), **attempts.get(name, {})}
            if "lease" not in attempt:
                claimed = described(attempt["token"], name)
                attempt["lease"] = database.open().claim(claimed).lease
            made[name] = attempt
        left.append(Left(tmp_path, made, live=live))
        return left[-1]

    yield leave_one
    for one in left:
        one.kill()


class Adopting:
    """A worker's adoption over the store in memory."""

    def __init__(self, folder: Path, database: FakeDatabase) -> None:
        self.wakes = 0
        self.store = database.open()
        self.adoption = Adoption(
            DATABASE, settings(slate_dir=str(folder)), Trouble(), self._adopted
        )

    def _adopted(self) -> None:
        self.wakes += 1

    def look(self) -> int:
        return self.adoption.run_once(lambda: self.store)


@pytest.fixture
def adopting(tmp_path: Path, database: FakeDatabase) -> Adopting:
    return Adopting(tmp_path, database)


def test_what_a_killed_worker_left_is_written_and_given_up_and_its_files_go(
    adopting: Adopting, leave: Leave, database: FakeDatabase, tmp_path: Path
) -> None:
    left = leave("one", "two", "three")
    assert left.there
    database.statements.clear()
    assert adopting.look() == 3
    assert all(map(is_forsaken, database.rows.values()))
    assert [row.progress for row in database.rows.values()] == [{"percent": 40}] * 3
    assert adopting.wakes == 1
    assert list(tmp_path.iterdir()) == []
    written = [name for name in database.statements if name != "get_job"]
    assert written == ["heartbeat_with_progress", "forsake"]


def test_without_anything_left_nothing_is_asked_and_nobody_is_woken(
    adopting: Adopting, database: FakeDatabase
) -> None:
    assert adopting.look() == 0
    assert database.statements == []
    assert adopting.wakes == 0


def test_a_slate_that_carries_nothing_is_removed_without_a_word_to_the_database(
    adopting: Adopting, leave: Leave, database: FakeDatabase, tmp_path: Path
) -> None:
    leave()
    assert adopting.look() == 0
    assert list(tmp_path.iterdir()) == []
    assert database.statements == []
    assert adopting.wakes == 0


def test_an_end_that_a_child_could_not_confirm_is_written_first(
    adopting: Adopting, leave: Leave, database: FakeDatabase
) -> None:
    leave("silent", ended={"end": to_page(RETRYABLE)})
    database.statements.clear()
    assert adopting.look() == 2
    assert database.statements[-3:] == ["end", "heartbeat_with_progress", "forsake"]
    ended = database.rows["ended"]
    assert (ended.state, ended.progress, ended.errors, ended.unsent) == (
        JobState.RETRYABLE,
        {"percent": 40},
        ["boom"],
        True,
    )
    assert is_forsaken(database.rows["silent"])


def test_an_end_that_cannot_be_read_is_none(
    adopting: Adopting, leave: Leave, database: FakeDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    left = leave(task={"end": b"\0garbage"})
    assert adopting.look() == 1
    assert is_forsaken(database.rows["task"])
    assert "an end cannot be read" in caplog.text
    assert not left.there


def test_where_nothing_is_new_only_the_lease_is_given_up(
    adopting: Adopting, leave: Leave, database: FakeDatabase
) -> None:
    leave(task={"percent": None})
    database.statements.clear()
    assert adopting.look() == 1
    assert database.statements == ["get_job", "forsake"]


def test_an_attempt_that_had_no_row_leaves_nothing_to_write(
    adopting: Adopting, leave: Leave, database: FakeDatabase
) -> None:
    left = leave(task={"lease": None})
    assert adopting.look() == 1
    assert database.statements == []
    assert not left.there


@pytest.mark.parametrize("change", ["taken over", "ended", "gone", "another job's"])
def test_a_row_that_is_no_longer_the_attempts_is_left_as_it_is(
    adopting: Adopting, leave: Leave, database: FakeDatabase, change: str
) -> None:
    left = leave("task")
    row = database.rows["task"]
    if change == "taken over":
        row.run_lease += 1
    elif change == "ended":
        row.state = JobState.COMPLETED
    else:
        # A database made anew counts from 1 again.
        del database.rows["task"]
    if change == "another job's":
        row = database.rows["another"] = Row(1, "another", "token", "run", 0, 1)
        assert row.lease == Lease(1, 1)
    assert adopting.look() == 1
    assert not left.there
    assert (row.progress, row.heartbeat_at) == (None, 0.0)


def test_a_child_that_outlives_its_worker_is_waited_for(
    adopting: Adopting, leave: Leave, database: FakeDatabase
) -> None:
    left = leave("task", live=True)
    assert adopting.look() == 0
    assert left.there
    assert not is_forsaken(database.rows["task"])
    left.kill()
    eventually(lambda: adopting.look() == 1)
    assert is_forsaken(database.rows["task"])
    assert not left.there


def test_a_slate_with_an_idle_child_that_still_lives_is_not_removed(
    adopting: Adopting, leave: Leave, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have got one more task by then."""
    left = leave(task={"lease": None, "percent": None}, live=True)
    slate = Slate.adopt(left.path, DATABASE)
    assert slate is not None
    (view,) = slate.pages()
    view._records.closed.write(view._seed, 0, b"")
    assert list(slate.pages()) == []
    slate.close()
    adopting.look()
    assert left.there
    left.kill()
    eventually(lambda: adopting.look() is not None and not left.there)


def test_two_at_once_adopt_once(
    adopting: Adopting, leave: Leave, database: FakeDatabase, tmp_path: Path
) -> None:
    left = leave("task")
    other = Adopting(tmp_path, database)
    first = threading.Thread(target=adopting.look)
    with database.hanging():
        first.start()
        database.until(lambda: "get_job" in database.statements)
        # It would hang, too, if it did anything.
        assert other.look() == 0
    first.join(SOON)
    assert not left.there
    assert (adopting.wakes, other.wakes) == (1, 0)
    assert database.count("forsake") == 1


def test_while_a_child_takes_a_page_it_is_not_touched(
    adopting: Adopting, leave: Leave, database: FakeDatabase
) -> None:
    left = leave("task")
    with exclusive(left.path, 1.0):
        assert adopting.look() == 0
    assert left.there
    assert adopting.look() == 1


def test_while_the_database_is_away_nothing_is_lost_and_it_is_due_again(
    adopting: Adopting, leave: Leave, database: FakeDatabase
) -> None:
    left = leave("task", ended={"end": to_page(RETRYABLE)})
    database.raising["forsake"] = StoreUnavailable("cut")
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            adopting.look()
        assert adopting.adoption.due() == 0.0
    assert left.there
    assert adopting.wakes == 0
    database.raising.clear()
    assert adopting.look() == 2
    assert database.rows["ended"].errors == ["boom"]
    assert is_forsaken(database.rows["task"])
    assert not left.there


def test_a_locked_row_keeps_its_page_and_no_other(
    adopting: Adopting, leave: Leave, database: FakeDatabase
) -> None:
    left = leave("one", "locked", "two", locked_end={"end": to_page(RETRYABLE)})
    database.locked.update({"locked", "locked_end"})
    assert adopting.look() == 2
    assert {name for name, row in database.rows.items() if is_forsaken(row)} == {"one", "two"}
    assert left.there
    database.locked.clear()
    assert adopting.look() == 2
    assert is_forsaken(database.rows["locked"])
    assert database.rows["locked_end"].state is JobState.RETRYABLE
    assert not left.there


@pytest.mark.parametrize("error", [RowLocked("locked"), StoreRefused("refused")])
def test_one_lease_that_cannot_be_given_up_keeps_no_other(
    adopting: Adopting,
    leave: Leave,
    database: FakeDatabase,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    leave("one", "two", "three")
    forsake = FakeStore.forsake
    lease = database.rows["two"].lease

    def where_one_fails(store: FakeStore, leases: list[Lease]) -> None:
        if lease in leases:
            raise error
        forsake(store, leases)

    monkeypatch.setattr(FakeStore, "forsake", where_one_fails)
    assert adopting.look() == (2 if isinstance(error, RowLocked) else 3)
    assert [is_forsaken(row) for row in database.rows.values()] == [True, False, True]


def test_one_slate_that_cannot_be_written_does_not_hide_the_others(
    adopting: Adopting, leave: Leave, database: FakeDatabase
) -> None:
    slates = [leave(name) for name in ("a", "b", "c")]
    database.locked.add("b")
    assert adopting.look() == 2
    assert sum(slate.there for slate in slates) == 1
    assert adopting.wakes == 1


def test_it_says_what_it_did(
    adopting: Adopting, leave: Leave, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "celery_awa")
    leave("one", "two")
    adopting.look()
    adopting.look()
    assert [record.getMessage() for record in caplog.records] == [
        "celery-awa adopted what an earlier worker left: 2 attempts"
    ]


def test_it_looks_at_the_start_and_after_every_rescue_interval(
    adopting: Adopting, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, adoption_module)
    assert adopting.adoption.due() == 0.0
    adopting.look()
    assert adopting.adoption.due() == clock.now + 500.0


def test_no_descriptor_and_no_mapping_is_left(
    adopting: Adopting, leave: Leave, database: FakeDatabase
) -> None:
    leave("locked")
    database.locked.add("locked")
    before = len(os.listdir("/proc/self/fd"))
    adopting.look()
    assert len(os.listdir("/proc/self/fd")) == before


def test_on_a_database_thread_it_goes_on_once_the_database_is_back(
    make_thread: MakeThread, leave: Leave, database: FakeDatabase, tmp_path: Path
) -> None:
    left = leave("task")
    thread = make_thread()
    woken = threading.Event()
    thread.add_service(Adoption(DATABASE, settings(slate_dir=str(tmp_path)), Trouble(), woken.set))
    database.go_away()
    thread.look()
    database.until(lambda: database.tries > 1)
    assert left.there
    database.come_back()
    assert woken.wait(SOON)
    assert is_forsaken(database.rows["task"])
    eventually(lambda: not left.there)
