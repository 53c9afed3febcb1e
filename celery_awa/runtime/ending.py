"""Runs on the database thread: one end of one attempt, written until it is confirmed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from ..errors import StoreRefused
from ..model import Ended, JobState, Lease, NewAttempt, Snapshot, Transition
from ..store.protocol import Store

#: Bytes of an error text that are kept with a job.
MAX_ERROR_BYTES = 4_096


@dataclass(frozen=True, slots=True)
class Ending:
    """Who ends, and how. Repeatable: the token tells an attempt's own end from another's.

    Without a lease it claims and ends in one transaction, with what ``describe`` says.
    """

    token: str
    lease: Lease | None
    describe: Callable[[], NewAttempt]
    transition: Transition

    def write(self, store: Store) -> Ended:
        """Write it. What the database refuses is left out, the state is written all the same."""
        try:
            return self._write(store, self.transition)
        except StoreRefused:
            return self._write(store, replace(self.transition, snapshot=None, error=None))

    def _write(self, store: Store, transition: Transition) -> Ended:
        if self.lease is not None:
            return store.end(self.lease, self.token, transition)
        return store.end_unclaimed(self.describe(), transition)


def with_last_snapshot(transition: Transition, snapshot: Snapshot) -> Transition:
    """The transition with what was reported last, where anything was."""
    return replace(transition, snapshot=snapshot) if snapshot.generation else transition


def error_text(error: BaseException | str) -> str:
    """An error in the form that is kept: type and message, cut, and free of what jsonb refuses."""
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return clean(text).encode()[:MAX_ERROR_BYTES].decode(errors="ignore")


def clean(text: str) -> str:
    """Text that Postgres takes: without NUL characters and lone surrogates."""
    return text.replace("\\0", "").encode("utf-8", "replace").decode("utf-8")


class _PageEnd(msgspec.Struct):
    to: str | None
    error: str | None
    run_in: float | None
    unsent: bool
    uncounted: bool


def to_page(transition: Transition) -> bytes:
    """An end as a child leaves it on its page, for the worker to write if the child dies."""
    state = transition.to.value if transition.to else None
    return msgspec.json.encode(
        _PageEnd(
            state, transition.error, transition.run_in, transition.unsent, transition.uncounted
        )
    )


def from_page(data: bytes) -> Transition:
    """The end that a child left on its page."""
    end = msgspec.json.decode(data, type=_PageEnd)
    return Transition(
        JobState(end.to) if end.to else None,
        error=end.error,
        run_in=end.run_in,
        unsent=end.unsent,
        uncounted=end.uncounted,
    )
