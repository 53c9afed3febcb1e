"""The values: states, and what a job says of itself."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import pytest
from celery import states

from celery_awa.model import Envelope, Job, JobState, Transition

FINISHED = {JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED}


def job(progress: dict[str, Any] | None) -> Job:
    """A job with this progress."""
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
            "run_at",
            "send_after",
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


def test_an_envelope_is_not_shown_where_a_transition_is() -> None:
    assert "secret" not in repr(
        Transition(JobState.FAILED, envelope=Envelope(b"secret", whole=True))
    )
