"""The values: states, and what a job says of itself."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import pytest
from celery import states

from celery_awa.model import Envelope, Job, JobState, StopReason, Transition

FINISHED = {JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED}


def job(progress: Any, committed: Any = None) -> Job:
    """A job with this progress, and with what was committed."""
    now = datetime.now(timezone.utc)
    unset = dict.fromkeys(
        [
            "queue",
            "max_attempts",
            "worker",
            "progress_at",
            "heartbeat_at",
            "duplicate_at",
            "deadline_at",
            "stall_after",
            "run_at",
            "send_after",
            "callback_id",
            "callback_timeout_at",
            "attempted_at",
            "finalized_at",
            "root_id",
            "parent_id",
            "group_id",
            "group_index",
        ]
    )
    return Job(
        id=1,
        task_id="task",
        kind="kind",
        state=JobState.RUNNING,
        attempt=1,
        retries=0,
        lost_policy="fail",
        max_rescues=3,
        rescues=0,
        resendable=False,
        cancel_requested=False,
        run_lease=1,
        args_repr="",
        kwargs_repr="",
        progress=progress,
        committed=committed,
        stalled=False,
        created_at=now,
        errors=(),
        **unset,
    )


@pytest.mark.parametrize("state", JobState)
def test_each_state_is_its_word_and_has_one_of_celerys(state: JobState) -> None:
    assert str(state) == f"{state}" == state.value
    assert state.celery_state in states.ALL_STATES
    assert state.finished == (state in FINISHED)
    assert state.finished == (state.celery_state in states.READY_STATES)


def test_a_job_reads_its_progress() -> None:
    shown = job({"percent": 40, "message": "x", "metadata": {"last_id": 7}})

    assert (shown.percent, shown.message, shown.metadata) == (40, "x", {"last_id": 7})


@pytest.mark.parametrize("progress", [None, {}, {"percent": None, "metadata": None}])
def test_a_job_without_progress_has_an_empty_checkpoint(progress: dict[str, Any] | None) -> None:
    shown = job(progress)

    assert (shown.percent, shown.message, shown.metadata) == (None, None, {})


@pytest.mark.parametrize(
    ("reported", "committed", "found"),
    [
        ({"a": 1, "b": {"x": 1}}, {"b": {"y": 2}, "c": 3}, {"a": 1, "b": {"y": 2}, "c": 3}),
        ({}, {"a": 1}, {"a": 1}),
        (None, {"a": 1}, {"a": 1}),
        ({"a": 1}, {}, {"a": 1}),
        ({"a": 1}, None, {"a": 1}),
        ({"a": 1}, [7], {"a": 1}),
        (
            {"a": 1, "awa_version": 2},
            {"b": 2, "awa_version": 2},
            {"a": 1, "b": 2, "awa_version": 2},
        ),
        ({"a": 1, "awa_version": 2}, {"a": 2}, {"a": 1, "awa_version": 2}),
        ({"a": 1}, {"b": 2, "awa_version": 1}, {"a": 1, "b": 2, "awa_version": 1}),
        ({"a": 1, "awa_version": "?"}, {"a": 2}, {"a": 2, "awa_version": "?"}),
    ],
)
def test_what_was_committed_goes_before_what_was_reported_unless_older_code_wrote_it(
    reported: Any, committed: Any, found: dict[str, Any]
) -> None:
    assert job({"metadata": reported}, committed).metadata == found


@pytest.mark.parametrize(
    ("progress", "rate", "time_left"),
    [
        ({"current": 10, "total": 60, "rate": 2.5}, 2.5, 20.0),
        ({"current": 60, "total": 60, "rate": 2}, 2, 0.0),
        ({"current": 70, "total": 60, "rate": 2}, 2, 0.0),
        ({"current": 10, "total": None, "rate": 2}, 2, None),
        ({"current": 10, "rate": 2}, 2, None),
        ({"total": 60, "rate": 2}, 2, None),
        ({"current": 10, "total": 60, "rate": 0}, 0, None),
        ({"current": 10, "total": 60, "rate": -1}, -1, None),
        ({"current": 10, "total": 60}, None, None),
        ({"current": "10", "total": 60, "rate": 2}, 2, None),
        ({"current": 10, "total": 60, "rate": True}, None, None),
        ({"current": 10, "total": 60, "rate": "fast"}, None, None),
        ([7], None, None),
        (None, None, None),
    ],
)
def test_the_time_that_is_left_follows_from_the_rate(
    progress: Any, rate: float | None, time_left: float | None
) -> None:
    shown = job(progress)

    assert (shown.rate, shown.time_left) == (rate, time_left)


def test_reasons_to_stop_are_in_the_order_of_their_weight() -> None:
    assert [str(reason) for reason in StopReason] == [
        "lease_lost",
        "cancel",
        "deadline",
        "worker_stopping",
        "max_runtime",
    ]


def test_an_envelope_is_not_shown_where_a_transition_is() -> None:
    assert "secret" not in repr(
        Transition(JobState.FAILED, envelope=Envelope(b"secret", whole=True))
    )
