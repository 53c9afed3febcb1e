"""One run of an example: its worker, what it plays with that, and what it says in the end."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import celery_awa

from .worker import Worker, started_worker

#: Seconds after which it is given up, and between two looks.
PATIENCE, LOOK = 60.0, 0.05
#: Lines of the worker's log that are shown if something is wrong.
LOG_LINES = 60


def main(module: str, play: Callable[[Worker], Iterable[str]]) -> NoReturn:
    """Start a worker of the app in this module, ``play``, and exit with 1 if something is wrong.

    ``play`` gives a line for each thing that is not as it should be.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    sys.stdout.reconfigure(line_buffering=True)
    with started_worker(module, module.replace("_", "-")) as worker:
        try:
            wrong = list(play(worker))
        except TimeoutError as exc:
            wrong = [str(exc)]
        for line in wrong:
            print(f"WRONG: {line}")
        if wrong:
            print(f"the end of the worker's log:\n{worker.log(LOG_LINES)}")
    print("something is wrong" if wrong else "all is well")
    sys.exit(1 if wrong else 0)


def wait_for(what: str, condition: Callable[[], Any]) -> Any:
    """Look until it is true, and answer it; TimeoutError after a minute."""
    deadline = time.monotonic() + PATIENCE
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {PATIENCE:.0f} s")
        time.sleep(LOOK)
    return found


def wait_for_percent(client: celery_awa.Client, task_id: str, percent: int) -> Any:
    """The job, once it is so far; shows how far it is meanwhile."""
    return _watch(client, task_id, lambda job: (job.percent or 0) >= percent)


def wait_for_end(client: celery_awa.Client, task_id: str) -> Any:
    """The job, once it is finished; shows how far it is meanwhile."""
    return _watch(client, task_id, lambda job: job.state.finished)


def _watch(client: celery_awa.Client, task_id: str, enough: Callable[[Any], bool]) -> Any:
    shown = None

    def seen() -> Any:
        nonlocal shown
        job = client.get_job(task_id)
        if job is None:
            return None
        # A success clears the progress.
        percent = 100 if job.state == "completed" else job.percent or 0
        if (now := (job.run_lease, job.state, percent // 20)) != shown:
            shown = now
            print(f"execution {job.run_lease}, {job.state!s:9} {percent:3} %")
        return job if enough(job) else None

    return wait_for("enough of the task", seen)
