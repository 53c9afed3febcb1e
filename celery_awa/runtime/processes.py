"""Runs in the worker and in its pool children, any thread: does a certain process still live?

A process is named by its id and the time it started, so that an id which was given away again
names nobody. No lock stands for a process: closing any descriptor of a file would drop it.
"""

from __future__ import annotations

import os
import subprocess
import zlib

#: The start of a process that lives, but whose start cannot be told: it equals every other.
UNKNOWN = 0

_PROC = os.path.exists("/proc/self/stat")


def started(pid: int) -> int | None:
    """When the process started, in a unit of the system's own; None if it is dead or a zombie.

    Linux tells it in /proc, clock ticks since boot. Elsewhere ``ps`` is asked, which costs
    milliseconds and tells whole seconds; where that fails too, the answer is UNKNOWN for every
    process that takes signals, zombies included.
    """
    if pid <= 0:
        return None
    return _from_proc(pid) if _PROC else _from_ps(pid)


def lives(pid: int, start: int) -> bool:
    """Whether the process that started then still lives."""
    now = started(pid)
    return now is not None and (now == start or UNKNOWN in (now, start))


def _from_proc(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    except OSError:  # out of descriptors, say: that is no proof of death
        return _from_signal(pid)
    # The command's name may hold blanks and brackets: count from behind the last bracket.
    fields = stat.rpartition(b")")[2].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _from_ps(pid: int) -> int | None:
    if _from_signal(pid) is None:
        return None
    command = ["ps", "-o", "stat=", "-o", "lstart=", "-p", str(pid)]
    try:
        answer = subprocess.run(command, capture_output=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return UNKNOWN
    state, _, start = answer.stdout.strip().partition(b" ")
    if answer.returncode or not start:
        return UNKNOWN
    return None if state.startswith(b"Z") else zlib.crc32(start.strip()) or 1


def _from_signal(pid: int) -> int | None:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:  # another user's: it lives
        return UNKNOWN
    return UNKNOWN
