"""Runs on the database thread: one end of one attempt, written until it is confirmed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import msgspec

from ..errors import StoreRefused
from ..model import Answer, Ended, JobState, Lease, NewAttempt, Snapshot, Transition
from ..store.protocol import Store
from .slate_layout import END_BYTES

#: Bytes of an error text that are kept with a job.
MAX_ERROR_BYTES = 4_096


@dataclass(frozen=True, slots=True)
class Ending:
    """Who ends, and how. Repeatable: the token tells an attempt's own end from another's.

    Without a lease, or where its row is missing, it claims and ends in one transaction, as the
    attempt is described.
    """

    token: str
    lease: Lease | None
    described: NewAttempt | None
    transition: Transition

    def write(self, store: Store) -> Ended:
        """Write it. What the database refuses is left out, the state is written all the same.

        Raises StoreRefused where even that is refused.
        """
        for transition in _less_and_less(self.transition):
            try:
                return self._write(store, transition)
            except StoreRefused as exc:
                refused = exc
        raise refused

    def _write(self, store: Store, transition: Transition) -> Ended:
        if self.lease is not None:
            ended = store.end(self.lease, self.token, transition)
            if ended.answer is not Answer.MISSING:
                return ended
        if self.described is not None:
            return store.end_unclaimed(self.described, transition)
        return Ended(Answer.GONE)  # no row, and nothing known to make one of


def _less_and_less(transition: Transition) -> Iterator[Transition]:
    """The whole, then without the error, and only then without the checkpoint."""
    yield transition
    if transition.error is not None:
        yield replace(transition, error=None)
    if transition.snapshot is not None:
        yield replace(transition, error=None, snapshot=None)


def with_last_snapshot(transition: Transition, snapshot: Snapshot) -> Transition:
    """The transition with what was reported last, where anything was."""
    known = transition.snapshot.generation if transition.snapshot is not None else 0
    return replace(transition, snapshot=snapshot) if snapshot.generation > known else transition


def error_text(error: BaseException | str) -> str:
    """An error in the form that is kept: type and message, cut, and free of what jsonb refuses."""
    text = error if isinstance(error, str) else _type_and_message(error)
    return clean(text).encode()[:MAX_ERROR_BYTES].decode(errors="ignore")


def _type_and_message(error: BaseException) -> str:
    name = type(error).__name__
    try:
        return f"{name}: {error}"
    except Exception as exc:  # a message that cannot be told is no reason to lose the end
        return f"{name}: ({type(exc).__name__} while it was put into words)"


def clean(text: str) -> str:
    """Text that Postgres takes: without NUL characters and lone surrogates."""
    return text.replace("\0", "").encode("utf-8", "replace").decode("utf-8")


def is_storable(text: str) -> bool:
    """Whether Postgres takes it as it is."""
    return clean(text) == text


class _PageEnd(msgspec.Struct):
    to: str | None
    error: str | None
    run_in: float | None
    unsent: bool
    uncounted: bool
    callback_id: str | None = None
    callback_timeout: float | None = None


def to_page(transition: Transition) -> bytes:
    """An end as a child leaves it on its page, for the worker to write if the child dies.

    Without the envelope, which has no room there: the row keeps that of the claim.
    """
    end = _PageEnd(
        transition.to.value if transition.to else None,
        None if transition.error is None else clean(transition.error),
        transition.run_in,
        transition.unsent,
        transition.uncounted,
        transition.callback_id,
        transition.callback_timeout,
    )
    while len(data := msgspec.json.encode(end)) > END_BYTES and end.error:
        end.error = end.error[: len(end.error) // 2]  # control characters take six bytes each
    return data


def from_page(data: bytes) -> Transition:
    """The end that a child left on its page; ValueError for what is none."""
    try:
        end = msgspec.json.decode(data, type=_PageEnd)
    except msgspec.MsgspecError as exc:
        raise ValueError(str(exc)) from exc
    return Transition(
        JobState(end.to) if end.to else None,
        error=end.error,
        run_in=end.run_in,
        unsent=end.unsent,
        uncounted=end.uncounted,
        callback_id=end.callback_id,
        callback_timeout=end.callback_timeout,
    )
