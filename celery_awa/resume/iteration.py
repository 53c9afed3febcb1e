"""A loop that goes on after the last finished item of earlier attempts. For the task's thread.

How far it is stands in one tuple, replaced by one store: whatever strikes in between (a soft time
limit, the end of the process) finds the old one or the new one. An item is finished when the next
one is asked for, and nothing depends on how the loop is left.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

from ..errors import TooManyItemErrors
from ..runtime.checkpoint import COMMITTED_STATE
from .item_errors import ItemGuard
from .options import LoopOptions
from .pace import Pace
from .pieces import Piece, Records, read_pieces
from .sources.base import Source, Unreadable
from .state import At, FoundLoop, loop_state

if TYPE_CHECKING:
    from .resumption import Resumption

_NOTHING = object()
_GUARD_NEEDED = (
    "on_item_error is set, and the first item was worked on without it: put the work on each item "
    "into `with rows.item():`, where rows is what iterate() returned"
)


class Iteration(Iterator[Any]):
    """What ``iterate`` returns: an iterator over items, or over batches of them.

    Not to be shared with other threads.
    """

    def __init__(
        self,
        resumption: Resumption,
        source: Source[Any],
        name: str,
        options: LoopOptions,
        found: FoundLoop,
    ) -> None:
        self.name = name
        self._resumption = resumption
        self._attempt = resumption.attempt
        self._source = source
        self._options = options
        self._every, self._interval = options.checkpoint_every, options.checkpoint_interval
        self._loop: Generator[Any, None, None] | None = None
        self._over = found.finished
        #: What is finished; what will be once the piece that was handed out last is.
        self._at: At = found.at
        self._began_at = found.at[0]
        self._next: At | None = None
        #: When the next checkpoint is due; monotonic seconds.
        self._due = 0.0
        #: Whether the task's own transactions carry the cursor, and what is kept beside them from
        #: then on: nothing kept may go ahead of a transaction that is rolled back.
        self._commits = found.commits
        self._beside: dict[str, Any] | None = None
        #: The number of the piece that is worked on, and how often that was begun.
        self._trying = found.trying
        #: What was begun in its body, which belongs elsewhere.
        self._inner: str | None = None
        self._piece: Piece | None = None
        self._guarded = self._failed = self._again = False
        self._failures = 0
        self._known_total = False
        self._total: float | None = None
        self._pace: Pace | None = None

    @property
    def done(self) -> int:
        """How many items of the run are finished; those that were skipped too."""
        return self._at[0]

    @property
    def skipped(self) -> int:
        """How many items, or batches, of the run were given up."""
        return self._at[2].count

    def __iter__(self) -> Iterator[Any]:
        # A generator of our own, and not ourselves: the quickest that Python has to loop over.
        loop = self._loop
        if loop is None:
            loop = self._loop = self._begin()
        return loop

    def __next__(self) -> Any:
        return next(iter(self))

    def item(self) -> ItemGuard:
        """A context manager around the work on the present item: its errors are the item's.

        What becomes of them is for ``on_item_error`` to say. What the task raises to end the
        attempt (retry, interrupt, …) passes.
        """
        self._check_inside("item()")
        self._guarded = True
        return ItemGuard(self._item_failed, self._resumption.let_pass)

    def checkpoint_in(self, connection: Any) -> None:
        """Write into the caller's open transaction that the present item, or batch, is finished.

        So the item is done exactly once: its work and its being done commit together. Call it in
        every transaction of the loop, begun and ended within one item; from then on the cursor is
        kept no other way. Does nothing outside an attempt. Raises what the task's own
        ``checkpoint_in`` raises, and RuntimeError outside the loop's body.
        """
        after = self._check_inside("checkpoint_in()")
        if self._again:
            raise RuntimeError(
                "the item failed and comes again: call checkpoint_in inside `with rows.item():`"
            )
        if self._attempt is None:
            return
        self._commits = True
        if self._beside is None:
            self._stand_still(self._resumption.kept_loop(self.name))
        self._attempt.commit(connection, {COMMITTED_STATE: {self.name: loop_state(after)}})

    # --- for the resumption ---

    def state(self) -> dict[str, Any]:
        """What is to be kept of it now; {} for nothing."""
        # With work of this attempt begun, a transaction may be open still, at the end too.
        if self._beside is not None and self._next is not None:
            state = dict(self._beside)
        else:
            state = loop_state(self._at, finished=self._over)
        if self._trying is not None:
            state["trying"] = {"item": self._trying[0], "tries": self._trying[1]}
        return state

    def end_tries(self) -> None:
        """The attempt ends, and the worker lives: its item did not kill it."""
        self._trying = None

    def begins_inside(self, what: str) -> None:
        """Another loop or step begins, perhaps in this one's body: told if this one goes on."""
        self._inner, self._due = what, float("-inf")

    # --- the loop ---

    def _begin(self) -> Generator[Any, None, None]:
        on_item = self._attempt.on_item if self._attempt is not None else None
        if on_item is not None:
            self._interval = float("inf")  # in a test the clock decides nothing
        plain = self._options.plain and on_item is None
        return self._plainly() if plain else self._piece_by_piece()

    def _plainly(self) -> Generator[Any, None, None]:
        if self._over:
            return
        try:
            records = self._open()
            if self._commits:
                self._stand_still(loop_state(self._at))
            item: Any = _NOTHING
            done, _, skipped = self._at
            left, monotonic = self._every, time.monotonic
            for item, cursor in records:
                if type(item) is Unreadable:
                    raise item.error
                done += 1
                self._next = after = (done, cursor, skipped)
                yield item
                self._at = after
                left -= 1
                if not left or monotonic() >= self._due:
                    left = self._every
                    self._checkpoint(item)
            self._exhausted(item)
        finally:
            self._left()

    def _piece_by_piece(self) -> Generator[Any, None, None]:
        if self._over:
            return
        try:
            records = self._open()
            value: Any = _NOTHING
            size = self._options.batch_size or 1
            left = self._every
            for piece in read_pieces(records, self._at[0], size, self._refuse_unreadable):
                after = self._without_work(piece)
                if after is None:
                    self._start(piece)
                    while True:
                        value = self._value(piece)
                        yield value
                        if not self._again:
                            break
                        self._again = False
                        self._resumption.look_for_stop()
                    after = self._finished_piece()
                left -= after[0] - self._at[0]
                self._at = after
                if self._asked_for() or self._is_due(left):
                    left = self._every
                    self._checkpoint(value)
            self._exhausted(value)
        finally:
            self._left()

    def _open(self) -> Records:
        self._resumption.begin(self)
        self._resumption.look_for_stop()
        if self._attempt is not None:
            self._begin_reports()
        self._due = time.monotonic() + self._interval
        return iter(self._source.read(self._at[1]))

    def _left(self) -> None:
        # Whoever goes on after an error of the source, or a stop, begins a new one.
        self._loop = None
        self._source.close()

    def _is_due(self, left: int) -> bool:
        batches = self._options.batch_size is not None
        return batches or left <= 0 or time.monotonic() >= self._due

    def _asked_for(self) -> bool:
        on_item = self._attempt.on_item if self._attempt is not None else None
        return on_item is not None and on_item(self.name, self._at[0] - self._began_at)

    def _checkpoint(self, item: Any) -> None:
        self._take_stock(item)
        # Not at the end: what comes next looks, and if nothing does, the task is done.
        self._resumption.look_for_stop()

    def _take_stock(self, item: Any) -> None:
        self._due = time.monotonic() + self._interval
        if self._inner is not None:
            inner, self._inner = self._inner, None
            raise RuntimeError(
                f"{inner} was begun inside the loop {self.name!r}, where it cannot be resumed: "
                "loop with track() or a plain for there"
            )
        if self._attempt is None:
            return
        self._resumption.advanced = True
        self._resumption.keep()
        self._report(item)

    def _exhausted(self, item: Any) -> None:
        self._over = True
        self._trying = None
        self._resumption.ended(self)
        self._take_stock(item)

    def _stand_still(self, kept: dict[str, Any]) -> None:
        if self._beside is None:
            self._beside = {key: value for key, value in kept.items() if key != "trying"}

    # --- piece by piece ---

    def _without_work(self, piece: Piece) -> At | None:
        """How far the loop is after a piece that is not to be worked on; None if it is to be."""
        skipped = self._at[2]
        if not piece.items:
            return piece.after(skipped)
        if self._options.kill_limit is None:
            return None
        number, tries = self._trying or (0, 0)
        tries = tries if number == piece.first else 0
        if tries >= self._options.kill_limit:
            return piece.given_up(skipped, f"killed its worker {tries} times")
        self._trying = (piece.first, tries + 1)
        return None

    def _start(self, piece: Piece) -> None:
        """Just before its work: whatever is kept of the tries is kept now."""
        if self._commits:
            self._stand_still(loop_state(self._at))
        self._piece, self._failures = piece, 0
        self._failed = self._again = False
        self._next = piece.after(self._at[2])
        if self._options.kill_limit is not None:
            self._resumption.keep()

    def _value(self, piece: Piece) -> Any:
        # A copy, as the batch may come again, whatever the task does to its list.
        return list(piece.items) if self._options.batch_size is not None else piece.items[0]

    def _finished_piece(self) -> At:
        if not self._guarded and self._options.on_item_error != "raise":
            raise RuntimeError(_GUARD_NEEDED)
        assert self._next is not None
        return self._next

    def _check_inside(self, verb: str) -> At:
        if self._next is None or self._next[0] <= self._at[0]:
            raise RuntimeError(f"{verb} is for the body of the loop {self.name!r}")
        return self._next

    def _item_failed(self, error: Exception) -> bool:
        """Whether the loop goes on all the same."""
        piece = self._piece
        if piece is None or self._options.on_item_error == "raise":
            return False
        if self._again or self._failed:  # a second guard in one body: it has failed anyhow
            return True
        if self._options.times:
            self._failures += 1
            self._again = self._failures <= self._options.times
            return self._again
        self._refuse(piece.last, 1, error)
        self._failed = True
        self._next = piece.given_up(self._at[2], error)
        return True

    def _refuse_unreadable(self, number: int, count: int, error: Exception) -> None:
        if self._options.on_item_error == "raise" or self._options.times:
            raise error  # reading it again would bring the same
        self._refuse(number, count, error)

    def _refuse(self, number: int, count: int, error: Exception) -> None:
        count += self._at[2].count
        if not self._options.may_skip(count):
            raise TooManyItemErrors(
                f"{count} items of the loop {self.name!r} failed, more than SkipItems allows; the "
                f"last is item {number}: {type(error).__name__}: {error}"
            ) from error

    # --- reports ---

    def _begin_reports(self) -> None:
        if not self._known_total:
            self._total = self._source.total()
            self._known_total = True
        if self._pace is None:
            self._pace = Pace(self._position(), time.monotonic())
        self._report(_NOTHING)

    def _report(self, item: Any) -> None:
        if self._attempt is None or self._pace is None:
            return
        position = self._position()
        self._attempt.report(
            current=position,
            total=self._total,
            message=self._options.tells(item) if item is not _NOTHING else self._text(),
            rate=self._pace.rate(position, time.monotonic()),
        )

    def _text(self) -> str | None:
        message = self._options.message
        return message if isinstance(message, str) else None

    def _position(self) -> float:
        done, cursor, _ = self._at
        position = self._source.position(cursor, done) if cursor is not None else None
        return done if position is None else position
