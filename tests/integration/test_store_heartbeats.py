"""Heartbeats: proof of life and snapshots of many attempts, a statement at a time."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from celery_awa.errors import RowLocked, StoreRefused
from celery_awa.model import Beat, JobState, Lease, Pulse, Snapshot, Transition
from celery_awa.store import canonical
from celery_awa.store.canonical import CanonicalStore
from tests.waiting import eventually

from .jobs import Database, StoreOn, running, snapshot, stored

pytest_plugins = ["tests.integration.stores"]

BeatAll = Callable[[CanonicalStore, list[Lease], bool], dict[Lease, Pulse]]


def alone(store: CanonicalStore, leases: list[Lease], skip_locked: bool) -> dict[Lease, Pulse]:
    """The heartbeat alone."""
    return store.heartbeat(leases, skip_locked=skip_locked)


def with_progress(
    store: CanonicalStore, leases: list[Lease], skip_locked: bool
) -> dict[Lease, Pulse]:
    """Heartbeat and snapshot."""
    beats = [Beat(lease, snapshot(7, percent=70)) for lease in leases]
    return store.heartbeat_with_progress(beats, skip_locked=skip_locked)


both_verbs = pytest.mark.parametrize("beat", [alone, with_progress])
both_ways = pytest.mark.parametrize("skip_locked", [False, True])


@pytest.fixture
def statements(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The parameters of each statement that was sent since."""
    sent: list[dict[str, Any]] = []
    execute = psycopg.Cursor.execute

    def counting(self: Any, text: Any, parameters: Any = None, **rest: Any) -> Any:
        sent.append(parameters)
        return execute(self, text, parameters, **rest)

    monkeypatch.setattr(psycopg.Cursor, "execute", counting)
    return sent


def age(database: Database) -> None:
    """Let every heartbeat have been an hour ago."""
    database.execute("UPDATE {schema}.jobs_hot SET heartbeat_at = now() - interval '1 hour'")


def young(database: Database, task_id: str) -> bool:
    """Whether there was a heartbeat since."""
    return bool(
        database.execute(
            "SELECT heartbeat_at > now() - interval '1 minute' AS young FROM {schema}.jobs "
            "WHERE task_id = %s",
            task_id,
        )[0]["young"]
    )


@both_verbs
@both_ways
def test_every_attempt_that_has_its_row_is_proven_alive(
    store: CanonicalStore, database: Database, beat: BeatAll, skip_locked: bool
) -> None:
    leases = [running(store, f"{n}") for n in range(3)]
    age(database)

    pulses = beat(store, leases, skip_locked)

    assert list(pulses) == leases
    assert all(young(database, f"{n}") for n in range(3))


@both_ways
def test_snapshots_land_and_their_generation_is_confirmed(
    store: CanonicalStore, database: Database, skip_locked: bool
) -> None:
    leases = [running(store, f"{n}") for n in range(3)]

    pulses = store.heartbeat_with_progress(
        [Beat(lease, snapshot(n + 1, percent=n)) for n, lease in enumerate(leases)],
        skip_locked=skip_locked,
    )

    assert pulses == {lease: Pulse(n + 1) for n, lease in enumerate(leases)}
    assert [database.row(f"{n}")["progress"] for n in range(3)] == [stored(n) for n in range(3)]


@both_ways
def test_an_older_snapshot_neither_undoes_a_flush_nor_reads_as_a_lost_lease(
    store: CanonicalStore, database: Database, skip_locked: bool
) -> None:
    lease = running(store)
    store.heartbeat_with_progress([Beat(lease, snapshot(5, percent=50))])
    age(database)
    before = database.row()

    pulses = store.heartbeat_with_progress(
        [Beat(lease, snapshot(4, percent=40))], skip_locked=skip_locked
    )

    assert pulses == {lease: Pulse(5)}
    job = database.row()
    assert (job["progress"], job["progress_at"]) == (stored(50), before["progress_at"])
    assert young(database, "task")


