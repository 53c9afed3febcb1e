"""Tasks of every make that Celery and its companions know, and each of them reports.

No postponed annotations: Celery before 5.6 hands those to pydantic as they are.
"""

from typing import Any

from celery import Task, current_task, shared_task
from pydantic import BaseModel

import celery_awa
from celery_awa import AwaMixin, AwaTask, current_attempt
from tests.acceptance.apps.configured import configured_app
from tests.acceptance.diary import note
from tests.waiting import hold

app = configured_app("integrated")
celery_awa.install(app)


def report(task: Any, percent: float, make: str, gate: str | None) -> float:
    """Report, wait for the gate and return the percent."""
    task.set_progress(percent, make)
    note(task, "reported", lost_policy=task.lost_policy)
    hold(gate)
    return percent


@shared_task(base=AwaTask, bind=True)
def shared(self: Any, percent: float, gate: str | None = None) -> float:
    """A task of a reusable application."""
    return report(self, percent, "shared", gate)


@app.task(base=AwaTask, bind=False)
def unbound(percent: float, gate: str | None = None) -> float:
    """A task that does not get itself."""
    current_attempt().set_progress(percent, "unbound")
    note(current_task, "reported", lost_policy=current_task.lost_policy)
    hold(gate)
    return percent


class Import(AwaTask):
    """A task that is a class."""

    name = f"{__name__}.class_based"
    lost_policy = "fail"

    def run(self, percent: float, gate: str | None = None) -> float:
        return report(self, percent, "class", gate)


class_based = app.register_task(Import())


class Order(BaseModel):
    """What a customer wants."""

    number: int
    customer: str = "nobody"


@app.task(base=AwaTask, bind=True, pydantic=True)
def validated(self: Any, order: Order, gate: str | None = None) -> Order:
    """A task whose argument and result are models."""
    report(self, order.number, type(order).__name__, gate)
    return order


class Usual(Task):
    """A base of the user's own, which passes the call on as Celery's documentation does."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


class UsualAwa(AwaMixin, Usual):
    """The same with ours before it."""


def look_around(task: Any, depth: int) -> list[dict[str, Any]]:
    """What the request says in the body, in the same task called within, and in the body again."""
    own = _request_of(task)
    inner = task(depth - 1) if depth else []
    return [own, *inner, _request_of(task)]


def _request_of(task: Any) -> dict[str, Any]:
    request = task.request
    return {
        "id": request.id,
        "args": list(request.args),
        "delivered": request.delivery_info is not None,
        "called_directly": request.called_directly,
        "requests": len(task.request_stack),
        "attempt": bool(getattr(task, "attempt", None)),
    }


@app.task(base=AwaTask, bind=True)
def look(self: Any, depth: int) -> list[dict[str, Any]]:
    """Look around as an AwaTask."""
    return look_around(self, depth)


@app.task(base=UsualAwa, bind=True)
def look_through_base(self: Any, depth: int) -> list[dict[str, Any]]:
    """Look around below a base that calls super."""
    return look_around(self, depth)


@app.task(base=Usual, bind=True)
def look_without(self: Any, depth: int) -> list[dict[str, Any]]:
    """Look around without the plugin."""
    return look_around(self, depth)
