"""The progress of one attempt, counted by generation. Pure: no I/O, no Celery.

The whole state is one immutable tuple, replaced by one store. Readers therefore need no lock and
never see half a change, and whatever strikes a writer between two steps (a soft time limit, a
signal's handler that reports too) finds the old state or the new one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, Protocol

from . import native
from .errors import ProgressTooLarge
from .model import Snapshot
from .progress_brief import UNSET, Unset, encode_brief
from .progress_values import encode_kept, encode_pairs

DEFAULT_LIMIT: Final = 65_536

_EMPTY: Final = "{}"


class Sink(Protocol):
    """Where every change goes as well: an attempt's page. Both records are JSON objects.

    Called under the buffer's lock, so by one thread at a time; but a signal's handler may call
    it while a call of the same thread is under way, and an exception may strike inside. A reader
    takes the higher generation of the two records for that of the whole; where both are behind,
    the older change is therefore written first. ``{}`` takes back what was written before. No
    record is longer than the buffer's limit.
    """

    def write_brief(self, generation: int, data: bytes) -> None:
        """Replace percent, message, current, total and rate."""
        ...

    def write_metadata(self, generation: int, data: bytes) -> None:
        """Replace the metadata."""
        ...


# generation; brief ("": none), its generation; metadata as one `"key":value` a key, how many bytes
# it adds to the brief, its generation; whether the whole is within the limit, which only what a
# claim brought can exceed
_State = tuple[int, str, int, dict[str, str], int, int, bool]

_NOTHING: Final[_State] = (0, "", 0, {}, 0, 0, True)
# Of a sink that may hold anything: equal to no state in any part.
_UNKNOWN: Final[_State] = (-1, " ", -1, {}, 0, -1, True)


class ProgressBuffer:
    """What one attempt reported, not yet all of it written to the database.

    ``limit`` is the most that the whole snapshot may take, in bytes of JSON. Safe to use from
    several threads at once and from signal handlers.
    """

    def __init__(self, limit: int = DEFAULT_LIMIT, sink: Sink | None = None) -> None:
        self._limit = limit
        self._state = _NOTHING
        # The last state that the sink is known to hold.
        self._written = _NOTHING
        self._sink = sink
        self._acknowledged = 0
        # Both can be taken again by their thread: a signal's handler may report or flush.
        # Real ones, since the real thread beside greenlets takes them too; none is held across
        # a switch.
        self._lock = native.rlock()
        # Apart, so that the thread which talks to the database never waits for a reporting one.
        self._acknowledging = native.rlock()

    # --- reporting: the task's threads ---

    def set_progress(
        self,
        percent: float | Unset | None = UNSET,
        message: str | None = None,
        *,
        current: float | None = None,
        total: float | None = None,
        rate: float | None = None,
    ) -> None:
        """Replace percent, message, current, total and rate as a whole; the metadata stays.

        ``percent`` is clamped to 0-100 and rounded down, None means indeterminate. Where it is
        not given, it is what ``current`` is of ``total``. ``rate``: of ``current``, a second;
        not without ``current``. Raises InvalidProgress, and
        ProgressTooLarge above the limit; then nothing was changed.
        """
        brief = encode_brief(percent, message, current, total, rate)
        brief_size = _bytes(brief)
        with self._lock:
            while True:
                state = self._state
                generation, _, _, pairs, size, metadata_generation, _ = state
                if brief_size + size > self._limit:
                    raise ProgressTooLarge(brief_size + size, self._limit)
                generation += 1
                changed = (generation, brief, generation, pairs, size, metadata_generation, True)
                # Not so if a signal's handler of this thread reported meanwhile. Nothing can
                # come between this question and the store: only calls and jumps let it in.
                if self._state is state:
                    self._state = changed
                    break
            if self._sink is not None:
                self._write_out()

    def update_metadata(self, values: Mapping[str, Any]) -> None:
        """Merge ``values`` into the metadata; the value of a key is replaced, never merged.

        The values are written down at the call: what happens to them later changes nothing.
        See :mod:`celery_awa.progress_values` for what may be stored, and how. Raises
        InvalidProgress with the path of what is refused, and ProgressTooLarge above the limit;
        then nothing was changed. An empty mapping is no change.
        """
        added = encode_pairs(values, self._limit)
        if not added:
            return
        with self._lock:
            while True:
                state = self._state
                generation, brief, brief_generation, pairs, size, _, _ = state
                size += _growth(pairs, added)
                if _size(brief, size) > self._limit:
                    raise ProgressTooLarge(_size(brief, size), self._limit)
                generation += 1
                pairs = pairs | added
                changed = (generation, brief, brief_generation, pairs, size, generation, True)
                if self._state is state:  # see set_progress
                    self._state = changed
                    break
            if self._sink is not None:
                self._write_out()

    def replace_metadata(self, values: Mapping[str, Any]) -> None:
        """Replace the metadata as a whole; takes and raises what :meth:`update_metadata` does."""
        pairs = encode_pairs(values, self._limit)
        size = _growth({}, pairs)
        with self._lock:
            while True:
                state = self._state
                generation, brief, brief_generation, _, _, _, _ = state
                if _size(brief, size) > self._limit:
                    raise ProgressTooLarge(_size(brief, size), self._limit)
                generation += 1
                changed = (generation, brief, brief_generation, pairs, size, generation, True)
                if self._state is state:  # see set_progress
                    self._state = changed
                    break
            if self._sink is not None:
                self._write_out()

    def lay_over(self, kept: dict[str, Any] | None) -> bool:
        """Lay what this attempt reported over ``kept``, the progress that its claim brought.

        Reported metadata wins key by key. Percent, message, current and total win as a whole,
        over whatever a later version keeps beside them too. Call it once, and before the lease
        is known to anybody who reads the sink: the generation stays, so that an attempt which
        reported nothing has nothing pending. False if both together exceed the limit: a
        checkpoint is never lost, so then ``kept`` stays whole and reported metadata is dropped.
        """
        if not kept:
            return True
        kept_brief, kept_pairs = _split(kept)
        with self._lock:
            while True:
                state = self._state
                changed, complete = _laid_over(state, kept_brief, kept_pairs, self._limit)
                if self._state is state:  # see set_progress
                    self._state = changed
                    break
            if self._sink is not None:
                self._write_out()
        return complete

    # --- reading: any thread, without a lock ---

    @property
    def generation(self) -> int:
        """The count of changes; 0 if this attempt reported nothing."""
        return self._state[0]

    @property
    def pending(self) -> bool:
        """Whether there is a change that the database has not confirmed."""
        return self._state[0] > self._acknowledged

    def snapshot(self) -> Snapshot:
        """The present progress object, for the database."""
        generation, brief, _, pairs, _, _, _ = self._state
        return Snapshot(generation, _composed(brief, _joined(pairs)))

    def value(self) -> dict[str, Any] | None:
        """A fresh copy of the present progress object; None if there is none."""
        text = self.snapshot().json
        value: dict[str, Any] | None = None if text is None else json.loads(text)
        return value

    # --- confirmation: whoever talks to the database ---

    @property
    def acknowledged(self) -> int:
        """The newest generation that the database confirmed."""
        return self._acknowledged

    def acknowledge(self, generation: int) -> None:
        """Note what the database confirmed; an older confirmation that comes late is ignored."""
        with self._acknowledging:
            if generation > self._acknowledged:
                self._acknowledged = generation

    # --- the sink ---

    def attach(self, sink: Sink | None) -> None:
        """Write the present state to ``sink``, and every change from now on; None: to nothing.

        None takes no lock, so that a process which a task forked can let go of the page
        whatever its parent's threads were doing.
        """
        if sink is None:
            self._sink = None
            return
        with self._lock:
            self._written = _NOTHING
            self._sink = sink
            self._write_out()

    def resync(self) -> None:
        """Write to the sink what an exception struck before it was there. Cheap if nothing was."""
        if self._sink is None or self._written is self._state:
            return
        with self._lock:
            self._write_out()

    def _write_out(self) -> None:
        try:
            # The loop: a signal's handler may report while this is writing, and what it wrote
            # would be overwritten by what is older.
            while (sink := self._sink) is not None and self._written is not self._state:
                self._written = _write_changes(sink, self._written, self._state)
        except BaseException:
            self._written = _UNKNOWN
            raise


def _write_changes(sink: Sink, written: _State, state: _State) -> _State:
    """Write the records in which the two states differ, the older one first."""
    _, brief, brief_generation, pairs, _, metadata_generation, fits = state
    if not fits:
        # A page has no room for it, nor needs it: the row holds just that. What was reported
        # before may not stand there, since it would be written over the row.
        sink.write_brief(0, _EMPTY.encode())
        sink.write_metadata(0, _EMPTY.encode())
        return state
    if not written[-1]:
        written = _UNKNOWN
    metadata = None if pairs is written[3] else _joined(pairs).encode()
    if metadata and metadata_generation < brief_generation:
        sink.write_metadata(metadata_generation, metadata)
        metadata = None
    if brief is not written[1]:
        sink.write_brief(brief_generation, (brief or _EMPTY).encode())
    if metadata:
        sink.write_metadata(metadata_generation, metadata)
    return state


def compose(brief: bytes | None, metadata: bytes | None) -> str | None:
    """The whole progress object as JSON text, from its two records; None if both are empty."""
    return _composed((brief or b"").decode(), (metadata or b"").decode())


def _composed(brief: str, metadata: str) -> str | None:
    members = []
    if brief not in ("", _EMPTY):
        members.append(brief[1:-1])
    if metadata not in ("", _EMPTY):
        members.append(f'"metadata":{metadata}')
    return f"{{{','.join(members)}}}" if members else None


def _joined(pairs: dict[str, str]) -> str:
    return f"{{{','.join(pairs.values())}}}"


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _size(brief: str, metadata_size: int) -> int:
    """The bytes of the composed object."""
    return (_bytes(brief) or len("{")) + metadata_size


def _growth(pairs: dict[str, str], added: dict[str, str]) -> int:
    """By how many bytes ``added`` makes longer what ``pairs`` add to the brief."""
    # One comma is counted with each pair, of which the last has none.
    growth = len(',"metadata":{}') - len(",") if added and not pairs else 0
    for key, pair in added.items():
        present = pairs.get(key)
        growth += _bytes(pair) + 1 if present is None else _bytes(pair) - _bytes(present)
    return growth


def _split(kept: dict[str, Any]) -> tuple[str, dict[str, str]]:
    """The brief and the pairs of a progress object from the database."""
    members = {key: value for key, value in kept.items() if key != "metadata"}
    metadata = kept.get("metadata")
    return (
        _joined(encode_kept(members)) if members else "",
        encode_kept(metadata) if isinstance(metadata, dict) else {},
    )


def _laid_over(
    state: _State, kept_brief: str, kept_pairs: dict[str, str], limit: int
) -> tuple[_State, bool]:
    generation, brief, brief_generation, pairs, _, metadata_generation, _ = state
    merged = kept_pairs | pairs
    kept_size = _growth({}, kept_pairs)
    size = kept_size + _growth(kept_pairs, pairs)
    if not brief_generation:
        brief = kept_brief
    complete = not generation or _size(brief, size) <= limit
    if not complete:
        merged, size = kept_pairs, kept_size
        brief = brief if _size(brief, size) <= limit else kept_brief
    fits = _size(brief, size) <= limit
    changed = (generation, brief, brief_generation, merged, size, metadata_generation, fits)
    return changed, complete
