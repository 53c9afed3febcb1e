"""Tasks under Sentry, whose events go to a file."""

from __future__ import annotations

import json
from typing import Any

import sentry_sdk
from sentry_sdk.envelope import Envelope
from sentry_sdk.integrations.celery import CeleryIntegration
from sentry_sdk.transport import Transport

import celery_awa
from celery_awa import AwaTask
from tests.acceptance.apps.configured import Unlucky, configured_app
from tests.acceptance.diary import note
from tests.waiting import hold

app = configured_app("with_sentry")
celery_awa.install(app)


class FileTransport(Transport):
    """Appends the class of each event's exception to a file."""

    def capture_envelope(self, envelope: Envelope) -> None:
        event = envelope.get_event()
        if event is None:
            return
        with open(app.conf["test_events"], "a") as file:
            for value in event["exception"]["values"]:
                file.write(json.dumps([event["transaction"], value["type"]]) + "\n")


sentry_sdk.init(
    transport=FileTransport(), integrations=[CeleryIntegration()], traces_sample_rate=1.0
)


@app.task(base=AwaTask, bind=True)
def report_and_fail(self: Any, percent: float, gate: str) -> None:
    """Report, wait for the gate, retry once and fail."""
    found = dict(self.checkpoint)
    self.set_progress(percent, "watched")
    wrapped = hasattr(type(self).__call__, "__wrapped__")
    note(self, "reported", checkpoint=found, wrapped=wrapped)
    hold(gate)
    if not self.request.retries:
        self.update_metadata({"last_id": 7})
        raise self.retry(countdown=0)
    raise Unlucky("on purpose")
