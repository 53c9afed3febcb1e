"""Convert all rows of a select, each exactly once, by a task that makes way after half a second.

Needs no service: PostgreSQL is embedded, the messages are files, the worker is started here.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import psycopg
from celery import Celery
from sqlalchemy import create_engine, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import celery_awa
from celery_awa import AwaTask
from celery_awa.resume import SelectRows
from example_worker import example
from example_worker.server import started_server
from example_worker.settings import SETTINGS
from example_worker.worker import Worker

READINGS, BATCH = 2_000, 50
URL = started_server()
# The tables of celery-awa are in the same database.
engine = create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(URL))


class Base(DeclarativeBase):
    pass


class Reading(Base):
    __tablename__ = "readings"

    id: Mapped[int] = mapped_column(primary_key=True)
    degrees: Mapped[float]


app = Celery("sqlalchemy_select")
app.conf.update(SETTINGS)
celery_awa.install(app, database_url=URL)


@app.task(base=AwaTask, bind=True, max_runtime=0.5)
def to_celsius(self: AwaTask) -> None:
    """Fahrenheit to Celsius: what must not be done twice to a reading."""
    # Otherwise each object is loaded once more after a commit.
    with Session(engine, expire_on_commit=False) as session:
        source = SelectRows(session, select(Reading), key=Reading.id, page_size=500, total="count")
        readings = self.iterate(source, batch_size=BATCH)
        for batch in readings:
            for reading in batch:
                reading.degrees = (reading.degrees - 32) * 5 / 9
            readings.checkpoint_in(session)
            session.commit()  # both, or neither
            time.sleep(0.04)  # heavier work


def fahrenheit(number: int) -> float:
    return number % 120


def play(worker: Worker) -> Iterator[str]:
    Base.metadata.create_all(engine)
    with Session(engine) as session:
        session.add_all(Reading(id=n, degrees=fahrenheit(n)) for n in range(READINGS))
        session.commit()
    with celery_awa.Client(app) as client:
        job = example.wait_for_end(client, to_celsius.delay().id)
    if job.state != "completed" or job.run_lease < 3:
        yield f"the job is {job.state} after {job.run_lease} executions: {job.errors}"
    # However often it made way, it is one attempt, without a retry.
    if (job.attempt, job.retries, job.rescues, job.errors) != (1, 0, 0, ()):
        yield f"attempt {job.attempt}, {job.retries} retries, {job.rescues} rescues: {job.errors}"
    with Session(engine) as session:
        found = {reading.id: reading.degrees for reading in session.scalars(select(Reading))}
    true = {number: (fahrenheit(number) - 32) * 5 / 9 for number in range(READINGS)}
    wrong = sum(abs(found.get(number, 1e9) - true[number]) > 1e-9 for number in true)
    print(f"{len(found)} readings, {wrong} of them wrong, in {job.run_lease} executions")
    if wrong or len(found) != READINGS:
        yield f"{wrong} readings of {len(found)} are wrong, of {READINGS}"


if __name__ == "__main__":
    example.main("sqlalchemy_select", play)
