"""A loop that can stop anywhere: it owns the cursor, which is always the last finished item's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..errors import TooManyItemErrors
from ..runtime.checkpoint import COMMITTED_STATE
from ..runtime.ending import error_text
from .item_errors import ItemErrors, RetryItem, SkipItems
from .loop_state import LoopState, from_kept, newest, skipped_item
from .pace import Pace
from .sources.base import Source, Unreadable

if TYPE_CHECKING:
    from .resumption import Resumption

_NO_PIECE, _LEFT_OUT = object(), object()


@dataclass(frozen=True, slots=True)
class Options:
    """See :meth:`celery_awa.AwaMixin.iterate`."""

    batch_size: int | None = None
    checkpoint_every: int = 100
    checkpoint_interval: float = 0.1
    on_item_error: ItemErrors = "raise"
    kill_limit: int | None = None
    message: str | Callable[[Any], str] | None = None


class Iteration:
    """What ``self.iterate(source)`` gives: loop over it once, in the task's own thread.

    A piece is what the loop hands out: an item, or a batch of them. It is finished when the next
    one is asked for, so what an exception or a ``break`` leaves is handed out again.
    """

    def __init__(
        self, resumption: Resumption, source: Source[Any], name: str, options: Options
    ) -> None:
        self.name = name
        self._resumption = resumption
        self._attempt = resumption.attempt
        self._source = source
        self._options = options
        self._reader: Iterator[tuple[Any, Any]] | None = None
        self._closed = False
        #: What is kept, and what was finished since then: items, the last cursor, and what was left
        #: out. Apart, since a value is made of them at a checkpoint only.
        self._kept = LoopState()
        self._unkept = 0
        self._cursor: Any = None
        self._unkept_skips: list[dict[str, Any]] = []
        #: The piece that is being worked on, the cursor after it, how many items of the source it
        #: stands for, and which of them are left out.
        self._piece: Any = _NO_PIECE
        self._ahead: Any = None
        self._size = 0
        self._left_out: list[dict[str, Any]] = []
        #: It is to be handed out again, having failed so often.
        self._again = False
        self._failures = 0
        self._guarded = False
        #: Number of the item whose work may kill the worker, and how often that began.
        self._trying: tuple[int, int] | None = None
        #: Whether the task's own transactions carry the cursor.
        self._commits = False
        self._last: Any = None
        self._finished_here = 0
        self._every = options.checkpoint_every
        self._due = 0.0
        self._total: float | None = None
        self._pace = Pace(0, 0.0)

    @property
    def done(self) -> int:
        """How many items are finished, those of earlier attempts and those left out among them."""
        return self._kept.done + self._unkept

    @property
    def skipped(self) -> int:
        """How many items were left out, in all attempts."""
        return self._state().skipped

    @property
    def begun(self) -> bool:
        """Whether it was looped over, and has not ended."""
        return self._reader is not None and not self._closed

    def __iter__(self) -> Iteration:
        return self

    def __next__(self) -> Any:
        if self._piece is not _NO_PIECE:
            if self._again:
                self._again = False
                return self._piece
            self._finish()
            if self._unkept >= self._every or time.monotonic() >= self._due:
                self._checkpoint()
        elif self._reader is None:
            self._begin()
        return self._next_piece()

    def item(self) -> _ItemGuard:
        """``with rows.item():`` around the work of one piece: what it raises is the piece's error.

        What becomes of that says ``on_item_error``.
        """
        return _ItemGuard(self)

    def checkpoint_in(self, connection: Any) -> None:
        """Write the cursor after the present piece in the caller's open transaction.

        So the piece's effects in that database and the cursor commit together, or not at all: each
        piece is done exactly once. Call it for every piece of the loop, or for none. Takes and
        raises what the task's ``checkpoint_in`` does; RuntimeError outside the loop's body.
        """
        if self._piece is _NO_PIECE:
            raise RuntimeError("checkpoint_in() belongs into the loop's body")
        if self._attempt is not None:
            state = self._state().advanced(self._size, self._ahead, self._left_out)
            self._attempt.commit(connection, {COMMITTED_STATE: {self.name: state.kept()}})
        self._commits = True

    def close(self) -> None:
        """End the loop here; what is finished stays so. For after a ``break``."""
        if self._closed:
            return
        self._closed = True
        self._piece = _NO_PIECE
        close = getattr(self._reader, "close", None)
        if close is not None:
            close()
        self._source.close()
        self._resumption.loop_ended(self)

    def settle(self) -> None:
        """Keep what is finished, and that the piece which is worked on did not kill its worker."""
        if self.begun and (self._unkept or self._trying is not None):
            self._trying = None
            self._keep()

    # Steps.

    def _begin(self) -> None:
        if self._closed:
            raise StopIteration
        kept, committed = self._resumption.kept(self.name)
        self._kept = newest(from_kept(kept), from_kept(committed))
        self._cursor = self._kept.cursor
        if self._kept.finished:
            self.close()
            raise StopIteration
        if self._options.kill_limit is not None and "trying" in kept:
            self._trying = kept["trying"]["item"], kept["trying"]["tries"]
        self._resumption.check_stop()
        self._reader = iter(self._source.read(self._cursor))
        self._total = self._source.total() if self._attempt is not None else None
        if self._looks_each_time():
            self._every = 1
        now = time.monotonic()
        self._due = now + self._options.checkpoint_interval
        self._pace = Pace(self._position(), now)

    def _looks_each_time(self) -> bool:
        """Whether each piece is looked after: a batch, what may fail, and for tests."""
        options = self._options
        told = self._attempt is not None and self._attempt.on_item is not None
        return told or options.batch_size is not None or options.on_item_error != "raise"

    def _finish(self) -> None:
        """The piece that was handed out is finished, now that the next one is asked for."""
        self._last, self._piece = self._piece, _NO_PIECE
        self._cursor = self._ahead
        self._unkept += self._size
        self._finished_here += self._size
        if self._left_out:
            self._unkept_skips += self._left_out

    def _state(self) -> LoopState:
        return self._kept.advanced(self._unkept, self._cursor, self._unkept_skips)

    def _checkpoint(self) -> None:
        if self._options.on_item_error != "raise" and not self._guarded:
            raise RuntimeError(
                "on_item_error needs the work of each item inside `with rows.item():`, "
                "where rows is what self.iterate() gave"
            )
        self._resumption.advanced = True
        now = time.monotonic()
        if not self._is_due(now):
            return
        self._due = now + self._options.checkpoint_interval
        self._trying = None
        self._keep()
        self._report(now)
        self._resumption.check_stop()

    def _is_due(self, now: float) -> bool:
        # Whoever tests hears of each piece.
        on_item = self._attempt.on_item if self._attempt is not None else None
        asked = on_item is not None and on_item(self.name, self._finished_here)
        return (
            asked
            or now >= self._due
            or self._unkept >= self._options.checkpoint_every
            or self._options.batch_size is not None
        )

    def _next_piece(self) -> Any:
        while True:
            piece = self._read()
            if piece is _NO_PIECE:
                self._end()
                raise StopIteration
            if piece is _LEFT_OUT or self._kills():
                self._finish()
                continue
            self._failures = 0
            self._piece = piece
            return piece

    def _read(self) -> Any:
        """The next piece; none where the source has no more."""
        assert self._reader is not None
        self._size, self._left_out = 0, []
        batch: list[Any] = []
        wanted = self._options.batch_size or 1
        for item, ahead in self._reader:
            self._ahead = ahead
            self._size += 1
            if isinstance(item, Unreadable):
                self._skip(item.error, self._size)
            elif self._options.batch_size is None:
                return item
            else:
                batch.append(item)
            if self._size == wanted:
                break
        if not self._size:
            return _NO_PIECE
        return batch or _LEFT_OUT

    def _kills(self) -> bool:
        """Whether the piece has killed its worker too often, to be left out; else it is tried."""
        limit = self._options.kill_limit
        if limit is None:
            return False
        number = self.done + 1
        before = self._trying[1] if self._trying is not None and self._trying[0] == number else 0
        if before >= limit:
            self._trying = None
            self._leave_out(f"its worker died {before} times", 1, self._size)
            return True
        self._trying = number, before + 1
        self._keep()
        return False

    def _end(self) -> None:
        """The source has no more."""
        if self._attempt is not None:
            self._resumption.advanced = True
            self._report(time.monotonic(), ended=True)
            self._take_over()
            self._resumption.keep_loop(self.name, self._kept.ended().kept())
        self.close()

    def _keep(self) -> None:
        self._take_over()
        # Where transactions carry the cursor, what is kept beside them may not run ahead.
        state: dict[str, Any] = {"done": 0} if self._commits else self._kept.kept()
        if self._trying is not None:
            state["trying"] = {"item": self._trying[0], "tries": self._trying[1]}
        if not self._commits or self._options.kill_limit is not None:
            self._resumption.keep_loop(self.name, state)

    def _take_over(self) -> None:
        self._kept = self._state()
        self._unkept, self._unkept_skips = 0, []

    def _report(self, now: float, *, ended: bool = False) -> None:
        if self._attempt is None:
            return
        position = self._position()
        if ended and self._total is not None:
            position = self._total
        message = self._options.message
        self._attempt.report(
            current=position,
            total=self._total,
            message=message(self._last) if callable(message) else message,
            rate=self._pace.rate(position, now),
        )

    def _position(self) -> float:
        if self._cursor is None:
            return self.done
        found = self._source.position(self._cursor, self.done)
        return self.done if found is None else found

    # What failed.

    def failed(self, error: Exception) -> bool:
        """The work of the present piece failed; whether the loop goes on all the same."""
        policy = self._options.on_item_error
        if isinstance(policy, RetryItem):
            self._failures += 1
            self._again = self._failures <= policy.times
            return self._again
        if isinstance(policy, SkipItems):
            self._left_out = []  # what could not be read in it is left out with the rest
            self._skip(error, 1, self._size)
            return True
        return False

    def _skip(self, error: Exception, first: int, last: int | None = None) -> None:
        """Leave out items of the present piece, by their number in it, or raise the error."""
        policy = self._options.on_item_error
        if not isinstance(policy, SkipItems):
            raise error
        self._leave_out(error_text(error), first, last or first)
        count = self._state().advanced(0, None, self._left_out).skipped
        if count > policy.limit:
            raise TooManyItemErrors(
                f"{count} items of loop {self.name!r} failed; SkipItems allows {policy.limit}"
            ) from error

    def _leave_out(self, error: str, first: int, last: int) -> None:
        done = self.done
        self._left_out.append(skipped_item(done + first, done + last, error))


class _ItemGuard:
    """Around the work of one piece."""

    def __init__(self, loop: Iteration) -> None:
        self._loop = loop

    def __enter__(self) -> None:
        self._loop._guarded = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception) or isinstance(error, self._loop._resumption.let_pass):
            return False
        return self._loop.failed(error)