def test_the_same_snapshot_again_is_confirmed_and_not_written(
    store: CanonicalStore, database: Database
) -> None:
    lease = running(store)
    for _ in range(2):
        assert store.heartbeat_with_progress([Beat(lease, snapshot(5))]) == {lease: Pulse(5)}
        written_at = database.row()["progress_at"]
    age(database)
    store.heartbeat_with_progress([Beat(lease, snapshot(5))])

    assert database.row()["progress_at"] == written_at


@pytest.mark.parametrize("nothing", [None, Snapshot(9, None)])
def test_a_beat_that_reports_nothing_keeps_the_progress_that_is_there(
    store: CanonicalStore, database: Database, nothing: Snapshot | None
) -> None:
    lease = running(store)
    store.heartbeat_with_progress([Beat(lease, snapshot())])

    assert lease in store.heartbeat_with_progress([Beat(lease, nothing)])

    assert database.row()["progress"] == stored()


@both_verbs
@both_ways
def test_a_beat_that_hits_no_row_is_missing_from_the_answer(
    store: CanonicalStore, database: Database, beat: BeatAll, skip_locked: bool
) -> None:
    lease, ended = running(store), running(store, "ended")
    store.end(ended, "first", Transition(JobState.FAILED))
    others = [Lease(lease.job_id, 2), Lease(lease.job_id + 1000, 1), ended]
    before = [database.row(), database.row("ended")]

    assert beat(store, others, skip_locked) == {}

    assert [database.row(), database.row("ended")] == before


@both_verbs
def test_a_request_to_stop_comes_with_the_answer(
    store: CanonicalStore, database: Database, beat: BeatAll
) -> None:
    leases = [running(store), running(store, "asked to stop")]
    database.execute(
        "UPDATE {schema}.jobs_hot SET cancel_requested = true WHERE task_id = 'asked to stop'"
    )

    pulses = beat(store, leases, False)

    assert [pulses[lease].cancel_requested for lease in leases] == [False, True]


@both_verbs
@both_ways
def test_a_heartbeat_clears_the_mark_of_a_duplicate(
    store: CanonicalStore, database: Database, beat: BeatAll, skip_locked: bool
) -> None:
    lease = running(store)
    database.execute("UPDATE {schema}.jobs_hot SET duplicate_at = now()")

    beat(store, [lease], skip_locked)

    assert database.row()["duplicate_at"] is None


@both_verbs
def test_a_locked_row_is_told_soon_and_the_others_land_on_the_second_try(
    store: CanonicalStore, database: Database, beat: BeatAll
) -> None:
    leases = [running(store, f"{n}") for n in range(5)]
    age(database)

    with database.locked("2"):
        began = time.monotonic()
        with pytest.raises(RowLocked):
            beat(store, leases, False)
        took = time.monotonic() - began
        assert not any(young(database, f"{n}") for n in range(5))

        pulses = beat(store, leases, True)
        assert store.held(leases) == set(leases)

    assert 0.4 < took < 5
    assert set(pulses) == set(leases) - {leases[2]}
    assert [young(database, f"{n}") for n in range(5)] == [True, True, False, True, True]


@both_verbs
def test_a_heartbeat_that_waits_for_the_attempts_end_brings_no_running_row_back(
    store: CanonicalStore, database: Database, beat: BeatAll
) -> None:
    lease = running(store)
    pulses: dict[Lease, Pulse] | None = None

    def beat_once() -> None:
        nonlocal pulses
        pulses = beat(store, [lease], False)

    thread = threading.Thread(target=beat_once)
    with psycopg.connect(database.url) as ending:
        ending.execute(
            "SELECT celery_awa.end_attempt(%s, %s, 'first', '{\"state\": \"completed\"}', NULL)",
            (lease.job_id, lease.run_lease),
        )
        thread.start()
        eventually(
            lambda: database.execute(
                "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock' "
                "AND datname = current_database()"
            )
        )
    thread.join()

    assert pulses == {}
    job = database.row()
    assert (job["state"], job["progress"]) == ("completed", None)


def test_held_tells_the_leases_that_are_still_good(
    store: CanonicalStore, database: Database
) -> None:
    good, ended, retried = (running(store, name) for name in ("good", "ended", "retried"))
    store.end(ended, "first", Transition(JobState.FAILED))
    store.end(retried, "first", Transition(JobState.RETRYABLE))
    taken = Lease(good.job_id, good.run_lease + 1)

    assert store.held([good, ended, retried, taken]) == {good}
    assert store.owns(good)
    assert not store.owns(ended)


