"""What bookkeeping costs, as the server's own log shows it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

import pytest

from celery_awa.store.migrations import migrate
from tests.acceptance.diary import Diary, Gate
from tests.acceptance.jobs import Jobs, opened_jobs
from tests.acceptance.workers import Worker
from tests.services.postgres import OBSERVER, PrivatePostgres
from tests.waiting import eventually

Start = Callable[..., Worker]
Load = Callable[..., ModuleType]
STEPS = "tests.acceptance.apps.steps"
#: Seconds between two write cycles of the workers here.
CYCLE = 0.2
#: Where every statement counts: a rescuer's two looks every ten seconds come at any moment.
NO_LOOKS = {"awa_rescue_in_workers": False}


@dataclass(frozen=True)
class Statement:
    """One statement as the server received it, and the process that served its connection."""

    backend: int
    text: str

    @property
    def is_heartbeat(self) -> bool:
        return '"celery_awa".heartbeat' in self.text


class Statements:
    """What was sent to the database of this test since the log was last marked."""

    _ENTRY = re.compile(r"\[(\d+)\] LOG:  (?:statement|execute [^:]+): ([\s\S]*?)(?=\n\d{4}-|\Z)")

    def __init__(self, server: PrivatePostgres) -> None:
        self._server = server
        self.mark()

    def mark(self) -> None:
        """Forget what was sent until now."""
        self._start = len(self._server.log())

    def all(self) -> list[Statement]:
        """In the order in which the server received them."""
        entries = self._ENTRY.findall(self._server.log()[self._start :])
        return [Statement(int(backend), text) for backend, text in entries]

    def heartbeats(self) -> list[Statement]:
        """The heartbeats among them, with and without progress."""
        return [statement for statement in self.all() if statement.is_heartbeat]


@pytest.fixture
def database_url(private_postgres: PrivatePostgres) -> str:
    """A migrated database whose server logs every statement."""
    name = private_postgres.create_database()
    migrate(private_postgres.url(name))
    with private_postgres.observe() as connection:
        connection.execute(f"ALTER DATABASE {name} SET log_statement = 'all'")
    return private_postgres.url(name)


@pytest.fixture
def statements(private_postgres: PrivatePostgres, database_url: str) -> Statements:
    return Statements(private_postgres)


@pytest.fixture
def jobs(database_url: str) -> Iterator[Jobs]:
    """Rows as the tests see them, over a connection that does not count."""
    unseen = f"{database_url}&application_name={OBSERVER}&options=-c%20log_statement%3Dnone"
    with opened_jobs(unseen) as opened:
        yield opened


def test_a_thousand_short_tasks_leave_no_row_and_open_no_connection_in_the_children(
    start_worker: Start,
    client: ModuleType,
    jobs: Jobs,
    statements: Statements,
    private_postgres: PrivatePostgres,
) -> None:
    worker = start_worker()
    eventually(lambda: statements.all() and private_postgres.connections() == ["celery-awa"])
    for number in range(1_000):
        client.brief.apply_async((number,), ignore_result=True)
    eventually(lambda: worker.log().count("succeeded in") == 1_000, timeout=60, interval=0.2)
    assert private_postgres.connections() == ["celery-awa"]
    assert len({statement.backend for statement in statements.all()}) == 1
    # A row that comes after them shows that none of theirs is on its way.
    marker = client.report.delay(1)
    jobs.wait_for(marker.id, "completed")
    assert [job.task_id for job in jobs.all()] == [marker.id]


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_hundred_thousand_reports_send_no_more_statements_than_there_are_cycles(
    start_worker: Start,
    load_client: Load,
    jobs: Jobs,
    diary: Diary,
    statements: Statements,
    pool: str,
) -> None:
    client = load_client(STEPS)
    # Claimed at once: on a fast machine all may be reported before the first cycle.
    config = {**NO_LOOKS, "awa_write_interval": CYCLE, "awa_claim_after": 0}
    start_worker(app=STEPS, pool=pool, config=config)
    sent = client.report_many.delay(100_000)
    seconds = diary.wait_for("reported", sent.id, timeout=60)["seconds"]
    jobs.wait_for(sent.id, "completed")
    texts = [statement.text for statement in statements.all()]
    # One is the flush; the task began before, and ended after, what it measured.
    assert 1 <= len(statements.heartbeats()) <= 1 + seconds / CYCLE + 2
    assert sum("claim(" in text for text in texts) == 1
    assert sum("AS owned" in text for text in texts) == 1
    assert sum("end_attempt(" in text for text in texts) == 1
    # The rest: two looks at the schema for each connection.
    assert len(texts) - len(statements.heartbeats()) - 3 <= 2 * 2


def test_many_long_tasks_are_kept_alive_over_one_connection_by_two_statements_a_cycle(
    start_worker: Start,
    load_client: Load,
    jobs: Jobs,
    gate: Gate,
    statements: Statements,
    private_postgres: PrivatePostgres,
) -> None:
    client = load_client(STEPS)
    start_worker(
        app=STEPS,
        concurrency=6,
        config={
            **NO_LOOKS,
            "awa_claim_after": 0.1,
            "awa_write_interval": CYCLE,
            "awa_heartbeat_interval": 2 * CYCLE,
            "awa_connection_idle": 1,
        },
    )
    sent = [client.report_now_and_then.delay(gate.path) for _ in range(3)]
    sent += [client.follow.delay([], gate.path) for _ in range(3)]
    for one in sent:
        jobs.wait_for(one.id, "running")
    assert len({statement.backend for statement in statements.all()}) == 1 + len(sent)
    eventually(lambda: private_postgres.connections() == ["celery-awa"], what="idle ones closed")

    statements.mark()
    began = time.monotonic()
    eventually(lambda: len(statements.heartbeats()) >= 15)
    sent_meanwhile = statements.all()
    cycles = (time.monotonic() - began) / CYCLE + 1
    assert sent_meanwhile == [one for one in sent_meanwhile if one.is_heartbeat]
    assert len({statement.backend for statement in sent_meanwhile}) == 1
    with_progress = [one for one in sent_meanwhile if "heartbeat_with_progress(" in one.text]
    assert 0 < len(with_progress) <= cycles
    assert 0 < len(sent_meanwhile) - len(with_progress) <= cycles

    gate.open()
    for one in sent:
        jobs.wait_for(one.id, "completed")


def test_a_worker_of_32_idle_tasks_holds_one_connection(
    start_worker: Start,
    load_client: Load,
    jobs: Jobs,
    gate: Gate,
    private_postgres: PrivatePostgres,
) -> None:
    client = load_client(STEPS)
    start_worker(
        app=STEPS,
        concurrency=32,
        config={**NO_LOOKS, "awa_claim_after": 0.1, "awa_connection_idle": 1},
    )
    sent = [client.follow.delay([], gate.path) for _ in range(32)]
    most = 0
    for one in sent:
        jobs.wait_for(one.id, "running")
        most = max(most, len(private_postgres.connections()))
    assert most <= 1 + 32
    eventually(lambda: private_postgres.connections() == ["celery-awa"], what="idle ones closed")
