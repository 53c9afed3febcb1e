"""Stalls: living attempts that report nothing, shown or, where their task says so, stopped."""

from __future__ import annotations

from typing import Any

import pytest

from celery_awa.model import Beat, JobState, Lease, Rescue, Thresholds, Transition
from celery_awa.store.canonical import CanonicalStore

from .jobs import OLD, Database, attempt, claimed, lost_attempt, retried_job, snapshot, stored

pytest_plugins = ["tests.integration.stores"]

MINUTE = 60.0


def quiet(
    store: CanonicalStore, database: Database, seconds: float = 61, **fields: Any
) -> tuple[str, Lease]:
    """A living attempt that began so long ago and has reported nothing since."""
    new = lost_attempt(**({"stall_after": MINUTE, "stall_policy": "stop"} | fields))
    _, lease = claimed(store, new)
    age(database, seconds, new.task_id)
    return new.task_id, lease


def age(database: Database, seconds: float, task_id: str = "task") -> None:
    """Make all that was reported, and the attempt itself, so much older."""
    database.execute(
        "UPDATE {schema}.jobs_hot SET attempted_at = attempted_at - make_interval(secs => %s), "
        "progress_at = progress_at - make_interval(secs => %s) WHERE task_id = %s",
        seconds,
        seconds,
        task_id,
    )


def is_shown_stalled(store: CanonicalStore, task_id: str = "task") -> bool:
    job = store.get_job(task_id)
    assert job is not None
    assert [one.stalled for one in store.list_jobs() if one.task_id == task_id] == [job.stalled]
    return job.stalled


@pytest.mark.parametrize("policy", ["show", "stop"])
@pytest.mark.parametrize(
    ("stall_after", "seconds", "stalled"),
    [(None, 1e6, False), (MINUTE, 59, False), (MINUTE, 61, True), (0.5, 0.6, True)],
)
def test_who_reports_nothing_for_long_is_shown_and_lost_only_where_the_task_says_so(
    store: CanonicalStore,
    database: Database,
    policy: str,
    stall_after: float | None,
    seconds: float,
    stalled: bool,
) -> None:
    _, lease = quiet(store, database, seconds, stall_after=stall_after, stall_policy=policy)
    lost = stalled and policy == "stop"

    assert is_shown_stalled(store) is stalled
    assert [job.lease for job in store.lost(OLD)] == ([lease] if lost else [])
    assert store.rescue([lease], OLD) == ({lease: Rescue.REQUEUED} if lost else {})


@pytest.mark.parametrize(
    ("policy", "rescue", "state"),
    [("requeue", Rescue.REQUEUED, "retryable"), ("fail", Rescue.FAILED, "failed")],
)
def test_a_stalled_job_is_handled_by_policy_and_keeps_its_checkpoint(
    store: CanonicalStore, database: Database, policy: str, rescue: Rescue, state: str
) -> None:
    _, lease = quiet(store, database, 0, lost_policy=policy)
    store.heartbeat_with_progress([Beat(lease, snapshot())])
    age(database, 75)
    store.heartbeat([lease])

    assert store.rescue([lease], OLD) == {lease: rescue}

    job = database.row()
    assert (job["state"], job["progress"]) == (state, stored())
    assert job["errors"][-1]["error"].startswith("TimeLimitExceeded: nothing was reported for 75.")
    assert not is_shown_stalled(store)


def test_a_heartbeat_is_no_report_and_progress_is(
    store: CanonicalStore, database: Database
) -> None:
    _, lease = quiet(store, database)

    store.heartbeat([lease])
    assert is_shown_stalled(store)
    store.heartbeat_with_progress([Beat(lease, snapshot())])
    assert not is_shown_stalled(store)
    assert store.lost(OLD) == []

    age(database, 61)
    store.heartbeat_with_progress([Beat(lease, snapshot())])  # the same once more
    assert is_shown_stalled(store)
    assert store.rescue([lease], OLD) == {lease: Rescue.REQUEUED}


def test_a_new_attempt_has_its_time_whatever_was_reported_before_it(
    store: CanonicalStore, database: Database
) -> None:
    _, lease = quiet(store, database, 0)
    store.end(lease, "first", Transition(JobState.RETRYABLE, snapshot()))
    database.execute(
        "UPDATE {schema}.scheduled_jobs SET progress_at = progress_at - interval '1 hour'"
    )

    _, newer = claimed(
        store, lost_attempt("second", retries=1, stall_after=MINUTE, stall_policy="stop")
    )

    assert database.row()["progress"] == stored()
    assert not is_shown_stalled(store)
    assert store.rescue([newer], OLD) == {}


def test_each_attempt_brings_its_own_limit(store: CanonicalStore, database: Database) -> None:
    quiet(store, database)
    row = database.row()
    assert (row["stall_after"], row["stall_policy"]) == (MINUTE, "stop")

    claimed(store, attempt("second", retries=1, stall_after=5))

    row = database.row()
    assert (row["stall_after"], row["stall_policy"]) == (5.0, "show")
    job = store.get_job("task")
    assert job is not None
    assert job.stall_after == 5.0


def test_where_no_silence_counts_what_could_not_be_written_is_not_held_against_anybody(
    store: CanonicalStore, database: Database
) -> None:
    no_silence = Thresholds(1e9, 1e9)
    _, lease = quiet(store, database)
    _, late = quiet(store, database, 0, token="late", task_id="late", deadline=0.001)
    database.execute("SELECT pg_sleep(0.002)")

    assert [job.lease for job in store.lost(no_silence)] == [late]
    assert store.rescue([lease, late], no_silence) == {late: Rescue.REQUEUED}
    assert store.rescue([lease], Thresholds(9e7, 9e7)) == {lease: Rescue.REQUEUED}


@pytest.mark.parametrize("state", [state for state in JobState if state is not JobState.RUNNING])
def test_a_job_that_does_not_run_is_never_stalled(
    store: CanonicalStore, database: Database, state: JobState
) -> None:
    lease = retried_job(
        store, "task", state, lost_policy="requeue", stall_after=0.001, stall_policy="stop"
    )
    table = database.row()["table"]
    database.execute(
        f"UPDATE {{schema}}.{table} SET attempted_at = now() - interval '1 day', "
        "progress_at = now() - interval '1 day'"
    )

    assert not is_shown_stalled(store)
    assert store.lost(OLD) == []
    assert store.rescue([lease], OLD) == {}


def test_a_deadline_that_is_over_is_named_before_that_the_attempt_was_given_up(
    store: CanonicalStore, database: Database
) -> None:
    _, lease = claimed(store, lost_attempt(deadline=0.001))
    database.execute("SELECT pg_sleep(0.002)")
    store.forsake([lease])

    assert store.rescue([lease], OLD) == {lease: Rescue.REQUEUED}

    error = database.row()["errors"][-1]["error"]
    assert error == "TimeLimitExceeded: the deadline of 0.0 s is over"


@pytest.mark.parametrize("seconds", [1e300, float("inf")])
def test_a_limit_beyond_every_calendar_disturbs_no_look(
    store: CanonicalStore, database: Database, seconds: float
) -> None:
    quiet(store, database, stall_after=seconds)

    assert not is_shown_stalled(store)
    assert store.lost(OLD) == []
