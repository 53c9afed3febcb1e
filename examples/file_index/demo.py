"""The demo from its options to its report; ``examples/index_files.py`` starts it."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

import celery_awa
from example_worker.server import started_server
from example_worker.worker import Worker, started_worker

from . import check, sources, table
from .faults import LEAST_FILES, Faults
from .view import Bar, Job, Lines, table_of, view_for

#: Seconds that the waits stand for in place of heavier work, all files together.
WORK = 65.0
#: Seconds on top of that after which the demo is given up.
PATIENCE = 120.0
#: Seconds between two looks at the job.
LOOK = 0.1
#: Lines of the worker's log that are shown if something went wrong.
LOG_LINES = 40

console = Console()


class Failed(Exception):
    """The demo did not come to its end; the message says why."""


def main(description: str) -> int:
    options = _options(description)
    root = sources.standard_library()
    files = sources.list_sources(root)[: options.files]
    pace = WORK / len(files) if options.pace is None else options.pace
    _say(f"{len(files):,} source files below {root}")
    _say(f"each one waits {pace * 1000:.0f} ms, in place of heavier work")
    url = started_server()
    with (
        table.connect(url, "index_files") as database,
        started_worker("file_index.app", "index-files") as worker,
    ):
        table.create(database)
        try:
            wrong = _demonstrate(database, worker, root, files, pace)
        except Failed as exc:
            wrong = [str(exc)]
        for line in wrong:
            _say(f"WRONG: {line}")
        if wrong:
            _say(f"the end of the worker's log:\n{worker.log(LOG_LINES)}")
    return 1 if wrong else 0


def _options(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--files", type=_files, help="how many files; default: all")
    parser.add_argument("--pace", type=_pace, help=f"seconds a file; default: {WORK:.0f} in all")
    return parser.parse_args()


def _files(text: str) -> int:
    if not text.isdecimal() or int(text) < LEAST_FILES:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of files from {LEAST_FILES} on, one for each attempt"
        )
    return int(text)


def _pace(text: str) -> float:
    try:
        pace = float(text)
    except ValueError:
        pace = -1.0
    if not 0 <= pace <= WORK:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 to {WORK:g}")
    return pace


def _say(text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _demonstrate(
    database: table.Database, worker: Worker, root: Path, files: Sequence[str], pace: float
) -> list[str]:
    """Run the task, show it, and tell what is wrong at the end."""
    from .app import app, index_files  # takes the database from the environment

    task_id = index_files.delay(str(root), len(files), pace).id
    faults = Faults(database, worker, len(files))
    with celery_awa.Client(app) as client, view_for(console) as view:
        deadline = time.monotonic() + pace * len(files) + PATIENCE
        while not (job := _look(client, task_id, view)):
            if struck := faults.strike_if_due():
                view.say(struck)
            if not worker.running():
                raise Failed("the worker ended")
            if time.monotonic() > deadline:
                raise Failed("the task did not end in time")
            time.sleep(LOOK)
    return _report(database, root, files, job, faults)


def _look(client: celery_awa.Client, task_id: str, view: Bar | Lines) -> Job | None:
    """Show the job; answers it once it is finished."""
    job = client.get_job(task_id)
    if job is None:
        return None
    view.show(job)
    return job if job.state.finished else None


def _report(
    database: table.Database, root: Path, files: Sequence[str], job: Job, faults: Faults
) -> list[str]:
    begun = table.beginnings(database)
    raised = {error.attempt: error.error.splitlines()[0] for error in job.errors}
    ends = faults.struck | raised | {job.attempt: str(job.state)}
    console.print(table_of(begun, files, ends))
    wrong = list(check.faults_found(database, root, files))
    if job.state != "completed":
        wrong.append(f"the job is {job.state}: {raised.get(job.attempt)}")
    if not wrong:
        again = table.written_again(database)
        _say(
            f"checked: each of the {len(files):,} files is in the table once, with its size, lines "
            f"and SHA-256; {again or 'none'} of them done again"
        )
    return wrong
