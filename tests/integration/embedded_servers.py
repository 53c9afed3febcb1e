"""What tests ask of an embedded server and of the processes that use it."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psycopg

import celery_awa.store
from tests.processes import Process, command_line
from tests.waiting import eventually

USER = Path(__file__).with_name("embedded_user.py")

Start = Callable[..., Process]


def told(process: Process, name: str = "url") -> str:
    """What the process said under this name; waits for it."""
    return process.wait_for_log(rf"^{name}: (.*)$", timeout=60)[1]


def socket_folder(url: str) -> Path:
    """The folder that a server uses while it runs."""
    return Path(parse_qs(urlsplit(url).query)["host"][0])


def server_pid(url: str) -> int:
    """The process id of a running server."""
    (data,) = query(url, "SHOW data_directory")
    return int((Path(data) / "postmaster.pid").read_text().splitlines()[0])


def query(url: str, text: str) -> list[Any]:
    """The first column of a statement's answer."""
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
    """The server ends, and its folder goes away."""
    eventually(lambda: not command_line(pid), timeout=30, what="end of the server")
    eventually(lambda: not socket_folder(url).exists(), timeout=30, what="its folder's removal")


def files_in(open_folder: Path) -> list[str]:
    """Temporary files of the processes and of their servers."""
    return os.listdir(open_folder / "tmp")


def part_of_the_package(open_folder: Path) -> Path:
    """What an embedded server needs of the package, where everybody may read it.

    Without Celery, which would take longer to import than the server takes to start.
    """
    source = Path(celery_awa.store.__file__).parents[1]
    part = open_folder / "part"
    (part / "celery_awa" / "store").mkdir(parents=True)
    for name in ("__init__.py", "store/__init__.py"):
        (part / "celery_awa" / name).touch()
    shutil.copy(source / "errors.py", part / "celery_awa")
    for module in (source / "store").glob("embedded*.py"):
        shutil.copy(module, part / "celery_awa" / "store")
    shutil.copy(USER, part)
    for path in (part, *part.rglob("*")):
        path.chmod(0o755)
    return part
