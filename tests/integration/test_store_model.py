"""The store under whatever can happen to one task, checked by a plain model of what it promises.

And the test of that test: faults that are easily made, planted, must be found within its budget.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from celery_awa.model import Beat, Lease, Pulse
from celery_awa.store import sql_files
from celery_awa.store.canonical import CanonicalStore
from tests.conftest import SCHEMA

from .jobs import Database
from .promises import BrokenPromise
from .store_machine import Server, StoreMachine

pytest_plugins = ["tests.integration.stores"]

BUDGET = settings(
    max_examples=150,
    stateful_step_count=40,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    # What was called is told in full; a shorter way to the same fault is not looked for.
    phases=[Phase.generate],
    report_multiple_bugs=False,
)


@pytest.fixture
def server(own_database: Database) -> Iterator[Server]:
    """Connections to the test's own database."""
    made = Server(own_database.url, SCHEMA)
    yield made
    made.close()


def machine(server: Server, **members: Any) -> type[StoreMachine]:
    """The machine over that server."""
    return type("Machine", (StoreMachine,), {"server": server, **members})


def test_whatever_happens_the_promises_are_kept(server: Server) -> None:
    run_state_machine_as_test(machine(server), settings=BUDGET)


@dataclass(frozen=True)
class Fault:
    """A function of the database, what stands in it and would stand there, and what is broken."""

    function: str
    changes: Sequence[tuple[str, str]]
    broken: str

    def plant(self, database: Database) -> None:
        text = _statement_that_makes(self.function)
        for old, new in self.changes:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        database.execute(text)


def _statement_that_makes(function: str) -> str:
    for _, _, migration in sql_files.migrations():
        made = re.search(
            rf"^CREATE (FUNCTION \{{schema\}}\.{function}\(.*?^\$\$;$)",
            migration,
            re.DOTALL | re.MULTILINE,
        )
        if made:
            return f"CREATE OR REPLACE {made[1]}"
    raise LookupError(function)


