"""Called on the rescue thread, or in the command ``rescue``: messages sent again, and ends told.

``continuing`` is called on the task's thread too.

Past the task's class, whose ``apply_async`` may be somebody else's, and also where this app
does not register the task.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from ..errors import ForeignBroker, Unsendable
from ..model import JobState, LostJob, UnsentJob
from . import envelope, message, wire
from .broker import Broker
from .results import Results


class Courier:
    """The way from the jobs to an app's broker and result backend. For one thread at a time."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._broker = Broker(app)
        self._results = Results(app)

    def result(self, job: LostJob | UnsentJob) -> JobState | None:
        """How this run ended, if the result backend holds a final result of it.

        Raises if the backend cannot be asked.
        """
        found = self._results.final(job)
        return None if found is None else found.state

    def send(self, job: UnsentJob) -> None:
        """Publish the message of a job under the same id, as the next of its run.

        A message that has expired is sent as well: the worker that gets it revokes it, and says
        so. Raises Unsendable if it can never be sent, ForeignBroker or ForeignEnvelope if it is not
        ours to send, and what kombu raises if it cannot be sent now.
        """
        kept = self._opened(job)
        if job.envelope is None or not job.envelope.whole:
            raise Unsendable("it was kept without its arguments")
        eta = job.run_at if job.run_at and job.run_at > datetime.now(timezone.utc) else None
        self._broker.publish(continuing(kept, job.run_token, job.lease.run_lease, eta))

    def tell(self, job: UnsentJob) -> None:
        """Make the result backend, chord, chain and errbacks know of a failed or cancelled job.

        Raises if they cannot be told now, ForeignBroker or ForeignEnvelope if they are not ours
        to tell.
        """
        if job.envelope is not None:
            try:
                self._opened(job)
            except Unsendable:
                # Nobody will ever know whom else to tell. Who waits for the result is to hear.
                job = replace(job, envelope=None)
        self._results.tell(job)

    def _opened(self, job: UnsentJob) -> wire.Message:
        kept = envelope.opened(job.envelope)
        ours = wire.broker_of(self._app)
        if kept.broker != ours:
            # Whoever works on that broker finds the job as well, ten seconds later.
            raise ForeignBroker(
                f"its message came from the broker {kept.broker}, this one is {ours}: "
                "give each broker's jobs a schema of their own (awa_schema)"
            )
        return kept

    def close(self) -> None:
        """Close the connection to the broker now; unused, it closes by itself. Never raises."""
        self._broker.close()


def continuing(
    kept: wire.Message, run: str | None, lease: int | None, eta: datetime | None
) -> wire.Message:
    """The message as the next of its run: after this lease, and not before ``eta``."""
    headers = {**kept.headers, "eta": eta.astimezone(timezone.utc).isoformat() if eta else None}
    if run is not None:
        headers[message.RUN] = run
    if lease is not None:
        headers[message.FROM] = lease
    return replace(kept, headers=headers)
