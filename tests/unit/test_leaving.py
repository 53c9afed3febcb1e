"""Tasks that leave off while something strikes, or where nobody keeps what they would need."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded

from celery_awa import AwaTask
from celery_awa.model import JobState
from celery_awa.plugin import leaving, lifecycle
from celery_awa.testing import run_task

app = Celery("leaving", set_as_current=False)


@app.task(shared=False, base=AwaTask, bind=True, max_runtime=5, deadline=9)
def leaves(self: Any) -> None:
    """Keep something and leave off."""
    self.update_metadata({"left": 1})
    self.snooze(60)


@pytest.mark.parametrize("step", ["settle", "end"])
def test_a_time_limit_that_strikes_a_task_which_leaves_off_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    taken = getattr(lifecycle, step)
    strikes = iter([SoftTimeLimitExceeded()])

    def struck(*args: Any, **options: Any) -> Any:
        for strike in strikes:
            raise strike
        return taken(*args, **options)

    monkeypatch.setattr(leaving.lifecycle, step, struck)
    run = run_task(leaves)
    assert (run.state, run.error, run.checkpoint) == (JobState.SCHEDULED, None, {"left": 1})
    assert next(strikes, None) is None


def test_nobody_is_asked_to_stop_where_nobody_keeps_what_he_would_go_on_from() -> None:
    # No process of ours here: a worker without our step, say.
    terms = lifecycle._terms(leaves, leaves.request_stack.top or leaves.request)
    assert (terms.max_runtime, terms.deadline) == (None, None)