@pytest.mark.parametrize("number", [600])
def test_600_attempts_take_one_statement_a_tier(
    store: CanonicalStore, database: Database, statements: list[dict[str, Any]], number: int
) -> None:
    database.execute(
        "INSERT INTO {schema}.jobs_hot (task_id, kind, state, run_token) "
        "SELECT n::text, 'kind', 'running', 'run' FROM generate_series(1, %s) n",
        number,
    )
    found = database.execute("SELECT id, run_lease FROM {schema}.jobs_hot")
    leases = [Lease(job["id"], job["run_lease"]) for job in found]
    statements.clear()

    assert len(alone(store, leases, False)) == number
    assert len(statements) == 1
    assert len(with_progress(store, leases, False)) == number
    assert len(statements) == 2


def test_no_statement_is_sent_for_nothing(
    store: CanonicalStore, statements: list[dict[str, Any]]
) -> None:
    assert store.heartbeat([]) == {}
    assert store.heartbeat_with_progress([]) == {}
    assert store.held([]) == frozenset()
    store.record_completed([])

    assert statements == []


def test_a_statement_carries_no_more_than_its_limit_of_bytes_unless_one_snapshot_does(
    store: CanonicalStore,
    database: Database,
    statements: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert canonical.MAX_STATEMENT_BYTES == 8 * 1024 * 1024
    monkeypatch.setattr(canonical, "MAX_STATEMENT_BYTES", 1000)
    leases = [running(store, f"{n}") for n in range(10)]
    lengths = [50, 50, 50, 2000, 1, 240, 1, 50, 50, 50]
    beats = [
        Beat(lease, Snapshot(1, json.dumps("\N{PARTY POPPER}" * length, ensure_ascii=False)))
        for lease, length in zip(leases, lengths, strict=True)
    ]
    statements.clear()

    pulses = store.heartbeat_with_progress(beats)

    assert pulses == dict.fromkeys(leases, Pulse(1))
    sizes = [[len(text.encode()) for text in sent["progress"]] for sent in statements]
    assert [size for part in sizes for size in part] == [4 * length + 2 for length in lengths]
    assert all(sum(part) <= 1000 or len(part) == 1 for part in sizes)
    assert len(sizes) == 4


def test_twelve_megabytes_of_snapshots_land(store: CanonicalStore, database: Database) -> None:
    leases = [running(store, f"{n}") for n in range(200)]
    text = json.dumps({"message": "x" * 60_000})

    pulses = store.heartbeat_with_progress([Beat(lease, Snapshot(1, text)) for lease in leases])

    assert pulses == dict.fromkeys(leases, Pulse(1))


def test_a_refused_snapshot_is_told_and_costs_its_row_no_heartbeat(
    own_database: Database, store_on: StoreOn
) -> None:
    own_database.execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "IF NEW.task_id = '3' AND NEW.progress IS NOT NULL THEN RAISE 'not this one'; END IF; "
        "RETURN NEW; END $$"
    )
    own_database.execute(
        "CREATE TRIGGER refuse BEFORE UPDATE ON {schema}.jobs_hot "
        "FOR EACH ROW EXECUTE FUNCTION refuse()"
    )
    store = store_on(own_database.url)
    leases = [running(store, f"{n}") for n in range(10)]
    age(own_database)

    with pytest.raises(StoreRefused, match="not this one"):
        with_progress(store, leases, False)
    assert not any(young(own_database, f"{n}") for n in range(10))

    assert len(with_progress(store, leases[:3] + leases[4:], False)) == 9
    assert list(alone(store, leases[3:4], False)) == leases[3:4]


def test_a_snapshot_that_is_no_json_refuses_the_statement(store: CanonicalStore) -> None:
    lease = running(store)

    for text in ("no json", '"\\u0000"', '"\\ud800"', '"\ud800"', "NaN", ""):
        with pytest.raises(StoreRefused):
            store.heartbeat_with_progress([Beat(lease, Snapshot(1, text))])
