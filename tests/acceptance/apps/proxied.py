"""Tasks that Celery gets as proxies, which is how New Relic's agent hands them on."""

from __future__ import annotations

from typing import Any

from celery.app import trace

import celery_awa
from celery_awa import AwaTask
from tests.acceptance.apps.configured import configured_app
from tests.acceptance.diary import note
from tests.waiting import hold

app = configured_app("proxied")
celery_awa.install(app)


class TaskProxy:
    """Everything of the task's, its class included; only the call is this one's first."""

    def __init__(self, wrapped: Any) -> None:
        object.__setattr__(self, "__wrapped__", wrapped)

    @property
    def __class__(self) -> type:
        return type(self.__wrapped__)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__wrapped__, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__wrapped__, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        note(self.__wrapped__, "traced")
        return self.__wrapped__(*args, **kwargs)

    run = __call__


build_tracer = trace.build_tracer


def build_tracer_of_proxy(name: str, task: Any, *args: Any, **kwargs: Any) -> Any:
    """Celery's, given a proxy."""
    return build_tracer(name, TaskProxy(task), *args, **kwargs)


trace.build_tracer = build_tracer_of_proxy


@app.task(base=AwaTask, bind=True)
def retry_once(self: Any, percent: float, gate: str) -> dict[str, Any]:
    """Report, wait for the gate and retry; the second attempt returns what it found."""
    if self.request.retries:
        return dict(self.checkpoint)
    self.set_progress(percent, "traced")
    self.update_metadata({"last_id": 7})
    hold(gate)
    raise self.retry(countdown=0)
