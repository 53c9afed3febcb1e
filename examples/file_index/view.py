"""What the viewer sees: a bar in a terminal, lines elsewhere, and a table at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column, Table

from .table import Beginning

#: What ``Client.get_job`` answers.
Job = Any


def view_for(console: Console) -> Bar | Lines:
    """A bar where there is a terminal that can redraw one."""
    live = console.is_terminal and not console.is_dumb_terminal
    return Bar(console) if live else Lines(console)


class Bar:
    """Attempt, state, percent and message in one line that is drawn anew."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("attempt {task.fields[attempt]} {task.fields[state]}"),
            BarColumn(bar_width=30),
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn(
                "{task.fields[message]}",
                markup=False,
                table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1),
            ),
            console=console,
            expand=True,
        )
        self._bar = self._progress.add_task("", total=100, attempt=1, state="", message="")

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, job: Job) -> None:
        self._progress.update(
            self._bar,
            completed=_percent(job),
            attempt=job.attempt,
            state=f"{job.state!s:9}",
            message=job.message or "",
        )

    def say(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)


class Lines:
    """A line for each new attempt or state, and for each further tenth."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown: object = None

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, job: Job) -> None:
        percent = _percent(job)
        shown = job.attempt, job.state, percent // 10
        if shown != self._shown:
            self._shown = shown
            self.say(f"attempt {job.attempt} {job.state!s:9} {percent:3} % {job.message or ''}")

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _percent(job: Job) -> int:
    # A success clears the progress.
    return 100 if job.state == "completed" else job.percent or 0


def table_of(begun: Sequence[Beginning], files: Sequence[str], ends: Mapping[int, str]) -> Table:
    """Where each attempt began, and how it ended."""
    shown = Table(title="Where each attempt began")
    # At 80 columns the two last share what the numbers leave.
    shown.add_column("attempt", justify="right", no_wrap=True)
    shown.add_column("began at file", justify="right", no_wrap=True)
    shown.add_column("rows", justify="right", no_wrap=True)
    shown.add_column("path", overflow="fold")
    shown.add_column("how it ended", overflow="fold")
    for attempt in begun:
        shown.add_row(
            str(attempt.number),
            f"{attempt.done + 1} of {len(files)}",
            str(attempt.rows),
            files[attempt.done] if attempt.done < len(files) else "",
            ends.get(attempt.number, ""),
        )
    return shown
