"""Forked children for the tests of the slate: each does one thing and never returns to pytest."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from mmap import mmap


def fork(work: Callable[[], object]) -> int:
    """A child that does the work and exits, with status 1 if it raised."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def wait(pid: int) -> int:
    """Wait for the child's end; its exit status, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def run(work: Callable[[], object]) -> None:
    """Do the work in a child and fail if it fails."""
    assert wait(fork(work)) == 0


def kill(pid: int) -> None:
    """Kill the child and wait for it."""
    os.kill(pid, signal.SIGKILL)
    assert wait(pid) == -signal.SIGKILL


@contextmanager
def running(work: Callable[[], object]) -> Iterator[int]:
    """A child that is killed at the end, if it has not ended by then."""
    pid = fork(work)
    try:
        yield pid
    finally:
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


class Counts:
    """Numbers that children set and their parent reads; what was set outlives a kill."""

    def __init__(self, size: int) -> None:
        # Set by one move of the processor, so never torn; struct would write zeros first.
        self._numbers = memoryview(mmap(-1, size * 8)).cast("Q")

    def __getitem__(self, index: int) -> int:
        return self._numbers[index]

    def __setitem__(self, index: int, number: int) -> None:
        self._numbers[index] = number

    def clear(self) -> None:
        """Set all to 0."""
        for index in range(len(self._numbers)):
            self._numbers[index] = 0


class Signal:
    """Something that happens once, told to any number of processes."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def wait(self) -> None:
        """Block until ``set`` was called in this or another process."""
        os.read(self._read, 1)

    def set(self, waiting: int = 1) -> None:
        """Let that many waiters go on."""
        os.write(self._write, b"x" * waiting)
