"""``make demo``: it shows what it promises, finds out when it does not, and leaves nothing."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import psycopg
import pytest

from tests.processes import Process
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
FILES = 60
FOUR = ["a.py", "b.py", "c.py", "d.py"]


@pytest.fixture
def folder() -> Iterator[Path]:
    """The demo's temporary folder: one that the server's account may enter, as pytest's is not."""
    made = Path(tempfile.mkdtemp(prefix="awa-test-", dir="/tmp"))
    made.chmod(0o777)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def start_demo(folder: Path, tmp_path: Path) -> Iterator[Callable[[], Process]]:
    """Start the demo on a few files."""
    started: list[Process] = []

    def start() -> Process:
        # Not the server of the session that runs these tests.
        inherited = {k: v for k, v in os.environ.items() if k != "CELERY_AWA_EMBEDDED"}
        process = Process(
            [
                *(sys.executable, str(EXAMPLES / "index_files.py")),
                *("--files", str(FILES), "--pace", "0.05"),
            ],
            log=tmp_path / "demo.log",
            env=inherited | {"TMPDIR": str(folder), "PYTHONPATH": str(ROOT)},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.end(timeout=30)


def test_every_attempt_goes_on_where_the_last_one_came_to(
    start_demo: Callable[[], Process], folder: Path
) -> None:
    demo = start_demo()

    status = demo.wait(90)

    assert status == 0, demo.log()
    begun = [int(n) for n in re.findall(rf"^│ +\d │ +(\d+) of {FILES} │", demo.log(), re.MULTILINE)]
    assert len(begun) == 4
    assert 1 == begun[0] < begun[1] < begun[2] < begun[3] <= FILES
    for ending in ("AdminShutdown", "SIGKILL", "whole worker", "completed"):
        assert ending in demo.log()
    assert f"checked: each of the {FILES} files is in the table once" in demo.log()
    assert not demo.family()
    assert os.listdir(folder) == []


@pytest.mark.parametrize(
    ("number", "moment"),
    [
        (signal.SIGINT, "the server's start"),
        (signal.SIGINT, "attempt 2: process"),
        (signal.SIGTERM, "attempt 1 running"),
    ],
)
def test_an_interrupted_demo_has_left_nothing_when_it_ends(
    start_demo: Callable[[], Process], folder: Path, number: signal.Signals, moment: str
) -> None:
    demo = start_demo()
    if moment == "the server's start":
        eventually(lambda: list(folder.iterdir()), timeout=60, what=moment)
    else:
        demo.wait_for_log(moment, timeout=60)

    # As a terminal does: to the whole foreground.
    os.killpg(demo.pid, number)
    status = demo.wait(30)

    assert status == 128 + number
    assert not demo.family()
    assert os.listdir(folder) == []


def test_a_killed_demo_leaves_nothing_either(
    start_demo: Callable[[], Process], folder: Path
) -> None:
    demo = start_demo()
    demo.wait_for_log("attempt 1 running", timeout=60)
    # Shared memory too lies where it is removed, and not where a killed worker leaves it.
    assert list(folder.glob("index-files-*/celery-awa-*"))

    demo.kill(signal.SIGKILL)

    eventually(lambda: not demo.family(), timeout=30, what="end of worker and server")
    eventually(lambda: not os.listdir(folder), timeout=30, what="removal of their files")


def test_a_demo_that_is_interrupted_while_it_imports_ends_with_one_line(tmp_path: Path) -> None:
    # Some import that takes long.
    (tmp_path / "rich.py").write_text("print('importing', flush=True); import time; time.sleep(60)")
    demo = Process(
        [sys.executable, str(EXAMPLES / "index_files.py")],
        log=tmp_path / "demo.log",
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
    )
    try:
        demo.wait_for_log("importing", timeout=30)
        os.killpg(demo.pid, signal.SIGINT)
        assert demo.wait(30) == 128 + signal.SIGINT
    finally:
        demo.end(timeout=30)
    assert demo.log() == "importing\ninterrupted: ending what was started\n"


@pytest.mark.parametrize("files", ["0", "-1", "2", "all"])
def test_too_few_files_for_its_faults_are_refused(files: str, tmp_path: Path) -> None:
    demo = Process(
        [sys.executable, str(EXAMPLES / "index_files.py"), "--files", files],
        log=tmp_path / "demo.log",
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert demo.wait(30) == 2
    assert f"argument --files: '{files}' is not a number of files from 4 on" in demo.log()


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The demo's package."""
    monkeypatch.syspath_prepend(EXAMPLES)
    import file_index.check
    import file_index.sources
    import file_index.table

    return file_index


@pytest.fixture
def database(
    demo: ModuleType, empty_database_url: str, tmp_path: Path
) -> Iterator[psycopg.Connection]:
    """Four files and their rows, of four attempts that indexed one each."""
    with demo.table.connect(empty_database_url, "test") as connection:
        demo.table.create(connection)
        for number, name in enumerate(FOUR, 1):
            (tmp_path / name).write_text(f"name = {name!r}\n")
            demo.table.note_beginning(connection, number, os.getpid(), number - 1)
            demo.table.put(connection, demo.sources.read_source(tmp_path, name))
        yield connection


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        ("SELECT 1", ""),
        ("UPDATE source_files SET writes = 2 WHERE path = 'b.py'", ""),
        ("UPDATE source_files SET writes = 5 WHERE path = 'b.py'", "4 files were done again"),
        ("DELETE FROM source_files WHERE path = 'b.py'", "3 rows for 4 files"),
        ("UPDATE source_files SET path = 'e.py' WHERE path = 'c.py'", "c.py: the row and the file"),
        ("UPDATE source_files SET sha256 = '' WHERE path = 'b.py'", "b.py: the row and the file"),
        ("UPDATE source_files SET size = size + 1 WHERE path = 'a.py'", "the total of size is 57"),
        ("UPDATE beginnings SET done = done - 2 WHERE number = 3", "a checkpoint that says 0"),
        ("UPDATE beginnings SET done = 0, rows = 0", "attempt 2 began at file 1 of 4"),
        ("DELETE FROM beginnings WHERE number = 4", "the attempts [1, 2, 3], not 1, 2, 3 and 4"),
    ],
)
def test_its_check_finds_what_is_wrong_and_nothing_else(
    demo: ModuleType, database: psycopg.Connection, tmp_path: Path, change: str, finding: str
) -> None:
    database.execute(change)

    found = list(demo.check.faults_found(database, tmp_path, FOUR))

    assert bool(found) == bool(finding), found
    assert finding in "\n".join(found)
