"""Runs in a pool child, any thread (Page), and in the worker (PageView): one attempt's memory.

A page carries an attempt from ``begin`` until ``clear``, ``release``, or, after the death of the
child, until the worker frees it. All that is on it names the attempt by its token, so that
nothing late reaches the next attempt.
"""

from __future__ import annotations

import os
from weakref import WeakSet

from ..model import Lease, Snapshot
from ..progress import compose
from .page_values import PAGE_SEED, Answer, Identity, Process, read_lease, write_lease
from .processes import lives
from .slate_layout import PageRecords
from .slate_record import Half, Record, Torn

# How often brief and metadata are read in turn before an older generation is made do with.
_TRIES = 8


def may_be_taken(records: PageRecords) -> bool:
    """Whether the page is idle and its process, if it ever had one, is dead."""
    owner = Process.owning(records)
    if owner is not None and lives(owner.pid, owner.start):
        return False
    try:
        return Identity.carried(records) is None
    except Torn:
        return False


class _Carried:
    """The attempt that a page writes for; replaced as a whole."""

    __slots__ = ("live", "seed", "token")

    def __init__(self, token: str = "", seed: int = 0) -> None:
        self.token = token
        self.seed = seed
        #: False before the page is ready and after the attempt is over: writes do nothing.
        self.live = False


class Page:
    """A page for the process that took it; in a process forked from that all writes do nothing.

    ``write_brief`` and ``write_metadata`` are for one thread at a time, the one that holds the
    buffer's lock, beside any other method. ``set_lease``, ``set_end`` and ``clear`` are for
    another thread, one at a time, beside them and beside ``begin``: with the token of the attempt
    that is meant they do nothing once the page carries the next one. ``begin`` and ``release``
    are for the thread of the task. An exception may strike in any of them: what was readable
    stays so, and the method can be called again.
    """

    __slots__ = ("__weakref__", "_carried", "_owned", "_process", "_records", "_usable")

    def __init__(self, records: PageRecords, process: Process) -> None:
        """Take the page, which may be taken; the caller holds the slate's lock."""
        self._records = records
        self._process = process
        self._carried = _Carried()
        self._usable = self._owned = True
        records.owner.write(PAGE_SEED, 0, process.packed())
        # Both may have been torn by the death of the process before.
        records.identity.forget()
        records.closed.forget()
        _pages.add(self)

    def begin(self, token: str, task_id: str) -> None:
        """Carry this attempt from now on; what any earlier one left can never be read again.

        ``token`` has 32 characters and names one execution. ValueError if it has not, or if the
        task's id takes more than 2,048 bytes.
        """
        identity = Identity(self._process, token, task_id)
        packed = identity.packed()
        if not self._usable:
            return
        self._carried = carried = _Carried(token, identity.seed)
        # Killed between these, the page is idle. In another order a reader could take the
        # earlier attempt for one that reported less than it did.
        self._close()
        self._records.wipe()
        self._records.identity.write(PAGE_SEED, 0, packed)
        self._records.closed.forget()
        carried.live = True

    def write_brief(self, generation: int, data: bytes) -> None:
        """Replace percent, message, current and total, as JSON; ValueError if too long."""
        carried = self._carried
        if carried.live:
            self._records.brief.write(carried.seed, generation, data)

    def write_metadata(self, generation: int, data: bytes) -> None:
        """Replace the metadata, as JSON; ValueError if too long."""
        carried = self._carried
        if carried.live:
            self._records.metadata.write(carried.seed, generation, data)

    def set_lease(self, lease: Lease | None, *, token: str | None = None) -> None:
        """Let the worker heartbeat for this attempt; None takes that back."""
        if (carried := self._carrying(token)) is not None:
            write_lease(self._records, carried.seed, lease)

    def set_end(self, data: bytes, *, token: str | None = None) -> None:
        """Leave an end that the child could not confirm; ValueError above 8,192 bytes."""
        if (carried := self._carrying(token)) is not None:
            self._records.end.write(carried.seed, 0, data)

    def clear(self, *, token: str | None = None) -> None:
        """The attempt is over and confirmed: the page is idle, and still this process's."""
        if (carried := self._carrying(token)) is not None:
            self._records.closed.write(carried.seed, 0, b"")
            carried.live = False

    def release(self) -> None:
        """Give the page back; it cannot be used any more."""
        if not self._owned:
            return
        self._close()
        self._stop()
        # Last: from here on another process may take it.
        self._records.owner.write(PAGE_SEED, 0, b"")
        self._owned = False

    def detach(self) -> None:
        """Write nothing any more, whatever is called."""
        self._owned = False
        self._stop()

    def acknowledged(self) -> int:
        """The generation of this attempt that the database confirmed to the worker, or 0."""
        return self.told().acknowledged

    def confirmed_at(self) -> float | None:
        """``time.monotonic()`` of the sending of the last heartbeat that was confirmed."""
        return self.told().confirmed_at or None

    def lost(self) -> bool:
        """Whether the worker was told that the lease is gone."""
        return self.told().lost

    def told(self) -> Answer:
        """All that the worker wrote back to this attempt, from one look."""
        carried = self._carried
        return Answer.read(self._records, carried.seed) if carried.live else Answer()

    def _carrying(self, token: str | None) -> _Carried | None:
        carried = self._carried
        return carried if carried.live and token in (None, carried.token) else None

    def _stop(self) -> None:
        self._usable = False
        self._carried = _Carried()

    def _close(self) -> None:
        # What lies on the page is asked, not what this object remembers: the two differ if an
        # exception struck in an earlier begin.
        identity = Identity.carried(self._records)
        if identity is not None:
            self._records.closed.write(identity.seed, 0, b"")


