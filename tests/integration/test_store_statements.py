"""The statements themselves: their files, the indexes they rely on, and what they cost a table."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

import celery_awa.store
from celery_awa.model import Beat, JobState, Lease, Snapshot, Thresholds, Transition
from celery_awa.store import sql_files
from celery_awa.store.canonical import CanonicalStore
from celery_awa.store.through import checkpoint_through
from tests.conftest import SCHEMA
from tests.waiting import eventually

from .jobs import Database, StoreOn, attempt

pytest_plugins = ["tests.integration.stores"]

FILES = sorted((sql_files.sql_root() / "queries").iterdir())
each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)

#: Waits for a message, which was published in some cases.
SENT = {
    "sent_at": "CASE WHEN n % 10 = 0 THEN now() - n * interval '1 s' END",
    "envelope_whole": "true",
}

#: Table, state, how many, and what else is set of a database in which a statement that goes
#: through all rows is dearer than one that takes an index.
MANY = (
    ("jobs_hot", "completed", 5000, {}),
    ("jobs_hot", "failed", 300, {"envelope_whole": "true"}),
    ("jobs_hot", "cancelled", 300, {"send_after": "now() - n * interval '1 s'"}),
    ("jobs_hot", "running", 300, {"heartbeat_at": "now() - n * interval '1 s'"}),
    ("jobs_hot", "waiting_external", 300, {"callback_timeout_at": "now() - n * interval '1 s'"}),
    ("jobs_hot", "available", 300, SENT),
    ("scheduled_jobs", "retryable", 3000, SENT),
    ("scheduled_jobs", "scheduled", 300, {"send_after": "now() - n * interval '1 s'"}),
)
LOST = Thresholds(stale_after=60, duplicate_after=20)


@each_file
def test_each_file_has_its_head_of_four_lines_and_one_statement(path: Path) -> None:
    lines = path.read_text("utf-8").splitlines()

    assert path.suffix == ".sql"
    heads = [re.match(r"-- (\w+): \S.*\.$", line) for line in lines[:4]]
    assert [head and head[1] for head in heads] == ["Purpose", "Parameters", "Index", "Trap"]
    assert not any(line.startswith("--") or ";" in line for line in lines[4:])


@each_file
def test_each_file_is_used(path: Path) -> None:
    package = Path(celery_awa.store.__file__).parent
    sources = [source.read_text("utf-8") for source in package.glob("*.py")]

    assert any(f'"{path.stem}"' in source for source in sources)


@each_file
def test_each_file_prepares_on_the_migrated_schema(database: Database, path: Path) -> None:
    names: list[str] = []

    def number(found: re.Match[str]) -> str:
        if found[1] not in names:
            names.append(found[1])
        return f"${names.index(found[1]) + 1}"

    text = re.sub(r"%\((\w+)\)s", number, sql_files.query(path.stem, SCHEMA))
    database.execute(f"PREPARE {path.stem} AS {text}")
    database.execute(f"DEALLOCATE {path.stem}")
    parameters = path.read_text("utf-8").splitlines()[1]
    assert all(re.search(rf"\b{name}\b", parameters) for name in names)


@pytest.fixture(scope="module")
def large(jobs_database: Database) -> Iterator[Database]:
    """A database with some thousand jobs, and statistics of them."""
    jobs_database.empty()
    for table, state, number, more in MANY:
        values = {"args_repr": "repeat('x', 300)", "progress": "'{}'", **more}
        jobs_database.execute(
            f"INSERT INTO {{schema}}.{table} (task_id, kind, state, run_token, {', '.join(values)})"
            f"SELECT '{state} ' || n, 'kind', '{state}', 'run', {', '.join(values.values())} "
            f"FROM generate_series(1, {number}) n"
        )
    jobs_database.execute(
        "UPDATE {schema}.jobs_hot SET callback_id = id || '-secret', callback_name = 'callback' "
        "WHERE state = 'waiting_external'"
    )
    jobs_database.execute("ANALYZE {schema}.jobs_hot, {schema}.scheduled_jobs")
    yield jobs_database
    jobs_database.empty()


Use = Callable[[CanonicalStore, list[Lease], int], object]

#: For each statement, uses of it that together take every path through it.
USES: dict[str, list[Use]] = {
    "claim": [
        lambda store, leases, n: store.claim(attempt(f"{n}", "running 1")),
        lambda store, leases, n: store.claim(attempt(f"{n}", f"retryable {n + 1}", retries=1)),
        lambda store, leases, n: store.claim(attempt(f"{n}", f"retryable {n + 100}")),
        lambda store, leases, n: store.claim(attempt(f"{n}", f"new {n}")),
    ],
    "checkpoint_in": [lambda store, leases, n: _commit(store, leases[n])],
    "complete_callback": [
        lambda store, leases, n: store.complete_callback(f"{_parked(store, n + 1)}-secret", "1"),
        lambda store, leases, n: store.complete_callback(f"{_parked(store, n + 1)}-other", "1"),
        lambda store, leases, n: store.complete_callback(f"{_waiting(store, n)}-secret", "1"),
        lambda store, leases, n: store.complete_callback("0-secret", "1"),
    ],
    "edit_checkpoint": [
        lambda store, leases, n: store.edit_checkpoint(f"retryable {n + 300}", "{}"),
        lambda store, leases, n: store.edit_checkpoint(f"failed {n + 1}", "{}"),
        lambda store, leases, n: store.edit_checkpoint("unknown", "{}"),
    ],
    "end_attempt": [
        lambda store, leases, n: store.end(leases[n], "t", Transition(JobState.RETRYABLE)),
        lambda store, leases, n: store.end(leases[n], "t", Transition(JobState.RETRYABLE)),
        lambda store, leases, n: store.end(leases[n + 20], "t", Transition(JobState.FAILED)),
        lambda store, leases, n: store.end(leases[n + 40], "t", Transition(None)),
    ],
    "end_unclaimed": [
        lambda store, leases, n: store.end_unclaimed(
            attempt(f"end {n}", f"running {n + 100}"), Transition(JobState.RETRYABLE)
        ),
        lambda store, leases, n: store.end_unclaimed(
            attempt(f"end {n}", f"retryable {n + 200}", retries=1), Transition(JobState.FAILED)
        ),
    ],
    "forsake": [
        lambda store, leases, n: store.forsake(leases[:1]),
        lambda store, leases, n: store.forsake(leases[:100]),
    ],
    "get_job": [lambda store, leases, n: store.get_job(f"retryable {n}")],
    "heartbeat": [
        lambda store, leases, n: store.heartbeat(leases[:1]),
        lambda store, leases, n: store.heartbeat(leases[:100]),
        lambda store, leases, n: store.heartbeat(leases[:100], skip_locked=True),
    ],
    "heartbeat_with_progress": [
        lambda store, leases, n: store.heartbeat_with_progress(_beats(leases[:1])),
        lambda store, leases, n: store.heartbeat_with_progress(_beats(leases[:100])),
        lambda store, leases, n: store.heartbeat_with_progress(
            _beats(leases[:100]), skip_locked=True
        ),
    ],
    "expect_callback": [
        lambda store, leases, n: store.expect_callback(leases[n], "token", "1-secret", "name")
    ],
    "fail_callback": [
        lambda store, leases, n: store.fail_callback(f"{_parked(store, n + 50)}-secret", "no"),
        lambda store, leases, n: store.fail_callback(f"{_waiting(store, n)}-secret", "no"),
    ],
    "held": [lambda store, leases, n: store.held(leases[:100])],
    "knows": [lambda store, leases, n: store.knows("unknown")],
    "list_jobs": [
        lambda store, leases, n: store.list_jobs(),
        lambda store, leases, n: store.list_jobs(limit=10, before_id=leases[0].job_id),
    ],
    "lost": [
        lambda store, leases, n: store.lost(LOST),
        lambda store, leases, n: store.lost(LOST, after_id=leases[150].job_id, limit=10),
    ],
    "owns": [lambda store, leases, n: store.owns(leases[n])],
    "record_completed": [
        lambda store, leases, n: store.record_completed(
            [attempt("t", f"short {n} {i}") for i in range(10)]
        )
    ],
    "request_cancel": [
        lambda store, leases, n: store.request_cancel("running 1"),
        lambda store, leases, n: store.request_cancel(f"retryable {n + 400}"),
        lambda store, leases, n: store.request_cancel("unknown"),
    ],
    "rescue": [
        lambda store, leases, n: store.rescue(leases[-n - 1 :], LOST),
        lambda store, leases, n: store.rescue(leases[-100:], LOST),
    ],
    "resend": [
        lambda store, leases, n: store.resend(f"failed {n + 100}", keep_progress=True),
        lambda store, leases, n: store.resend(f"retryable {n + 500}", keep_progress=False),
        lambda store, leases, n: store.resend("unknown", keep_progress=False),
    ],
    "sent": [lambda store, leases, n: store.sent(leases[n])],
    "settle": [
        lambda store, leases, n: store.settle(leases[n], JobState.COMPLETED),
        lambda store, leases, n: store.settle(Lease(_waiting(store, n), 1), JobState.FAILED, "no"),
        lambda store, leases, n: store.settle(Lease(0, 1), JobState.FAILED, "unknown"),
    ],
    "told": [lambda store, leases, n: store.told(leases[n])],
    "unsent": [
        lambda store, leases, n: store.unsent(resend_after=60, limit=10),
        lambda store, leases, n: store.unsent(resend_after=60, limit=1000),
    ],
}


def _waiting(store: CanonicalStore, number: int) -> int:
    job = store.get_job(f"retryable {number + 600}")
    assert job is not None
    return job.id


def _parked(store: CanonicalStore, number: int) -> int:
    job = store.get_job(f"waiting_external {number}")
    assert job is not None
    return job.id


def _commit(store: CanonicalStore, lease: Lease) -> None:
    with store._connection.transaction():
        checkpoint_through(store._connection, SCHEMA, lease, "token", 0, "{}")


def _beats(leases: list[Lease]) -> list[Beat]:
    return [Beat(lease, Snapshot(1, '{"percent": 1}')) for lease in leases]


def test_every_statement_is_looked_at() -> None:
    assert set(USES) == {path.stem for path in FILES} - {"schema_version"}


@pytest.mark.parametrize("name", USES)
def test_each_statement_goes_by_the_indexes_that_its_head_names(large: Database, name: str) -> None:
    with psycopg.connect(large.url, autocommit=True, prepare_threshold=None) as connection:
        store = CanonicalStore(connection, SCHEMA)
        leases = _running(connection)
        plans = _plans_of(connection)
        # Twice five: a function's statements may get one plan for all parameters from then on.
        for n in range(10):
            for use in USES[name]:
                use(store, leases, n)
    text = "\n".join(plans)

    assert "jobs_hot" in text
    assert not re.findall(r"Seq Scan on (?:jobs_hot|scheduled_jobs)", text)
    used = set(re.findall(r"(?:using|Bitmap Index Scan on) (\w+)", text))
    assert used <= _named_in_head(name)


def _running(connection: psycopg.Connection[tuple[int, ...]]) -> list[Lease]:
    found = connection.execute(
        f"SELECT id, run_lease FROM {SCHEMA}.jobs_hot WHERE state = 'running' ORDER BY id"
    )
    return [Lease(*row) for row in found.fetchall()]


def _plans_of(connection: psycopg.Connection[tuple[int, ...]]) -> list[str]:
    """The plan of each statement from here on, those inside functions too."""
    plans: list[str] = []
    connection.execute("LOAD 'auto_explain'")
    for name, value in (
        ("auto_explain.log_min_duration", "0"),
        ("auto_explain.log_nested_statements", "on"),
        ("auto_explain.log_level", "notice"),
        ("client_min_messages", "notice"),
    ):
        connection.execute("SELECT set_config(%s, %s, false)", (name, value))
    connection.add_notice_handler(lambda notice: plans.append(notice.message_primary or ""))
    return plans


def _named_in_head(name: str) -> set[str]:
    line = (sql_files.sql_root() / "queries" / f"{name}.sql").read_text("utf-8").splitlines()[2]
    named = set(re.findall(r"\w+_(?:pkey|key|running|unsent|sent|waiting)", line))
    return named.union(*map(_named_in_head, re.findall(r"(\w+)\.sql", line)))


@pytest.mark.parametrize(
    ("progress_bytes", "with_progress"),
    [(0, False), (300, True), (1200, True)],
    ids=["alone", "300 bytes of progress", "1200 bytes of progress"],
)
def test_ten_thousand_heartbeats_update_in_place(
    own_database: Database, store_on: StoreOn, progress_bytes: int, with_progress: bool
) -> None:
    """Rows of about 0.5 kB and their progress; over 95 % of the updates touch no index."""
    jobs, cycles = 200, 50
    own_database.execute(
        "INSERT INTO {schema}.jobs_hot (task_id, kind, state, run_token, args_repr, kwargs_repr) "
        f"SELECT gen_random_uuid(), 'shop.import_rows', 'running', gen_random_uuid(), "
        f"repeat('a', 200), repeat('k', 100) FROM generate_series(1, {jobs})"
    )
    found = own_database.execute("SELECT id, run_lease FROM {schema}.jobs_hot")
    leases = [Lease(job["id"], job["run_lease"]) for job in found]
    store = store_on(own_database.url)

    for cycle in range(1, cycles + 1):
        if with_progress:
            text = f'{{"percent": {cycle}, "message": "{_noise(cycle, progress_bytes)}"}}'
            store.heartbeat_with_progress([Beat(lease, Snapshot(cycle, text)) for lease in leases])
        else:
            store.heartbeat(leases)
    store.close()

    updates, hot = eventually(lambda: _updates(own_database, at_least=jobs * cycles))
    assert hot / updates > 0.95


def _noise(seed: int, length: int) -> str:
    # Nothing that would be compressed away.
    return random.Random(seed).randbytes(length // 2).hex()


def _updates(database: Database, at_least: int) -> tuple[int, int] | None:
    counts = database.execute(
        "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'jobs_hot'"
    )[0]
    enough = counts["n_tup_upd"] >= at_least
    return (counts["n_tup_upd"], counts["n_tup_hot_upd"]) if enough else None
