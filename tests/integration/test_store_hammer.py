"""One task claimed, retried and begun afresh by many at once: one row, and nothing is lost.

``AWA_TEST_HAMMER_SECONDS`` (default 3) is how long each test strikes.
"""

from __future__ import annotations

import itertools
import os

import pytest

from celery_awa.store.canonical import CanonicalStore

from .hammer import Hammer
from .jobs import Database, attempt

pytest_plugins = ["tests.integration.stores"]

SECONDS = float(os.environ.get("AWA_TEST_HAMMER_SECONDS", "3"))

pytestmark = pytest.mark.timeout(60 + 4 * SECONDS)

#: What looks right and is not: the row is moved and taken over by one statement, whose snapshot
#: is older than the lock that it waits for.
MOVE_BY_ONE_STATEMENT = """
CREATE OR REPLACE FUNCTION {schema}.claim(p_attempt jsonb, p_envelope bytea)
RETURNS TABLE (
    verdict text, id bigint, run_lease bigint, attempt integer, progress jsonb, run_token text,
    committed jsonb, callbacks jsonb
) LANGUAGE sql AS $$
    WITH a AS (
        SELECT * FROM jsonb_populate_record(NULL::{schema}.new_attempt, p_attempt)
    ), moved AS (
        DELETE FROM {schema}.scheduled_jobs s USING a WHERE s.task_id = a.task_id RETURNING s.*
    )
    INSERT INTO {schema}.jobs_hot AS j (
        task_id, kind, state, run_token, attempt_token, run_lease, attempt, progress
    )
    SELECT a.task_id, a.kind, 'running', a.run_token, a.token, coalesce(moved.run_lease, 0) + 1,
        CASE WHEN moved.run_token = a.run_token THEN moved.attempt ELSE 0 END + 1,
        CASE WHEN moved.run_token = a.run_token THEN moved.progress END
    FROM a LEFT JOIN moved USING (task_id)
    ON CONFLICT ON CONSTRAINT jobs_hot_task_id_key DO UPDATE SET
        state = 'running',
        run_token = excluded.run_token,
        attempt_token = excluded.attempt_token,
        run_lease = j.run_lease + 1,
        attempt = CASE WHEN j.run_token = excluded.run_token THEN j.attempt ELSE 0 END + 1,
        progress = CASE WHEN j.run_token = excluded.run_token THEN j.progress END,
        progress_generation = 0
    RETURNING 'yours', j.id, j.run_lease, j.attempt, j.progress, j.run_token, j.committed,
        j.callbacks
$$
"""


def test_one_task_has_one_row_and_no_attempt_loses_what_the_last_one_left(
    database: Database,
) -> None:
    hammer = Hammer(database.url, ["task"])

    assert hammer.strike(SECONDS) == []
    assert hammer.claims > 50 * SECONDS


def test_a_few_tasks_beside_heartbeats_and_batches_of_completed_rows(database: Database) -> None:
    tasks = [f"task {number}" for number in range(4)]
    hammer = Hammer(database.url, tasks, threads=6)
    numbers = itertools.count()

    def complete(store: CanonicalStore) -> None:
        first = next(numbers) // 10 * 10
        store.record_completed([attempt("t", f"short {first + n}") for n in range(10)])

    assert hammer.strike(SECONDS, hammer.beat, complete, complete) == []
    assert hammer.claims > 20 * SECONDS


def test_tasks_that_are_rescued_cancelled_settled_and_sent_again_while_they_are_worked_on(
    database: Database,
) -> None:
    hammer = Hammer(database.url, ["task", "other", "third"], threads=4, disturbed=True)
    beside = (hammer.beat, hammer.rescue, hammer.rescue, hammer.publish, hammer.operate)

    assert hammer.strike(SECONDS, *beside) == []

    assert hammer.claims > 20 * SECONDS
    for what in ("requeued", "cancelled", "settled", "resend", "sent", "told", "requested"):
        assert hammer.disturbances[what] > 0, (what, hammer.disturbances)


def test_a_claim_that_moves_the_row_by_one_statement_would_be_found_out(
    own_database: Database,
) -> None:
    own_database.execute(MOVE_BY_ONE_STATEMENT)

    assert Hammer(own_database.url, ["task"]).strike(10) != []
