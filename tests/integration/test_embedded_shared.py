"""The embedded server of a folder: one for all who name it, stopped with the last of them."""

from __future__ import annotations

import os
import random
import shutil
import signal
from pathlib import Path

import pytest

from tests.integration.embedded_servers import (
    Start,
    answers_for_a_while,
    assert_gone,
    files_in,
    frozen,
    locks,
    query,
    server_pid,
    told,
)
from tests.processes import Process, command_line
from tests.waiting import eventually


def test_stops_with_the_last_of_its_users_and_keeps_its_data(
    start_user: Start, open_folder: Path
) -> None:
    where = f"embedded:{open_folder}/db"
    users = [start_user(where, "wait") for _ in range(3)]
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
    assert files_in(open_folder) == []
    assert query(told(start_user(where, "wait")), "SELECT n FROM kept") == [7]


def test_starts_and_stops_at_random_times_never_meet(start_user: Start, open_folder: Path) -> None:
    where = f"embedded:{open_folder}/db"
    dice = random.Random(7)
    running: list[Process] = []
    rows = 0
    for turn in range(16):
        users = [start_user(where, "wait") for _ in range(dice.choice([1, 1, 2]))]
        for user in users:
            query(told(user), "CREATE TABLE IF NOT EXISTS turns (n int)")
            query(told(user), f"INSERT INTO turns VALUES ({turn})")
            rows += 1
        running += users
        # Often to the last one, so that the next start meets a stop that has begun.
        for _ in range(dice.randint(1, len(running))):
            running.pop(0).kill(dice.choice([signal.SIGKILL, signal.SIGTERM]))
    last = told(start_user(where, "wait"))
    assert query(last, "SELECT count(*) FROM turns") == [rows]


def test_a_user_who_comes_while_it_stops_gets_the_next_one(
    start_user: Start, open_folder: Path
) -> None:
    where = f"embedded:{open_folder}/db"
    first = start_user(where, "wait")
    pid = server_pid(told(first))
    lock = (open_folder / "db" / "users.lock").stat().st_ino
    with frozen(pid):
        first.kill(signal.SIGKILL)
        eventually(lambda: locks(lock, "FLOCK ADVISORY WRITE"), what="the guard's turn")
        second = start_user(where, "wait")
        eventually(lambda: locks(lock, "-> FLOCK ADVISORY READ"), what="the newcomer's wait")

    url = told(second)
    assert server_pid(url) != pid
    answers_for_a_while(url)


def test_goes_on_without_its_guard_and_still_stops_with_the_last_user(
    start_user: Start, open_folder: Path
) -> None:
    where = f"embedded:{open_folder}/db"
    first = start_user(where, "wait")
    url = told(first)
    pid = server_pid(url)
    (guard,) = [p for p in first.family() if "embedded_guard" in command_line(p)]
    os.kill(guard, signal.SIGKILL)
    eventually(lambda: not command_line(guard))

    second = start_user(where, "wait")

    assert told(second) == url
    assert server_pid(url) == pid
    second.kill(signal.SIGKILL)
    answers_for_a_while(url)
    first.kill(signal.SIGKILL)
    assert_gone(url, pid)


def test_says_that_its_server_was_ended_by_somebody_else(
    start_user: Start, open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = f"embedded:{open_folder}/db"
    pid = server_pid(told(start_user(where, "wait")))
    os.kill(pid, signal.SIGINT)
    eventually(lambda: not command_line(pid))

    message = told(start_user(where, "wait"), "error")

    assert f"the server of embedded:{open_folder}/db has ended" in message
    assert "start again" in message


def test_ends_though_somebody_removed_its_folder(start_user: Start, open_folder: Path) -> None:
    user = start_user(f"embedded:{open_folder}/db", "wait")
    url = told(user)
    pid = server_pid(url)
    shutil.rmtree(open_folder / "db")

    user.kill(signal.SIGKILL)

    assert_gone(url, pid)


def test_does_not_take_an_interrupted_preparation_for_data(
    start_user: Start, open_folder: Path
) -> None:
    half = open_folder / "db" / "data.new"
    half.mkdir(parents=True)
    (half / "PG_VERSION").write_text("15\n")
    assert query(told(start_user(f"embedded:{open_folder}/db", "wait")), "SELECT 7") == [7]
    assert not half.exists()


def test_names_the_version_of_data_that_these_programs_cannot_read(
    start_user: Start, open_folder: Path
) -> None:
    where = f"embedded:{open_folder}/db"
    start_user(where, "leave").wait(timeout=60)
    eventually(lambda: not files_in(open_folder), timeout=30)
    (open_folder / "db" / "data" / "PG_VERSION").write_text("9.6\n")

    message = told(start_user(where, "wait"), "error")

    assert "incompatible" in message
    assert "9.6" in message
    assert files_in(open_folder) == []


def test_says_that_a_folder_cannot_be_made(start_user: Start) -> None:
    message = told(start_user("embedded:/proc/no/such", "wait"), "error")
    assert message.startswith("the folder /proc/no/such cannot be used:")
