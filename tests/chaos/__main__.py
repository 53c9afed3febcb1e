"""``python -m tests.chaos --rounds 20 --seed 1``: break things, check, and say what it was."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from celery.result import AsyncResult

from tests.chaos import checks
from tests.chaos.faults import Mending, strike
from tests.chaos.script import Job, Round, draw
from tests.chaos.site import Broker, Site, open_site

#: Seconds within which all tasks of a round must be over once nothing is broken any more. Kombu
#: looks every 100 s for what Redis is to deliver again.
SETTLED_WITHIN = 150.0
LOOK_EVERY = 0.1
STARTED_WITHIN = 40.0

Sent = list[tuple[Job, AsyncResult[Any]]]


@dataclass
class Figures:
    """What happened, over all rounds."""

    rounds: int = 0
    tasks: int = 0
    attempts: int = 0
    rescues: int = 0
    retries: int = 0
    failed: int = 0
    #: Workers that ended without being told to, as kombu's do when Redis goes away under an ack.
    ended: int = 0
    #: Seconds from a round's last fault until all of its tasks were over.
    settling: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        longest = max(self.settling, default=0.0)
        middle = sorted(self.settling)[len(self.settling) // 2] if self.settling else 0.0
        return (
            f"{self.rounds} rounds, {self.tasks} tasks, {self.attempts} attempts, "
            f"{self.rescues} rescues, {self.retries} retries, {self.failed} failed, "
            f"{self.ended} workers ended by themselves; "
            f"settled after {middle:.1f} s (median), {longest:.1f} s (longest)"
        )


class Trial:
    """The rounds on one site."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._databases = {
            name: checks.Database(site, broker) for name, broker in site.brokers.items()
        }
        self.figures = Figures()

    def run(self, script: Round) -> list[str]:
        """One round; what was wrong."""
        broker = self._site.brokers[script.broker]
        database = self._databases[script.broker]
        sent = [(job, _send(broker, job)) for job in script.jobs]
        try:
            self._break(script, broker)
        except AssertionError as late:  # a worker that does not stop, or does not start
            return [str(late)]
        wrong = self._wait_until_settled(sent, database)
        wrong += [
            f"{job.name} {result.id}: {what}"
            for job, result in sent
            for what in checks.of_task(
                database.job(result.id),
                result,
                job,
                broker.diary.entries(task_id=result.id),
                could_ask=not script.breaks_database,
            )
        ]
        wrong += self._wait_for_adoption()
        self._count(sent, broker, database)
        return wrong + list(checks.of_tables(database))

    def finish(self) -> list[str]:
        """Stop every worker warm; what was wrong, or is left."""
        for worker in self._site.workers():
            worker.stop(timeout=30)
        wrong = list(checks.of_site(self._site))
        return wrong + list(checks.of_statements(self._site.postgres.log()))

    def _break(self, script: Round, broker: Broker) -> None:
        began = time.monotonic()
        mendings: list[tuple[float, Mending]] = []
        todo = list(script.faults)
        while todo or mendings:
            now = time.monotonic() - began
            for due in [one for one in mendings if one[0] <= now]:
                mendings.remove(due)
                due[1].do()
            if todo and todo[0].at <= now:
                mending = strike(todo.pop(0), self._site, broker)
                if mending is not None:
                    mendings.append((time.monotonic() - began + mending.after, mending))
            time.sleep(0.01)
        # Not before: what keeps a worker from starting may be another fault of the round.
        for worker in self._site.workers():
            if worker.running:
                worker.ready(timeout=STARTED_WITHIN)

    def _wait_until_settled(self, sent: Sent, database: checks.Database) -> list[str]:
        began = time.monotonic()
        left = list(sent)
        while left and time.monotonic() < began + SETTLED_WITHIN:
            time.sleep(LOOK_EVERY)
            self._supervise()
            left = [
                (job, result)
                for job, result in left
                if not checks.settled(database.job(result.id), job, time.monotonic() - began)
            ]
            wrong = list(checks.of_tables(database))
            if wrong:
                return wrong
        self.figures.settling.append(time.monotonic() - began)
        return [
            f"{job.name} {result.id} is not over: {database.job(result.id)}" for job, result in left
        ]

    def _supervise(self) -> None:
        """Start again what ended by itself, as whoever looks after a worker does."""
        for worker in self._site.workers():
            if not worker.running:
                self.figures.ended += 1
                worker.start()

    def _wait_for_adoption(self) -> list[str]:
        expected = 2 * len(self._site.workers())  # each has a slate and its lock
        deadline = time.monotonic() + SETTLED_WITHIN / 5
        while len(self._site.slates_left()) != expected and time.monotonic() < deadline:
            time.sleep(LOOK_EVERY)
        found = self._site.slates_left()
        return [] if len(found) == expected else [f"{len(found)} files of slates: {found}"]

    def _count(self, sent: Sent, broker: Broker, database: checks.Database) -> None:
        figures = self.figures
        figures.rounds += 1
        for _, result in sent:
            entries = broker.diary.entries(task_id=result.id)
            row = database.job(result.id) or {"rescues": 0, "state": None}
            figures.tasks += 1
            figures.attempts += sum(entry["what"] == "began" for entry in entries)
            figures.retries += sum(entry["what"] == "retried" for entry in entries)
            figures.rescues += row["rescues"]
            figures.failed += row["state"] == "failed"


def _send(broker: Broker, job: Job) -> AsyncResult[Any]:
    task = getattr(broker.client, job.name)
    result: AsyncResult[Any] = task.delay(job.steps, job.pause, job.retry_at)
    return result


@click.command()
@click.option("--rounds", default=20, show_default=True, type=click.IntRange(1))
@click.option("--seed", default=None, type=int, help="Repeats a script; drawn where left out.")
@click.option("--first", default=1, show_default=True, help="Number of the first round.")
@click.option("--keep", is_flag=True, help="Keep logs and diaries where nothing was wrong, too.")
def main(rounds: int, seed: int | None, first: int, keep: bool) -> None:
    """Break real workers, brokers and a database at random moments, and check what must hold."""
    seed = time.time_ns() % 1_000_000 if seed is None else seed
    click.echo(f"seed {seed}")
    folder = Path(tempfile.mkdtemp(prefix="celery-awa-chaos-"))
    folder.chmod(0o755)
    wrong: list[str] = []
    with open_site(folder) as site:
        trial = Trial(site)
        for number in range(first, first + rounds):
            script = draw(seed, number)
            click.echo(str(script))
            wrong = trial.run(script)
            if wrong:
                break
        else:
            wrong = trial.finish()
        click.echo(str(trial.figures))
    _conclude(wrong, folder, seed, number, keep)


def _conclude(wrong: list[str], folder: Path, seed: int, number: int, keep: bool) -> None:
    for what in wrong:
        click.echo(f"WRONG: {what}", err=True)
    if wrong or keep:
        click.echo(f"logs and diaries: {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    if wrong:
        click.echo(f"again: make chaos ROUNDS=1 SEED={seed} FIRST={number}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
