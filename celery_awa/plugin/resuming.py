"""Runs wherever a task does, on its own thread: work that can stop anywhere and goes on later."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

from celery.exceptions import SoftTimeLimitExceeded, TaskPredicate

from ..errors import NotInAttempt, StoreUnavailable
from ..progress import DEFAULT_LIMIT
from ..progress_values import encode_pairs
from ..resume.item_errors import ItemErrors
from ..resume.iteration import Iteration
from ..resume.resumption import Resumption
from ..resume.step import Step
from ..resume.stops import Park, Snooze
from ..runtime.attempt import Attempt
from ..runtime.checkpoint import check_keys
from ..runtime.ending import error_text, is_storable
from .current import trouble
from .reporting import NOTHING, Reporting

T = TypeVar("T")

#: Seconds; the bound of every duration.
_LONGEST = 1e9
#: Seconds; drawn, so that tasks which waited for the database do not all come back at once.
_WITHOUT_DATABASE = (5.0, 15.0)
_NAME = "callback"
#: By these a task leaves its body on purpose, or is made to.
_NO_ITEMS_ERROR = (TaskPredicate, SoftTimeLimitExceeded)
_MOST_CHARACTERS = 100


class Resuming(Reporting):
    """The part of :class:`~celery_awa.AwaMixin` with loops, steps and the ways to stop."""

    def iterate(
        self,
        source: Any,
        *,
        name: str = "items",
        batch_size: int | None = None,
        checkpoint_every: int = 100,
        checkpoint_interval: float = 0.1,
        on_item_error: ItemErrors = "raise",
        kill_limit: int | None = None,
        message: str | Callable[[Any], str] | None = None,
    ) -> Iteration:
        """Loop over a source, going on after the last finished item of earlier attempts.

        ``source``: a sequence or range, or one of :mod:`celery_awa.resume`. An item is finished
        when the next one is asked for. The cursor is kept every ``checkpoint_every`` items or
        ``checkpoint_interval`` seconds, whichever is sooner, and before every exception; there the
        loop also stops by itself if ``should_stop`` is true, and the task is sent again (or
        cancelled). Progress follows from the source's total.

        ``name`` tells the loops of a task apart. ``batch_size``: yields lists of up to so many
        items, with a cursor after each. ``on_item_error``: "raise", ``SkipItems(limit)`` or
        ``RetryItem(times)``, for what ``with rows.item():`` in the body raises. ``kill_limit``: an
        item whose worker died so often is skipped and recorded. ``message``: a text, or a function
        of the item. docs/resuming.md has examples. Outside an attempt it just loops.

        Raises ValueError or TypeError for an argument that is not allowed, CheckpointMismatch for
        a source that is not the one of the cursor, and LeaseLost. Where the database does not tell
        where to begin, the task snoozes for some seconds: it is no fault of the task's.
        """
        resumption = self._awa_resumption()
        with _later_without_database(self._awa_attempt()):
            return resumption.iterate(
                source,
                name=name,
                batch_size=batch_size,
                checkpoint_every=checkpoint_every,
                checkpoint_interval=checkpoint_interval,
                on_item_error=on_item_error,
                kill_limit=kill_limit,
                message=message,
            )

    def step(self, name: str) -> Step:
        """A named part of the work, run once: ``with self.step("load") as step:``.

        Python cannot skip a with block, so its body asks ``if step.todo:``, or loops over
        ``step.iterate(source)``, which yields nothing once the step is finished. ``step.cursor`` is
        what ``step.set_cursor(value)`` kept. Before a step and at each cursor the task stops by
        itself if ``should_stop`` is true.

        Steps must come in the order in which the checkpoint knows them: CheckpointMismatch
        otherwise. Raise the task's ``checkpoint_version`` when you change them. Without the
        database the task snoozes, as at a loop.
        """
        step = self._awa_resumption().step(name)
        attempt = self._awa_attempt()
        if attempt is not None:
            with _later_without_database(attempt):
                attempt.checkpoint  # noqa: B018  # waits until it is known
        return step

    def track(
        self,
        iterable: Iterable[T],
        total: float | None = None,
        message: str | Callable[[T], str] | None = None,
    ) -> Iterable[T]:
        """Loop over anything and report how far it is; keeps no cursor and never stops.

        ``total``: how many items; None: ``len(iterable)`` where it has one, else unknown.
        ``message``: a text, or a function of the item.
        """
        return self._awa_resumption().track(iterable, total=total, message=message)

    def interrupt(self) -> NoReturn:
        """Leave off here; the task is sent again at once and goes on from its checkpoint.

        It counts neither as a failure nor as a retry. For the task's own thread, where
        ``should_stop`` is true: with a lost lease nothing is sent, an asked-for cancellation
        cancels, and a passed ``deadline`` is treated by ``lost_policy``. Raises NotInAttempt
        outside an attempt; inside it a BaseException, which is to pass.
        """
        self._awa_inside("interrupt")
        self._awa_resumption().interrupt()

    def snooze(self, seconds: float) -> NoReturn:
        """Leave off here and go on from the checkpoint in ``seconds``, under the same id.

        The attempt is not counted. Raises as ``interrupt`` does, and ValueError for what is no
        number of seconds, 0 or more.
        """
        self._awa_inside("snooze")
        if not _is_number(seconds) or not 0 <= seconds < _LONGEST:
            raise ValueError(f"seconds is {seconds!r}; it must be a number of seconds, 0 or more")
        raise Snooze(seconds)

    def callback_token(self, *, name: str = _NAME) -> str:
        """What somebody outside is to pass to ``Client.complete_callback`` or ``fail_callback``.

        Asked again for the same name it is the same; from when one is made for another name, or in
        a newer attempt, it is refused. It is a secret: whoever has it can answer. Waits for the
        database, and raises StoreUnavailable after 5 seconds, LeaseLost, NotInAttempt outside an
        attempt, CallbackFailed as ``wait_for_callback``, and ValueError where the callback has
        been answered: look into ``callbacks`` before you ask.
        """
        return self._awa_inside("callback_token").callback_token(_checked_name(name))

    def wait_for_callback(self, timeout: float | None = None, *, name: str = _NAME) -> Any:
        """The payload of a callback that has come; else leave off here until it comes.

        The job waits without a worker, for ``timeout`` seconds at most (None: for ever), and then
        goes on from its checkpoint in a new attempt, which finds the payload here. In time out it
        is treated by ``lost_policy``; ``fail_callback`` fails it. Raises as ``callback_token`` and
        ``interrupt`` do, CallbackFailed where that came while the task ran, and ValueError for a
        timeout that is not allowed.
        """
        attempt = self._awa_inside("wait_for_callback")
        if timeout is not None and (not _is_number(timeout) or not 0 < timeout < _LONGEST):
            raise ValueError(
                f"timeout is {timeout!r}; it must be a number of seconds above 0, or None"
            )
        callbacks = attempt.callbacks
        if _checked_name(name) in callbacks:
            return callbacks[name]
        attempt.answers.raise_if_failed(name)
        raise Park(attempt.callback_token(name), timeout)

    @property
    def callbacks(self) -> Mapping[str, Any]:
        """The payloads of callbacks of this run, by name; read-only, waits as ``checkpoint``."""
        attempt = self._awa_attempt()
        return NOTHING if attempt is None else MappingProxyType(dict(attempt.callbacks))

    @property
    def callback_payload(self) -> Any:
        """The payload of the callback that has no name of its own; None until it has come."""
        return self.callbacks.get(_NAME)

    def checkpoint_in(self, connection: Any, values: Mapping[str, Any]) -> None:
        """Write into the checkpoint in the caller's open transaction: both commit, or neither.

        ``connection``: a psycopg connection, Django's, or a Connection or Session of SQLAlchemy, to
        the database that has celery-awa's tables. ``values`` are merged as by ``update_metadata``
        and go before what that reports, so report each key in one way only. Raises LeaseLost if
        another attempt has the job: let it roll the transaction back. Raises InvalidProgress,
        ProgressTooLarge, TypeError and what the connection raises. Outside an attempt it checks its
        input and does nothing. In eager mode the checkpoint changes at once.

        Do not call ``flush_progress`` inside the transaction: it would wait for its lock.
        """
        attempt = self._awa_attempt()
        if attempt is None:
            check_keys(values)
            encode_pairs(values, DEFAULT_LIMIT)
        else:
            attempt.checkpoint_in(connection, values)

    def _awa_inside(self, verb: str) -> Attempt:
        attempt = self._awa_attempt()
        if attempt is None:
            raise NotInAttempt(f"{verb}() needs a running attempt of this task")
        return attempt

    def _awa_resumption(self) -> Resumption:
        attempt = self._awa_attempt()
        if attempt is None:
            return Resumption(None, let_pass=_NO_ITEMS_ERROR)
        if attempt.resumption is None:
            attempt.resumption = Resumption(attempt, let_pass=_NO_ITEMS_ERROR)
        return attempt.resumption  # type: ignore[no-any-return]  # the runtime does not know it


@contextmanager
def _later_without_database(attempt: Attempt | None) -> Iterator[None]:
    """Where a loop or a step cannot know what is done, the task is sent again for later.

    Not where the database refused this very attempt, as it would the next.
    """
    try:
        yield
    except StoreUnavailable as exc:
        if attempt is None or attempt.unclaimable is not None:
            raise
        trouble.warn("later", "celery-awa: a task goes on later, since %s", error_text(exc))
        raise Snooze(random.uniform(*_WITHOUT_DATABASE)) from exc


def _checked_name(name: Any) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= _MOST_CHARACTERS or not is_storable(name):
        raise ValueError(
            f"name is {name!r}; it must be a text of 1 to {_MOST_CHARACTERS} characters"
        )
    return name


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
