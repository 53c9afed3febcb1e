"""Keeps an example's worker and its folder, for as long as the process lives that started it.

Its arguments are the module of the app and what the folder's name begins with. A line on its
standard input asks for a new worker in place of one that was killed or stopped.

A process of its own, in a session of its own: Ctrl-C in a terminal goes to every process of the
foreground, and a worker that gets it works on until its task is done; and an example that was
killed clears nothing away. So this one waits for the end of its standard input, which comes in
whichever way the example ends, kills the worker with its pool and removes the folder. Nothing of
value is lost: database and messages are the example's own.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

EXAMPLES = Path(__file__).parents[1]
#: Tells the app the folder that holds its messages.
FOLDER_VARIABLE = "EXAMPLE_FOLDER"
#: The worker's log, in the folder.
LOG = "worker.log"
#: Seconds between two looks at the worker, which is the keeper's child and to be reaped.
_LOOK = 0.5


def main() -> None:
    """Tell folder and worker's process id on standard output, as JSON, and wait."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Not SIG_IGN, which the worker would inherit.
        signal.signal(number, lambda *_: None)
    app, name = sys.argv[1:]
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-"))
    try:
        for name in ("waiting", "taken", "control"):
            (folder / name).mkdir()
        wanted = True
        while wanted:
            worker = _start(app, folder)
            try:
                print(json.dumps({"folder": str(folder), "pid": worker.pid}), flush=True)
                wanted = _another_is_wanted(worker)
            finally:
                _kill(worker)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _another_is_wanted(worker: subprocess.Popen[bytes]) -> bool:
    """Wait for a line, which asks for another worker, or for the end of the input."""
    while not select.select([sys.stdin], [], [], _LOOK)[0]:
        worker.poll()
    return bool(sys.stdin.readline())


def _start(app: str, folder: Path) -> subprocess.Popen[bytes]:
    with (folder / LOG).open("ab") as log:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "celery", "-A", app, "worker"),
                *("--pool", "prefork", "--concurrency", "2", "--loglevel", "INFO"),
                # There is no other worker to talk to.
                *("--without-mingle", "--without-gossip"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=EXAMPLES,
            # What a killed process leaves in its temporary folder shall lie in ours.
            env=os.environ | {FOLDER_VARIABLE: str(folder), "TMPDIR": str(folder)},
            start_new_session=True,
        )


def _kill(worker: subprocess.Popen[bytes]) -> None:
    # The whole group: a pool outlives its worker for a moment, and might write to the folder.
    try:
        os.killpg(worker.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    worker.wait()


if __name__ == "__main__":
    main()
