"""Telling whether a process still lives."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

import pytest

from celery_awa.runtime import processes
from celery_awa.runtime.processes import UNKNOWN, lives, started

WAYS = [
    pytest.param(processes._from_proc, id="proc"),
    pytest.param(
        processes._from_ps,
        id="ps",
        marks=pytest.mark.skipif(shutil.which("ps") is None, reason="there is no ps"),
    ),
]


def zombie() -> int:
    """The id of a child that has ended and that nobody has waited for."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return pid


@pytest.mark.parametrize("way", WAYS)
def test_a_living_process_has_a_start_that_stays(way: Callable[[int], int | None]) -> None:
    start = way(os.getpid())
    assert start not in (None, UNKNOWN)
    assert way(os.getpid()) == start


@pytest.mark.parametrize("way", WAYS)
def test_a_zombie_and_a_dead_process_have_no_start(way: Callable[[int], int | None]) -> None:
    pid = zombie()
    assert way(pid) is None
    os.waitpid(pid, 0)
    assert way(pid) is None


def test_a_process_with_another_start_is_another_process() -> None:
    start = started(os.getpid())
    assert start is not None
    assert lives(os.getpid(), start)
    assert not lives(os.getpid(), start + 1)


def test_where_the_start_is_not_known_the_id_decides() -> None:
    assert lives(os.getpid(), UNKNOWN)
    assert not lives(0, UNKNOWN)


def test_without_proc_and_ps_a_signal_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_PROC", False)
    monkeypatch.setenv("PATH", "")
    assert started(os.getpid()) == UNKNOWN
    pid = zombie()
    os.waitpid(pid, 0)
    assert started(pid) is None


def test_being_out_of_descriptors_is_no_proof_of_death(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("builtins.open", refuse)
    assert started(os.getpid()) == UNKNOWN
