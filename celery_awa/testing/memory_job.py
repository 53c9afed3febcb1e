"""The row of a job, in memory: what the attempts of a run under test leave to one another."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import ProgressTooLarge
from ..model import Answer, Claim, Ended, JobState, Lease, Transition, Verdict
from ..progress_values import encode_pairs
from ..runtime.attempt import Attempt
from ..runtime.checkpoint import COMMITTED_STATE, VERSION, Checkpoint

_ID = 1


def as_kept(values: Mapping[str, Any], limit: int) -> dict[str, Any]:
    """The values as the database gives them back.

    Raises InvalidProgress and ProgressTooLarge for what it would not be given.
    """
    text = f"{{{','.join(encode_pairs(values, limit).values())}}}"
    size = len(text.encode())
    if size > limit:
        raise ProgressTooLarge(size, limit)
    found: dict[str, Any] = json.loads(text)
    return found


@dataclass
class MemoryJob:
    """One job. What it holds is replaced and never changed, so a copy is a job of its own."""

    lost_policy: str
    state: JobState = JobState.AVAILABLE
    attempt: int = 0
    run_lease: int = 0
    run_token: str = "run"
    progress: dict[str, Any] | None = None
    committed: dict[str, Any] | None = None
    run_in: float | None = None
    callback_id: str | None = None
    callback_name: str | None = None
    callbacks: dict[str, Any] = field(default_factory=dict)

    def copy(self) -> MemoryJob:
        """The same job, to go another way from here."""
        return replace(self)

    def checkpoint(self, version: int) -> dict[str, Any]:
        """What the next attempt finds, of code of that ``version``; as it lies here if older."""
        metadata = (self.progress or {}).get("metadata") or {}
        found = Checkpoint(version)
        if found.found(metadata, self.committed):
            return dict(found.values)
        return {**metadata, **(self.committed or {})}

    def claim(self, retries: int) -> Claim:
        """Give the job to an attempt of a message with so many retries."""
        self.attempt = max(self.attempt, retries) + 1
        self.run_lease += 1
        self.state, self.run_in = JobState.RUNNING, None
        return Claim(
            Verdict.YOURS,
            self._lease,
            self.attempt,
            deepcopy(self.progress),
            self.run_token,
            deepcopy(self.committed),
            {name: {"payload": payload} for name, payload in deepcopy(self.callbacks).items()},
        )

    @property
    def _lease(self) -> Lease:
        return Lease(_ID, self.run_lease)

    def keep(self, attempt: Attempt) -> None:
        """Take over what the attempt has reported, if anything."""
        if attempt.buffer.generation:
            self.progress = attempt.buffer.value()

    def commit(self, values: dict[str, Any]) -> None:
        """Merge what the task committed, as the database's ``committed_over`` does."""
        before = self.committed or {}
        if before.get(VERSION, 0) != values.get(VERSION, 0):
            before = {}
        merged = {**before, **values}
        if COMMITTED_STATE in before and COMMITTED_STATE in values:
            merged[COMMITTED_STATE] = {**before[COMMITTED_STATE], **values[COMMITTED_STATE]}
        self.committed = merged

    def end(self, attempt: Attempt, transition: Transition) -> Ended:
        """End the attempt that has the job."""
        # A replaced task's row goes; its id is another task's, which waits for its message.
        self.state = transition.to or JobState.AVAILABLE
        self.run_in = transition.run_in
        self.attempt -= transition.uncounted
        if transition.to in (None, JobState.COMPLETED):
            self.progress = self.committed = None
            self.callbacks = {}
        else:
            self.keep(attempt)
        if self.state is not JobState.WAITING_EXTERNAL:
            self.callback_id = self.callback_name = None
        return Ended(Answer.DONE, self._lease, self.run_token)

    def forsake(self, attempt: Attempt) -> None:
        """The attempt is over without an end: treat the job as a rescuer would."""
        self.keep(attempt)
        requeue = self.lost_policy == "requeue"
        self.state = JobState.RETRYABLE if requeue else JobState.FAILED

    def expect(self, callback_id: str, name: str) -> None:
        """A callback is awaited, in place of the one before."""
        self.callback_id, self.callback_name = callback_id, name
        self.callbacks = {key: value for key, value in self.callbacks.items() if key != name}

    def answer(self, payload: Any) -> None:
        """The callback that is awaited has come."""
        assert self.callback_name is not None
        self.callbacks = {**self.callbacks, self.callback_name: payload}
        self.callback_id = self.callback_name = None
