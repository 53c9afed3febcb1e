"""The examples: programs that check themselves, find out when something is wrong, leave nothing."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.processes import Process
from tests.waiting import eventually

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ["import_csv", "django_queryset", "sqlalchemy_select", "paged_api"]

Start = Callable[[Path], Process]


@pytest.fixture
def folder() -> Iterator[Path]:
    """The example's temporary folder: one that the server's account may enter."""
    made = Path(tempfile.mkdtemp(prefix="awa-test-", dir="/tmp"))
    made.chmod(0o777)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def start(folder: Path, tmp_path: Path) -> Iterator[Start]:
    """Start a program with hardly anything in its environment."""
    started: list[Process] = []
    # Which PostgreSQL there is to take is for those to say who run the tests.
    kept = ("CELERY_AWA_POSTGRES_BIN",)
    env = {name: os.environ[name] for name in kept if name in os.environ}

    def start(path: Path) -> Process:
        process = Process(
            [sys.executable, str(path)],
            log=tmp_path / "log",
            env={**env, "TMPDIR": str(folder)},
            cwd=tmp_path,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.end(timeout=30)


@pytest.mark.parametrize("name", NAMES)
def test_an_example_goes_on_after_its_interruption_and_leaves_nothing(
    start: Start, folder: Path, name: str
) -> None:
    example = start(EXAMPLES / f"{name}.py")

    assert example.wait(100) == 0, example.log()
    assert example.log().endswith("\nall is well\n")
    executions = re.findall(r"^execution (\d+), completed", example.log(), re.MULTILINE)
    assert [int(number) > 1 for number in executions] == [True]
    assert not example.family()
    assert os.listdir(folder) == []


@pytest.mark.parametrize(
    ("name", "right", "wrong", "finding"),
    [
        ("import_csv", '%(name)s)", batch', '%(name)s)", batch[1:]', "rows in the table, 5000"),
        ("django_queryset", "price *= 2", "price *= 3", "999 prices of 1000 are wrong"),
        ("sqlalchemy_select", "max_runtime=0.5", "max_runtime=None", "after 1 executions"),
        ("paged_api", "number + 1 < PAGES", "number + 2 < PAGES", "the 475 rows are not"),
    ],
)
def test_an_example_finds_what_is_wrong(
    start: Start, tmp_path: Path, name: str, right: str, wrong: str, finding: str
) -> None:
    text = (EXAMPLES / f"{name}.py").read_text()
    assert text.count(right) == 1
    (tmp_path / f"{name}.py").write_text(text.replace(right, wrong))
    shutil.copytree(EXAMPLES / "example_worker", tmp_path / "example_worker")

    example = start(tmp_path / f"{name}.py")

    assert example.wait(100) == 1, example.log()
    assert re.search(rf"^WRONG: .*{finding}", example.log(), re.MULTILINE), example.log()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_example_that_is_stopped_leaves_nothing(
    start: Start, folder: Path, number: signal.Signals
) -> None:
    example = start(EXAMPLES / "import_csv.py")
    example.wait_for_log("^execution 1, running", timeout=60)

    example.kill(number)

    assert example.wait(30) != 0
    eventually(lambda: not example.family(), timeout=30, what="end of worker and server")
    eventually(lambda: not os.listdir(folder), timeout=30, what="removal of their files")
