"""Claims: whose the row is, which run a message belongs to, and what an attempt begins with."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pytest

from celery_awa.errors import StoreRefused
from celery_awa.model import (
    Answer,
    Beat,
    Claim,
    Ended,
    Envelope,
    JobState,
    NewAttempt,
    Snapshot,
    Transition,
    Verdict,
)
from celery_awa.store.canonical import CanonicalStore

from .jobs import (
    FINISHED,
    IN_PART,
    WAITING,
    WHOLE,
    Database,
    Row,
    attempt,
    claimed,
    retried_job,
    running,
    snapshot,
    stored,
)

pytest_plugins = ["tests.integration.stores"]


@dataclass(frozen=True)
class Decided:
    """What one message is told, by the state of a job with lease 2 and retries 1.

    ``running`` counts where the row cannot bring the task back, ``kept`` where it can.
    """

    waiting: str
    available: str
    running: str
    kept: str
    finished: str

    def of(self, state: JobState, *, kept: bool) -> str:
        if state in WAITING:
            return self.waiting
        if state is JobState.RUNNING and kept:
            return self.kept
        return self.finished if state in FINISHED else getattr(self, state.value)


FRESH = Decided("fresh", "fresh", "fresh", "fresh", "fresh")
NEWER = Decided("continue", "continue", "continue", "continue", "finished")
OWN = Decided("finished", "continue", "continue", "held", "finished")
OWN_AND_USED = replace(OWN, running="held")
USED = replace(OWN_AND_USED, available="finished")

UNNAMED = {"run_named": False, "run_token": "delivery 2"}

MESSAGES: dict[str, tuple[dict[str, Any], Decided]] = {
    "another run": ({"run_token": "other"}, FRESH),
    "another run, returned": ({"run_token": "other", "redelivered": True}, FRESH),
    "another run's retry": ({"run_token": "other", "retries": 3, "from_lease": 9}, FRESH),
    "the next retry": ({"retries": 2, "from_lease": 2}, NEWER),
    "the next retry, published before the lease was known": ({"retries": 2}, NEWER),
    "a message of ours that follows the row": ({"retries": 1, "from_lease": 2}, NEWER),
    "the row's own message again": ({"retries": 1, "from_lease": 1}, OWN_AND_USED),
    "the row's own message, returned": (
        {"retries": 1, "from_lease": 1, "redelivered": True},
        OWN_AND_USED,
    ),
    "a copy of the row's own message that names no lease": ({"retries": 1}, OWN_AND_USED),
    "the first message again": ({}, USED),
    "the first message, returned": ({"redelivered": True}, USED),
    "a user's own, no run named": (UNNAMED, replace(USED, finished="fresh")),
    "a user's own, returned": (UNNAMED | {"redelivered": True}, USED),
    "a user's own retry": (UNNAMED | {"retries": 2}, NEWER),
    "a user's own that carries the lease": (UNNAMED | {"retries": 1, "from_lease": 2}, NEWER),
    "a user's own that carries the lease, not retried": (UNNAMED | {"from_lease": 2}, USED),
    "the delivery that began the run": ({"run_named": False, "run_token": "run"}, USED),
    "the attempt that has the row": (
        {"token": "second", "retries": 1, "from_lease": 1},
        Decided("ended", "ended", "repeat", "repeat", "ended"),
    ),
}
ROWS: dict[str, tuple[dict[str, Any], bool]] = {
    "fail": ({"lost_policy": "fail", "envelope": WHOLE}, False),
    "requeue": ({"lost_policy": "requeue", "envelope": WHOLE}, True),
    "requeue, its message not whole": ({"lost_policy": "requeue", "envelope": IN_PART}, False),
}


@pytest.mark.parametrize("policy", ROWS)
@pytest.mark.parametrize("name", MESSAGES)
def test_the_decision_for_each_message_in_every_state(
    store: CanonicalStore, database: Database, name: str, policy: str
) -> None:
    row, kept = ROWS[policy]
    fields, expected = MESSAGES[name]
    wanted, told = {}, {}
    for state in JobState:
        for late in (False, True):
            task_id = f"{state}, late: {late}"
            retried_job(store, task_id, state, **row)
            began_at = time.monotonic() if late else None  # after the one that has the row
            new = attempt(**({"token": "new", "task_id": task_id, "began_at": began_at} | fields))
            told[task_id] = _decision(store, database, new)
            wanted[task_id] = expected.of(state, kept=kept)
    assert told == wanted


@pytest.mark.parametrize("name", [name for name in MESSAGES if "token" not in MESSAGES[name][0]])
def test_an_attempt_never_takes_a_job_from_one_that_began_after_it(
    store: CanonicalStore, database: Database, name: str
) -> None:
    fields, _ = MESSAGES[name]
    for state in JobState:
        retried_job(store, state.value, state)
        before = database.row(state.value)
        older = attempt(
            **({"token": "old", "task_id": state.value, "began_at": time.monotonic() - 60} | fields)
        )
        assert store.claim(older) == Claim(Verdict.HELD)
        for transition in (Transition(None), Transition(JobState.FAILED)):
            assert store.end_unclaimed(older, transition) == Ended(Answer.GONE)
        store.record_completed([older])
        assert database.row(state.value) == before


@pytest.mark.parametrize("run", ["run", "another run"])
def test_a_message_that_is_not_executed_leaves_a_running_attempt_alone(
    store: CanonicalStore, database: Database, run: str
) -> None:
    running(store, "task")
    before = database.row("task")
    expired = attempt("copy", "task", run_token=run, redelivered=True, unstarted=True)
    ended = store.end_unclaimed(expired, Transition(JobState.CANCELLED, uncounted=True))
    assert (ended, database.row("task")) == (Ended(Answer.GONE), before)


def test_a_message_of_an_older_run_that_is_not_executed_leaves_a_waiting_run_alone(
    store: CanonicalStore, database: Database
) -> None:
    retried_job(store, "task", JobState.RETRYABLE)
    before = database.row("task")
    expired = attempt("copy", "task", run_token="older run", unstarted=True)
    assert store.end_unclaimed(expired, Transition(JobState.CANCELLED)) == Ended(Answer.GONE)
    assert database.row("task") == before


def _decision(store: CanonicalStore, database: Database, new: NewAttempt) -> str:
    """Claim, check that the row followed the decision, and return the decision."""
    before = database.row(new.task_id)
    claim = store.claim(new)
    after = database.row(new.task_id)
    if claim.verdict is not Verdict.YOURS:
        # A copy that meets a live attempt leaves a mark, and nothing else is changed.
        assert (after.pop("duplicate_at") is not None) is (claim.verdict is Verdict.HELD)
        assert after.items() <= before.items()
        return claim.verdict.value
    assert claim.lease is not None
    assert (claim.lease.job_id, claim.lease.run_lease) == (after["id"], after["run_lease"])
    assert (claim.attempt, claim.progress) == (after["attempt"], after["progress"])
    assert claim.run_token == after["run_token"]
    if after == before:
        return "repeat"
    _assert_taken(before, after, new)
    if new.run_token == after["run_token"] != before["run_token"]:
        _assert_fresh(before, after, new)
        return "fresh"
    _assert_continued(before, after, new)
    return "continue"


def _assert_taken(before: Row, after: Row, new: NewAttempt) -> None:
    assert after["id"] == before["id"]
    assert after["run_lease"] == before["run_lease"] + 1
    assert (after["table"], after["state"]) == ("jobs_hot", "running")
    assert (after["attempt_token"], after["retries"]) == (new.token, new.retries)
    assert (after["run_at"], after["send_after"], after["finalized_at"]) == (None, None, None)
    assert after["heartbeat_at"] >= after["attempted_at"] > before["attempted_at"]
    assert (after["heartbeat_at"] == after["attempted_at"]) == (new.began_at is None)


def _assert_fresh(before: Row, after: Row, new: NewAttempt) -> None:
    assert after["attempt"] == new.retries + 1
    assert (after["progress"], after["progress_at"], after["errors"]) == (None, None, [])
    assert after["created_at"] > before["created_at"]


def _assert_continued(before: Row, after: Row, new: NewAttempt) -> None:
    assert after["attempt"] == max(before["attempt"], new.retries) + 1
    assert after["progress"] == before["progress"]
    kept = ("run_token", "progress_at", "errors", "created_at", "rescues", "rescues_in_place")
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}


def test_the_first_claim_of_a_task_makes_its_row(store: CanonicalStore, database: Database) -> None:
    claim, lease = claimed(store, attempt(retries=0))

    assert lease.run_lease == 1
    assert (claim.attempt, claim.progress, claim.run_token) == (1, None, "run")
    assert database.row()["state"] == "running"


def test_what_the_message_says_lands_in_the_row(store: CanonicalStore, database: Database) -> None:
    told: dict[str, Any] = {
        "kind": "shop.refund",
        "queue": "low",
        "worker": "w2@host",
        "max_attempts": 6,
        "args_repr": "('naïve \N{PARTY POPPER}',)",
        "kwargs_repr": "{'a': 1}",
        "lost_policy": "requeue",
        "max_rescues": 7,
        "root_id": "root",
        "parent_id": "parent",
        "group_id": "group",
        "group_index": 7,
    }
    retried_job(store, "waiting", JobState.RETRYABLE)
    for new in (attempt("new", "new", **told), attempt("third", "waiting", retries=2, **told)):
        claimed(store, replace(new, envelope=Envelope(b"\x00\xff", whole=True), deadline=60.5))
        found = database.row(new.task_id)
        assert {name: found[name] for name in told} == told
        assert (found["envelope"], found["envelope_whole"]) == (b"\x00\xff", True)
        assert found["deadline_at"] - found["attempted_at"] == timedelta(seconds=60.5)


def test_a_deadline_counts_from_the_attempts_beginning_however_late_its_claim(
    store: CanonicalStore, database: Database
) -> None:
    claimed(store, attempt(deadline=90, began_at=time.monotonic() - 60))

    left = database.execute("SELECT deadline_at - now() AS left FROM {schema}.jobs")[0]["left"]
    assert timedelta(seconds=20) < left <= timedelta(seconds=30)


def test_an_unnamed_first_message_begins_a_run_by_the_name_made_for_it(
    store: CanonicalStore,
) -> None:
    claim, _ = claimed(store, attempt(run_token="delivery 1", run_named=False))

    assert claim.run_token == "delivery 1"


def test_a_message_without_a_name_continues_the_run_that_the_row_names(
    store: CanonicalStore,
) -> None:
    running(store)

    claim, _ = claimed(store, attempt("second", run_token="delivery 2", run_named=False))

    assert claim.run_token == "run"


@pytest.mark.parametrize(
    ("retries", "number"), [(0, 1), (3, 4)], ids=["from the start", "retried before"]
)
def test_a_first_claim_counts_the_retries_that_left_no_row(
    store: CanonicalStore, retries: int, number: int
) -> None:
    assert claimed(store, attempt(retries=retries))[0].attempt == number


@pytest.mark.parametrize(
    ("retries", "number"), [(1, 3), (2, 3), (7, 8)], ids=["the row's", "one more", "many more"]
)
def test_the_number_is_one_more_than_the_larger_of_rows_attempt_and_retries(
    store: CanonicalStore, retries: int, number: int
) -> None:
    retried_job(store, "task", JobState.RETRYABLE)

    claim, _ = claimed(store, attempt("third", retries=retries, from_lease=2))

    assert claim.attempt == number


def test_a_snoozed_attempt_gives_its_number_back(store: CanonicalStore) -> None:
    for lease_number in range(1, 4):
        claim, lease = claimed(store, attempt(f"{lease_number}", from_lease=lease_number - 1))
        assert (claim.attempt, lease.run_lease) == (1, lease_number)
        store.end(lease, f"{lease_number}", Transition(JobState.SCHEDULED, uncounted=True))


def test_only_a_claim_raises_the_lease(store: CanonicalStore, database: Database) -> None:
    lease = running(store)
    store.claim(attempt())
    store.heartbeat([lease])
    store.heartbeat_with_progress([Beat(lease, snapshot())])
    store.end(lease, "first", Transition(JobState.RETRYABLE, unsent=True))
    store.end(lease, "first", Transition(JobState.RETRYABLE))
    store.sent(lease)
    store.claim(attempt("late copy"))

    assert database.row()["run_lease"] == 1


def test_the_same_attempt_that_claims_again_gets_the_same_answer(store: CanonicalStore) -> None:
    retried_job(store, "task", JobState.RETRYABLE)
    new = attempt("third", retries=2, from_lease=2)

    assert store.claim(new) == store.claim(new)


def test_an_attempt_that_has_ended_is_told_so_by_every_further_claim(
    store: CanonicalStore, database: Database
) -> None:
    lease = running(store)
    store.end(lease, "first", Transition(JobState.FAILED, snapshot()))
    before = database.row()

    assert store.claim(attempt(redelivered=True, began_at=time.monotonic() - 60)) == Claim(
        Verdict.ENDED
    )
    assert database.row() == before


def test_the_third_attempt_reads_what_the_first_left_when_the_second_set_nothing(
    store: CanonicalStore,
) -> None:
    retried_job(store, "task", JobState.RETRYABLE)

    claim, _ = claimed(store, attempt("third", retries=2, from_lease=2))

    assert claim.progress == stored()


def test_each_attempt_counts_its_own_generations(store: CanonicalStore, database: Database) -> None:
    lease = running(store)
    store.heartbeat_with_progress([Beat(lease, snapshot(500, percent=50))])
    store.end(lease, "first", Transition(JobState.RETRYABLE))
    _, lease = claimed(store, attempt("second", retries=1))

    pulses = store.heartbeat_with_progress([Beat(lease, snapshot(1, percent=60))])

    assert pulses[lease].generation == 1
    assert database.row()["progress"] == stored(60)


def test_a_late_copy_of_a_finished_run_leaves_the_kept_progress_alone(
    store: CanonicalStore, database: Database
) -> None:
    lease = running(store)
    store.end(lease, "first", Transition(JobState.FAILED, snapshot(percent=70), error="boom"))

    assert store.claim(attempt("copy", redelivered=True)) == Claim(Verdict.FINISHED)
    assert database.row()["progress"] == stored(70)


def test_a_new_run_of_a_failed_job_begins_empty(store: CanonicalStore, database: Database) -> None:
    lease = running(store)
    store.end(lease, "first", Transition(JobState.FAILED, snapshot(), error="boom"))
    database.execute(
        "UPDATE {schema}.jobs_hot SET rescues = 2, rescues_in_place = 1, rescue_mark = 'mark'"
    )

    claim, lease = claimed(store, attempt("again", run_token="run 2"))

    assert (claim.progress, claim.attempt, lease.run_lease) == (None, 1, 2)
    found = database.row()
    assert (found["rescues"], found["rescues_in_place"]) == (0, 0)
    assert (found["rescue_mark"], found["errors"]) == (None, [])


@pytest.mark.parametrize(("run", "kept"), [("run", True), ("other", False)])
def test_a_claim_clears_what_belonged_to_the_last_attempt(
    store: CanonicalStore, database: Database, run: str, kept: bool
) -> None:
    retried_job(store, "task", JobState.RETRYABLE)
    database.execute(
        "UPDATE {schema}.scheduled_jobs SET cancel_requested = true, duplicate_at = now(), "
        "deadline_at = now(), callback_id = 'callback', callback_timeout_at = now(), "
        "taken_by = 'operator', resends = 2",
    )

    claimed(store, attempt("third", retries=2, run_token=run))

    found = database.row()
    assert found["cancel_requested"] is kept
    assert found["resends"] == 0
    for name in ("duplicate_at", "deadline_at", "callback_id", "callback_timeout_at", "taken_by"):
        assert found[name] is None, name


def test_a_claim_stores_its_own_envelope_or_none(store: CanonicalStore, database: Database) -> None:
    lease = claimed(store, attempt(envelope=Envelope(b"first", whole=True)))[1]
    store.end(
        lease, "first", Transition(JobState.RETRYABLE, envelope=Envelope(b"whole", whole=True))
    )
    claimed(store, attempt("second", retries=1))

    assert database.row()["envelope"] is None


def test_a_task_id_of_512_characters_is_taken_and_a_longer_one_refused(
    store: CanonicalStore, database: Database
) -> None:
    widest = "\N{PARTY POPPER}" * 512
    running(store, widest)
    assert database.row(widest)["state"] == "running"

    with pytest.raises(StoreRefused, match="task_id"):
        store.claim(attempt(task_id=widest + "x"))
    assert database.rows(widest + "x") == []


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "nul \0"},
        {"args_repr": "surrogate \ud800"},
        {"task_id": "surrogate \ud800"},
        {"retries": 2**31 - 1},
        {"from_lease": 10**30, "token": "big"},
    ],
    ids=["nul", "surrogate", "surrogate in the id", "retries", "lease"],
)
def test_a_message_that_cannot_be_stored_is_refused_and_leaves_no_row(
    store: CanonicalStore, database: Database, fields: dict[str, Any]
) -> None:
    with pytest.raises(StoreRefused):
        store.claim(attempt(**fields))

    assert database.count() == 0


def test_progress_of_any_shape_is_brought_back_as_it_was(store: CanonicalStore) -> None:
    text = (
        '{"percent": 1, "message": "\u05e9\u05dc\u05d5\u05dd \\\\u0000 \U0001f469\u200d\U0001f680",'
        ' "metadata": {"": null, "n": 9223372036854775807, "f": 1e-7, "l": [[[]], {}]}}'
    )
    lease = running(store)
    store.end(lease, "first", Transition(JobState.RETRYABLE, Snapshot(1, text)))

    claim, _ = claimed(store, attempt("second", retries=1))

    assert claim.progress == {
        "percent": 1,
        "message": "\u05e9\u05dc\u05d5\u05dd \\u0000 \U0001f469\u200d\U0001f680",
        "metadata": {"": None, "n": 9223372036854775807, "f": 1e-7, "l": [[[]], {}]},
    }


def test_knows_tells_whether_a_task_has_a_row_in_either_table(store: CanonicalStore) -> None:
    for state in JobState:
        retried_job(store, state.value, state)

    assert all(store.knows(state.value) for state in JobState)
    assert not store.knows("unknown")
