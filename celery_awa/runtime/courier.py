"""Called on the rescue thread only: the way to the broker and to the result backend."""

from __future__ import annotations

from typing import Protocol

from ..model import JobState, LostJob, UnsentJob


class Courier(Protocol):
    """Publishes what the database says is to be published. Its calls may block for seconds."""

    def result(self, job: LostJob | UnsentJob) -> JobState | None:
        """How this run ended, if the result backend holds a final result of it.

        Raises if the backend cannot be asked.
        """
        ...

    def send(self, job: UnsentJob) -> None:
        """Publish the message of a job that waits for it; its envelope is there and whole.

        Raises Unsendable if that can never be done, anything else if it may be later.
        """
        ...

    def tell(self, job: UnsentJob) -> None:
        """Make the result backend, errbacks and chord know of a failed or cancelled job.

        Raises if they cannot be told now. Repeated for a job whose end they know, it does
        nothing.
        """
        ...
