"""What the options of a task may be, wherever they are set."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from celery import Celery

from celery_awa import AwaTask, SettingsError

ALLOWED = {
    "lost_policy": "it must be 'requeue', 'fail' or None",
    "max_rescues": "it must be a whole number from 0 to 2,147,483,647",
    "deadline": "it must be a number of seconds greater than 0, or None",
    "max_runtime": "it must be a number of seconds greater than 0, or None",
    "stall_after": "it must be a number of seconds greater than 0, or None",
    "stall_policy": "it must be 'show' or 'stop'",
    "checkpoint_version": "it must be a whole number from 0 to 2,147,483,647",
}


def nothing() -> None:
    """The body of a task."""


def bound(annotations: dict[str, Any] | None = None, **options: Any) -> Any:
    """A task with these options, bound to an app with these annotations."""
    app = Celery("options", set_as_current=False)
    app.conf.task_annotations = annotations
    task = app.task(base=AwaTask, name="options.task", shared=False, **options)(nothing)
    app.finalize()
    return task


def test_a_task_that_says_nothing_has_the_documented_options() -> None:
    task = bound()
    assert (task.lost_policy, task.max_rescues, task.deadline) == (None, 3, None)
    assert (task.max_runtime, task.stall_after, task.stall_policy) == (None, None, "show")
    assert task.checkpoint_version == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lost_policy", "requeue"),
        ("lost_policy", "fail"),
        ("max_rescues", 0),
        ("max_rescues", 2**31 - 1),
        ("deadline", 0.5),
        ("deadline", 3_600),
        ("max_runtime", 60),
        ("stall_after", 60.5),
        ("stall_policy", "stop"),
        ("checkpoint_version", 2),
    ],
)
def test_an_option_is_set_by_the_task_or_by_an_annotation(name: str, value: Any) -> None:
    assert getattr(bound(**{name: value}), name) == value
    assert getattr(bound({"options.task": {name: value}}), name) == value
    assert getattr(bound({"*": {name: value}}), name) == value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("lost_policy", value) for value in ("again", "", True, ["requeue"])),
        *(("max_rescues", value) for value in (-1, 2**31, 1.0, "3", None, True)),
        *(("deadline", value) for value in (0, -1, float("nan"), float("inf"), 1e9, "5", True)),
        ("deadline", Decimal(5)),
        ("max_runtime", 0),
        ("stall_after", "60"),
        *(("stall_policy", value) for value in (None, "fail", True, ["stop"])),
        *(("checkpoint_version", value) for value in (-1, 1.0, "1", None, True)),
    ],
)
def test_a_wrong_option_says_which_task_what_it_is_and_what_is_allowed(
    name: str, value: Any
) -> None:
    for make in (lambda: bound(**{name: value}), lambda: bound({"*": {name: value}})):
        with pytest.raises(SettingsError) as told:
            make()
        assert str(told.value) == f"{name} of task options.task is {value!r}; {ALLOWED[name]}"
