"""Runs in the worker and in each pool child: the one thread of a process that owns a connection.

Other threads hand it errands and wait for their answer no longer than they care to; services
run on it at their times. So nothing that the network does can hold up a task. Whatever other
threads touch here changes in single steps, without a lock that an exception out of a signal's
handler could leave taken.
"""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from .. import native
from ..errors import AwaError, RowLocked, StoreRefused, StoreUnavailable
from ..store.protocol import Store
from . import loop
from .bell import Bell
from .breaker import Breaker
from .errand import LOCKED_PAUSE, Errand
from .lazy_store import LazyStore, Work
from .service import NEVER, Attended, Service
from .trouble import Trouble

T = TypeVar("T")

#: Seconds that a task waits for bookkeeping which it did not ask for.
COURTESY = 1.0
#: Ends and the like that one process keeps while the database is away.
KEPT_LIMIT = 1_000
#: Seconds for a new thread to take its seat, before another is started for it.
SEATED_WITHIN = 0.1


class DatabaseThread:
    """Errands and services of one process over one lazily opened connection."""

    def __init__(
        self,
        open_store: Callable[[], Store],
        trouble: Trouble,
        *,
        name: str = "celery-awa",
        idle_after: float | None = None,
        blocks: Collection[signal.Signals] = (),
    ) -> None:
        #: How many writes were given up.
        self.dropped = 0
        self._drops = itertools.count(1)
        self._trouble = trouble
        self._name = name
        self._blocks = blocks
        self._store = LazyStore(open_store, idle_after)
        self._breaker = Breaker(trouble)
        # In the order in which they came.
        self._errands: dict[int, Errand[Any]] = {}
        self._numbers = itertools.count()
        self._services: list[Attended] = []
        self._look: Errand[None] | None = None
        # Taken by the thread while it runs, so that there is one.
        self._seat = native.lock()
        self._start_again_at = 0.0
        self._bell = Bell()
        self._left = Bell()
        self._stop_at: float | None = None
        self._sleeping_until = NEVER

    # Any thread.

    @property
    def answering(self) -> bool:
        """False from a failure until the database was reached again."""
        return self._breaker.answering

    @property
    def reason(self) -> str:
        """Why the database cannot be used; empty where it answers or was not asked."""
        return self._breaker.reason

    def add_service(self, service: Service) -> None:
        """Before the first errand or expectation."""
        self._services.append(Attended(service))

    def ask(self, work: Callable[[Store], T], timeout: float) -> T:
        """Hand over work and wait for its answer; StoreUnavailable after ``timeout`` seconds."""
        errand = Errand(next(self._numbers), work)
        try:
            self._hand_over(errand).wait(timeout)
        finally:
            self._errands.pop(errand.number, None)  # nobody waits for it any more
        return self._answered(errand, f"within {timeout:g} s")

    def ask_briefly(self, work: Callable[[Store], T]) -> T:
        """Ask by courtesy: for a second at most, and not at all while the database is away."""
        errand = Errand(next(self._numbers), work, brief=True)
        try:
            self.wait_briefly(self._hand_over(errand))
        finally:
            self._errands.pop(errand.number, None)
        return self._answered(errand, "at once")

    def post(
        self,
        work: Callable[[Store], T],
        *,
        settled: Callable[[], None] | None = None,
        brief: bool = False,
    ) -> Errand[T]:
        """Hand over work that is tried until it succeeds.

        ``settled`` is called when it was answered, refused or dropped. ``brief``: it will be
        given to :meth:`wait_briefly`.
        """
        return self._hand_over(
            Errand(next(self._numbers), work, kept=True, brief=brief, settled=settled)
        )

    def wait_briefly(self, errand: Errand[Any]) -> bool:
        """Wait by courtesy, as :meth:`ask_briefly`; whether it is done."""
        if not self.answering:
            return errand.done
        if not errand.wait(COURTESY) and not errand.reason:
            self._breaker.slow()
        return errand.done

    def look(self) -> None:
        """Try the database once it answers, so that what is wrong is told. Ends with the stop."""
        self._look = self._hand_over(Errand(next(self._numbers), lambda store: None))

    def cancel(self, errand: Errand[Any]) -> None:
        """Forget about it. If it is being tried at this moment, that goes on."""
        self._errands.pop(errand.number, None)

    def expect(self, due: float) -> None:
        """A service will be due then. Cheap: wakes the thread only if it would sleep longer."""
        if due < self._sleeping_until:
            self._wake()

    def stop(self, timeout: float) -> bool:
        """Finish what was handed over, for ``timeout`` seconds at most; True if all was done."""
        self._stop_at = time.monotonic() + timeout
        if self._look is not None:
            self.cancel(self._look)
        for errand in self._waiting():
            errand.start = 0.0
        if self._errands or self._seat.locked():
            self._start_again_at = 0.0
            self._wake()
            self._left.wait(timeout)
            loop.write_records()
        return not self._errands

    def note_dropped(self) -> None:
        """A write was given up, because too many wait for the database."""
        self.dropped = next(self._drops)
        self._trouble.warn(
            "dropped", "celery-awa dropped %d writes: the database is away too long", self.dropped
        )

    def _waiting(self) -> list[Errand[Any]]:
        return list(self._errands.copy().values())

    def _answered(self, errand: Errand[T], when: str) -> T:
        if not errand.done:
            reason = errand.reason or self._breaker.reason
            raise StoreUnavailable(
                f"the database did not confirm {when}{': ' if reason else ''}{reason}"
            )
        if isinstance(errand.error, AwaError):
            raise errand.error
        if errand.error is not None:
            self._trouble.warn("bug", "celery-awa: unexpected error", exc_info=errand.error)
            raise StoreUnavailable(f"unexpected error: {errand.error!r}") from errand.error
        return errand.answer  # type: ignore[return-value]  # set where there is no error

    def _hand_over(self, errand: Errand[T]) -> Errand[T]:
        if len(self._errands) >= KEPT_LIMIT:
            self._drop_oldest()
        self._errands[errand.number] = errand
        self._wake()
        return errand

    def _drop_oldest(self) -> None:
        oldest = next((errand for errand in self._waiting() if errand.kept), None)
        if oldest is not None and self._errands.pop(oldest.number, None) is not None:
            oldest.settle(StoreUnavailable("dropped: too much is waiting for the database"))
            self.note_dropped()

    def _wake(self) -> None:
        if not self._seat.locked():
            self._start()
        self._bell.ring()

    def _start(self) -> None:
        now = time.monotonic()
        if now < self._start_again_at:
            return
        try:
            loop.serve()
            native.start_thread(self._loop, self._name, blocks=self._blocks)
        except RuntimeError as exc:
            self._trouble.warn("thread", "celery-awa: no thread for the database: %s", exc)
        self._start_again_at = now + SEATED_WITHIN

    # The database thread.

    def _loop(self) -> None:
        if not self._seat.acquire(blocking=False):
            return  # another was quicker
        try:
            while self._sleep():
                self._serve()
        finally:
            self._store.close()
            self._sleeping_until = NEVER
            self._seat.release()
            self._left.ring()

    def _sleep(self) -> bool:
        """Until there is something to do; False when it is time to end."""
        while True:
            # The bound is set before anything is looked at, so that what comes in between either
            # is seen or finds a bound that makes it ring.
            self._sleeping_until = NEVER
            now = time.monotonic()
            if self._stop_at is not None and (not self._errands or now >= self._stop_at):
                return False
            wake_at = self._wake_at()
            if wake_at <= now:
                self._sleeping_until = 0.0
                return True
            self._sleeping_until = wake_at
            self._bell.wait(wake_at - now)

    def _wake_at(self) -> float:
        times = [errand.start for errand in self._waiting()]
        times += [self._due(attended) for attended in self._services]
        work = max(min(times, default=NEVER), self._breaker.retry_at)
        bounds = (self._stop_at, self._store.idle_at)
        return min([work, *(bound for bound in bounds if bound is not None)])

    def _due(self, attended: Attended) -> float:
        try:
            return attended.due()
        except Exception as exc:
            self._trouble.warn("bug", "celery-awa: unexpected error", exc_info=exc)
            return time.monotonic() + LOCKED_PAUSE

    def _serve(self) -> None:
        """Services first: they say that attempts live. Nothing more once the database failed."""
        now = time.monotonic()
        for attended in self._services:
            if self._breaker.retry_at <= now and self._due(attended) <= now:
                attended.passed(self._carry_out(attended.run_once))
        # New ones first, so that those which fail again and again hold them up no longer.
        for errand in sorted(self._waiting(), key=lambda errand: errand.start):
            if self._breaker.retry_at <= now and errand.start <= now:
                self._run(errand)
        self._store.close_idle()

    def _run(self, errand: Errand[Any]) -> None:
        if errand.number not in self._errands:
            return  # given up while others were served
        problem = self._carry_out(lambda opened: errand.run(opened()))
        if problem is not None:
            errand.postpone(problem)
        elif self._errands.pop(errand.number, None) is not None:  # neither dropped nor given up
            errand.settle()
            if errand.kept and errand.error is not None:
                self._refused(errand.error)

    def _refused(self, error: BaseException) -> None:
        if isinstance(error, AwaError):
            self._trouble.warn("refused", "celery-awa: the database refused a write: %s", error)
        else:
            self._trouble.warn("bug", "celery-awa: unexpected error", exc_info=error)

    def _carry_out(self, work: Work) -> Exception | None:
        """Run it over the connection; what went wrong, if something did."""
        try:
            asked = self._store.use(work)
        except (RowLocked, StoreRefused) as exc:
            self._breaker.succeeded()  # that is an answer too
            return exc
        except AwaError as exc:
            self._store.close()
            self._breaker.failed(exc)
            return exc
        except Exception as exc:
            self._store.close()
            self._trouble.warn("bug", "celery-awa: unexpected error", exc_info=exc)
            return exc
        if asked:
            self._breaker.succeeded()
        return None