_pages: WeakSet[Page] = WeakSet()


def _detach_all() -> None:
    for page in list(_pages):
        page.detach()


# A process forked by a task shares the page's memory, but the attempt is not its own.
os.register_at_fork(after_in_child=_detach_all)


class PageView:
    """A page that carries an attempt; good for one look around.

    Once the page carries another attempt or none, there is nothing to see and writing does
    nothing. ``lease`` is what it was when the look around began.
    """

    __slots__ = ("_process", "_records", "_seed", "index", "lease", "task_id", "token")

    def __init__(self, index: int, records: PageRecords, identity: Identity) -> None:
        self.index = index
        self.token = identity.token
        self.task_id = identity.task_id
        self.lease = read_lease(records, identity.seed)
        self._process = identity.process
        self._seed = identity.seed
        self._records = records

    @property
    def pid(self) -> int:
        """The process that executes, or executed, the attempt."""
        return self._process.pid

    def alive(self) -> bool:
        """Whether that process lives; a zombie does not."""
        return lives(self._process.pid, self._process.start)

    def carried(self) -> bool:
        """Whether the page carries this attempt still: it did not end, or nobody confirmed it."""
        try:
            identity = Identity.carried(self._records)
        except Torn:
            return False
        return identity is not None and identity.token == self.token

    def snapshot(self) -> Snapshot:
        """The progress as it is now; Snapshot(0, None) where there is none.

        Also that where a busy writer let no whole value be read, which is rare: it is the same
        as no news.
        """
        generation, brief, metadata = self._progress()
        return Snapshot(generation, compose(brief, metadata))

    def generation(self) -> int:
        """The generation that ``snapshot`` would have."""
        return self._progress()[0]

    def end(self) -> bytes | None:
        """The end that the child could not confirm."""
        end = self._records.end.find(self._seed).data
        return end if self.carried() else None

    def answer(
        self, *, acknowledged: int, confirmed_at: float, lost: bool = False, cancel: bool = False
    ) -> None:
        """Tell the attempt what the database said; replaces the answer before.

        ``confirmed_at`` is ``time.monotonic()`` of the sending of a heartbeat that was confirmed,
        0.0 where none was. Only one thread may tell, the worker's database thread.
        """
        if self.carried():
            Answer(acknowledged, confirmed_at, lost, cancel).write(self._records, self._seed)

    def acknowledged(self) -> int:
        """The generation in the last answer to this attempt, or 0."""
        return Answer.read(self._records, self._seed).acknowledged

    def free(self) -> None:
        """Let the page be taken again: the database confirmed all that is on it.

        ValueError while its process lives: that says itself when the attempt is over.
        """
        if self.alive():
            raise ValueError(f"page {self.index} belongs to process {self.pid}, which lives")
        # The dead process stays its owner: whoever takes the page writes over that.
        self._records.closed.write(self._seed, 0, b"")

    def _progress(self) -> tuple[int, bytes | None, bytes | None]:
        try:
            read = _together(self._records.brief, self._records.metadata, self._seed)
        except Torn:
            return 0, None, None
        # Asked last: the next attempt closes this one before it takes anything away.
        if not self.carried():
            return 0, None, None
        generation, brief, metadata = read
        return generation, brief.data, metadata.data


def _together(brief: Record, metadata: Record, seed: int) -> tuple[int, Half, Half]:
    """Brief, metadata, and the generation up to which both are complete. Raises Torn.

    To acknowledge more than was read would lose it. The two are read in turn: one that did not
    change between two looks was the same while the other was looked at, so they belong together.
    """
    first, second = brief.read(seed), metadata.read(seed)
    for _ in range(_TRIES):
        before, first = first, brief.read(seed)
        if before.sequence == first.sequence:
            break
        before, second = second, metadata.read(seed)
        if before.sequence == second.sequence:
            break
    else:
        # Every change up to the brief's was written by then, and the metadata was read later.
        return first.generation, first, second
    return max(first.generation, second.generation), first, second
