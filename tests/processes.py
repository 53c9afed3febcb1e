"""Processes that tests start: each in a session of its own, found and ended by its id.

Linux only: the families are read from /proc.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.waiting import eventually

MARK = "AWA_TEST_FAMILY"


@dataclass(frozen=True)
class Entry:
    """One living process as /proc shows it."""

    pid: int
    parent: int
    session: int


class Process:
    """A started command, its log, and everything that it started in its turn.

    ``account`` is the user and group id to run it as, where that is not our own.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        account: tuple[int, int] | None = None,
    ) -> None:
        self.command = list(command)
        self.log_path = log
        self._mark = f"{MARK}={uuid.uuid4().hex}"
        with log.open("ab") as output:
            self._popen = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**(os.environ if env is None else env), MARK: self._mark[len(MARK) + 1 :]},
                cwd=cwd,
                start_new_session=True,
                **_as(account),
            )
        self.pid = self._popen.pid

    @property
    def returncode(self) -> int | None:
        """The exit status; None while it runs."""
        return self._popen.poll()

    @property
    def running(self) -> bool:
        """Whether the process itself has not ended."""
        return self.returncode is None

    def log(self) -> str:
        """Everything that the process and its family wrote so far."""
        return self.log_path.read_text(errors="replace")

    def wait_for_log(self, pattern: str, *, timeout: float = 10.0) -> re.Match[str]:
        """Wait for a line that matches; fails at once when the process ended without one."""

        def found() -> re.Match[str] | None:
            running = self.running
            match = re.search(pattern, self.log(), re.MULTILINE)
            if match is None and not running:
                raise RuntimeError(
                    f"ended with {self.returncode} before {pattern!r}:\n{self.log()}"
                )
            return match

        try:
            return eventually(found, timeout=timeout, what=f"{pattern!r} in {self.log_path}")
        except AssertionError as late:
            raise AssertionError(f"{late}\n{self.log()[-4000:]}") from None

    def kill(self, sig: int = signal.SIGKILL) -> None:
        """Signal the process alone, not its family; nothing happens when it has ended."""
        self._popen.send_signal(sig)

    def wait(self, timeout: float = 10.0) -> int:
        """Wait for the process itself and return its exit status."""
        eventually(lambda: not self.running, timeout=timeout, what=f"end of {self.command}")
        assert self.returncode is not None
        return self.returncode

    def family(self) -> list[int]:
        """Ids of everything alive that stems from this process, itself included.

        Told by the session, by descent and by a mark in the environment, because each alone
        fails: children may leave the session, lose their parent, or overwrite their environment.
        """
        living = processes()
        found = {
            entry.pid
            for entry in living
            if self.pid in (entry.pid, entry.session) or self._mark in environment(entry.pid)
        }
        grown = True
        while grown:
            young = {entry.pid for entry in living if entry.parent in found} - found
            grown = bool(young)
            found |= young
        return sorted(found - {os.getpid()})

    def end(self, *, timeout: float = 10.0, alone: bool = False) -> None:
        """Kill the process if it still runs, and fail if its family does not follow it.

        Whoever was left is killed all the same. ``alone``: its family need not follow by itself.
        """
        self.kill(signal.SIGKILL)
        self._popen.wait(timeout)
        if alone:
            self._kill_family()
        try:
            eventually(lambda: not self.family(), timeout=timeout, interval=0.05)
        except AssertionError:
            left = {pid: command_line(pid) for pid in self.family()}
            self._kill_family()
            if left:
                raise AssertionError(f"left running by {self.command}: {left}") from None

    def _kill_family(self) -> None:
        for pid in self.family():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        eventually(lambda: not self.family(), what="death of the family")


def _as(account: tuple[int, int] | None) -> dict[str, Any]:
    if account is None:
        return {}
    return {"user": account[0], "group": account[1], "extra_groups": []}


def processes() -> list[Entry]:
    """Every process of the machine that is neither dead nor a zombie."""
    entries = (_entry(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return [entry for entry in entries if entry is not None]


def children(pid: int) -> list[int]:
    """Ids of the direct children, in the order in which they were born."""
    return sorted(entry.pid for entry in processes() if entry.parent == pid)


def command_line(pid: int) -> str:
    """The command line; empty when the process is gone."""
    return _read(pid, "cmdline").replace("\0", " ").strip()


def environment(pid: int) -> list[str]:
    """The environment the process was started with; empty when it is gone or not ours to see."""
    return _read(pid, "environ").split("\0")


def _entry(pid: int) -> Entry | None:
    # The command's name may hold blanks and brackets, so what follows the last bracket counts.
    fields = _read(pid, "stat").rpartition(")")[2].split()
    if not fields or fields[0] in "ZX":
        return None
    return Entry(pid=pid, parent=int(fields[1]), session=int(fields[3]))


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except (OSError, ValueError):
        return ""
