"""The embedded server that belongs to one process tree: nothing of it outlives its owner."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.integration.embedded_servers import (
    Start,
    answers_for_a_while,
    assert_gone,
    files_in,
    frozen,
    query,
    server_pid,
    socket_folder,
    told,
)
from tests.processes import command_line
from tests.waiting import eventually


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_leaves_no_process_and_no_file_when_its_owner_is_signalled(
    start_user: Start, open_folder: Path, number: signal.Signals
) -> None:
    owner = start_user("embedded:", "wait")
    url = told(owner)
    pid = server_pid(url)
    assert os.listdir(open_folder / "tmp") == [socket_folder(url).name]

    owner.kill(number)
    owner.wait()

    assert_gone(url, pid)
    assert files_in(open_folder) == []


def test_leaves_nothing_when_the_whole_group_of_its_owner_is_killed(
    start_user: Start, open_folder: Path
) -> None:
    owner = start_user("embedded:", "start_descendant")
    url = told(owner)
    pid = server_pid(url)

    os.killpg(owner.pid, signal.SIGKILL)
    owner.wait()

    assert_gone(url, pid)
    assert files_in(open_folder) == []


@pytest.mark.parametrize("then", ["leave", "fail"])
def test_is_gone_by_the_time_its_owner_has_ended_by_itself(
    start_user: Start, open_folder: Path, then: str
) -> None:
    owner = start_user("embedded:", then)
    owner.wait(timeout=60)

    assert not socket_folder(told(owner)).exists()
    assert files_in(open_folder) == []


def test_leaves_nothing_when_its_owner_is_killed_while_it_starts(
    start_user: Start, open_folder: Path
) -> None:
    owner = start_user("embedded:", "wait")
    eventually(lambda: files_in(open_folder), what="the first file")
    owner.kill(signal.SIGKILL)

    eventually(lambda: not files_in(open_folder), timeout=60, what="the last file's removal")
    eventually(lambda: not owner.family(), timeout=60, what="end of the guard")


def test_serves_descendants_and_outlives_them(start_user: Start) -> None:
    owner = start_user("embedded:", "start_descendant")
    told(owner, "descendant")

    urls = [line for line in owner.log().splitlines() if line.startswith("url: ")]
    assert len(urls) == 2
    assert urls[0] == urls[1]
    assert query(told(owner), "SELECT 7") == [7]


def test_is_not_kept_alive_by_a_fork_of_its_owner(start_user: Start) -> None:
    owner = start_user("embedded:", "fork")
    url, fork = told(owner), int(told(owner, "fork"))
    assert told(owner, "fork's url") == url
    pid = server_pid(url)

    owner.kill(signal.SIGKILL)

    assert_gone(url, pid)
    assert command_line(fork)
    os.kill(fork, signal.SIGKILL)


def test_survives_the_end_of_a_fork(start_user: Start) -> None:
    owner = start_user("embedded:", "fork")
    url, fork = told(owner), int(told(owner, "fork"))
    told(owner, "fork's url")

    os.kill(fork, signal.SIGTERM)
    eventually(lambda: not command_line(fork))

    answers_for_a_while(url)


def test_begins_anew_when_its_owner_becomes_another_program(start_user: Start) -> None:
    owner = start_user("embedded:", "become_another")
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


def test_is_one_for_all_threads(start_user: Start, open_folder: Path) -> None:
    user = start_user(f"embedded:{open_folder}/db", "ask_in_threads")
    assert told(user, "threads") == "1"


def test_is_closed_to_other_users_and_to_the_network(start_user: Start) -> None:
    url = told(start_user("embedded:", "wait"))
    assert socket_folder(url).stat().st_mode & 0o777 == 0o700
    assert query(url, "SHOW listen_addresses") == [""]


def test_works_where_the_temporary_folder_has_a_long_path(
    start_user: Start, open_folder: Path
) -> None:
    long = open_folder / ("long" * 30)
    long.mkdir()
    long.chmod(0o777)
    owner = start_user("embedded:", "wait", TMPDIR=str(long))
    url = told(owner)
    assert query(url, "SELECT 7") == [7]
    assert os.listdir(long) == []