#: What looks right and is not: the hot row is taken and the other table looked into by one
#: statement, so with a snapshot that is older than the lock which it waits for.
GIVEN = r"given to a copy, or to an older attempt|was told Answer.DONE instead of Answer.GONE"
BY_ONE_STATEMENT = Fault(
    "claim",
    [
        (
            "        INSERT INTO {schema}.jobs_hot AS j (",
            "        WITH made AS (INSERT INTO {schema}.jobs_hot AS j (",
        ),
        (
            """        RETURNING j.* INTO job;
        IF FOUND THEN
            SELECT s.* INTO waiting FROM {schema}.scheduled_jobs s
            WHERE s.task_id = a.task_id FOR UPDATE;
            IF NOT FOUND THEN
""",
            """        RETURNING j.id)
        SELECT s.* INTO waiting FROM made
        LEFT JOIN {schema}.scheduled_jobs s ON s.task_id = a.task_id;
        IF FOUND THEN
            SELECT j.* INTO job FROM {schema}.jobs_hot j WHERE j.task_id = a.task_id;
            IF waiting.id IS NULL THEN
""",
        ),
    ],
    f"in both tables|{GIVEN}",
)
FAULTS = {
    "generation compared in WHERE": Fault(
        "heartbeat_with_progress",
        [("AND (NOT p_skip", "AND b.generation > j.progress_generation AND (NOT p_skip")],
        "never told that it is lost",
    ),
    "no lease guard": Fault(
        "heartbeat_with_progress",
        [("j.id = b.id AND j.run_lease = b.run_lease AND", "j.id = b.id AND")],
        "changed the row: beat|without the lease is never confirmed",
    ),
    "the row is moved by one statement": BY_ONE_STATEMENT,
    "no state guard": Fault(
        "heartbeat_with_progress",
        [
            (
                "AND j.run_lease = b.run_lease AND j.state = 'running'\n",
                "AND j.run_lease = b.run_lease\n",
            )
        ],
        "without the lease is never confirmed",
    ),
    "a rescue trusts its look": Fault(
        "rescue",
        [("CONTINUE WHEN reason IS NULL;", "reason := coalesce(reason, 'lost');")],
        "a living attempt was rescued",
    ),
    "a latecomer takes the job": Fault(
        "claim_decision",
        [("WHEN j.attempted_at > now() - make_interval(secs => a.began_ago) THEN 'older'", "")],
        GIVEN,
    ),
    "a copy takes the job of a living attempt": Fault(
        "claim_decision",
        [("OR j.lost_policy = 'requeue' AND j.envelope_whole", "")],
        GIVEN,
    ),
    "what is handed out counts as sent": Fault(
        "unsent",
        [
            (
                "UPDATE {schema}.jobs_hot j SET send_after = now() + interval '10 seconds', "
                "sent_at = NULL",
                "UPDATE {schema}.jobs_hot j SET send_after = NULL, sent_at = NULL",
            )
        ],
        "was forgotten",
    ),
    "what does not come is not missed": Fault(
        "unsent", [("UNION ALL TABLE hot_again UNION ALL TABLE waiting_again", "")], "never missed"
    ),
    "what is to run later is missed before": Fault(
        "unsent",
        [("            AND greatest(s.sent_at, s.run_at) <=", "            AND s.sent_at <=")],
        "though it may come yet",
    ),
    "a claim leaves the note that its message was sent": Fault(
        "claim", [("            sent_at = NULL,\n", "")], "published at"
    ),
    "a retry after a cancellation": Fault(
        "end_attempt",
        [("cancelled := job.cancel_requested", "cancelled := false")],
        "after a cancellation is told to leave",
    ),
    "any token answers the callback that is expected": Fault(
        "answer_callback",
        [("job.callback_id IS DISTINCT FROM p_callback_id", "job.callback_id IS NULL")],
        "a reply was told",
    ),
    "an answer that came early is waited for": Fault(
        "end_attempt",
        [
            (
                "answered := waits AND t.callback_id IS DISTINCT FROM job.callback_id",
                "answered := false",
            )
        ],
        "waits for what nobody can answer|the row says",
    ),
    "an end to wait is forgotten when its answer comes": Fault(
        "ended_before",
        [("CASE WHEN j.callback_name IS NULL THEN", "CASE WHEN true THEN")],
        "told Answer.GONE instead of Answer.REPEATED",
    ),
    "what is committed is not guarded by the lease": Fault(
        "checkpoint_in",
        [("AND j.run_lease = p_run_lease AND j.attempt_token = p_token", "")],
        "who has the job commits",
    ),
    "a new run finds what the last one committed": Fault(
        "claim",
        [("CASE decision WHEN 'fresh' THEN NULL ELSE j.committed END", "j.committed")],
        "committed was",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_database_is_found(
    own_database: Database, server: Server, name: str
) -> None:
    FAULTS[name].plant(own_database)

    with pytest.raises(BrokenPromise, match=FAULTS[name].broken):
        run_state_machine_as_test(machine(server), settings=BUDGET)


def test_a_move_by_one_statement_is_found_by_what_overlaps_only(
    own_database: Database, server: Server
) -> None:
    BY_ONE_STATEMENT.plant(own_database)
    in_turn = machine(server, _two_at_once=lambda self: self._work())

    run_state_machine_as_test(in_turn, settings=settings(BUDGET, max_examples=30))


class AcknowledgesWhatItSent:
    """A store that does not ask the database which rows it reached."""

    def __init__(self, store: CanonicalStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def heartbeat_with_progress(self, beats: Sequence[Beat]) -> dict[Lease, Pulse]:
        self._store.heartbeat_with_progress(beats)
        asked = self._store._connection.execute(
            f"SELECT bool_or(cancel_requested) FROM {SCHEMA}.jobs"
        ).fetchone()
        return {
            beat.lease: Pulse(beat.snapshot.generation, bool(asked and asked[0]))
            for beat in beats
            if beat.snapshot
        }


def test_an_acknowledgement_of_what_was_sent_is_found(server: Server) -> None:
    through = staticmethod(AcknowledgesWhatItSent)

    with pytest.raises(BrokenPromise, match=r"without the lease is never confirmed|stored is"):
        run_state_machine_as_test(machine(server, through=through), settings=BUDGET)
