"""Runs in the worker and in each pool child: the one thread of a process that owns a connection.

Other threads hand it errands and wait for their answer no longer than they care to; services
run on it at their times. So nothing that the network does can hold up a task.
"""

from __future__ import annotations

import os
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from ..errors import AwaError, RowLocked, SchemaError, StoreUnavailable
from ..store.protocol import Store
from .trouble import Trouble

T = TypeVar("T")

#: Seconds between two tries while the database is away: jittered, doubling.
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 3.0
#: Seconds until a statement is tried again whose row was locked (it waited 0.5 s already).
LOCKED_PAUSE = 0.2
#: Ends and the like that one process keeps while the database is away.
KEPT_LIMIT = 1_000


class Service(Protocol):
    """Something that the thread does from time to time."""

    def due(self) -> float | None:
        """When it wants to run next, in ``time.monotonic()``; None: not now."""
        ...

    def run_once(self, open_store: Callable[[], Store]) -> object:
        """One pass. Opens the store only if it has something to say."""
        ...


class Errand(Generic[T]):
    """Work for the thread. It must be safe to repeat: an answer can be lost on the way."""

    def __init__(self, work: Callable[[Store], T], *, expires: float | None, start: float) -> None:
        self._work = work
        self.expires = expires
        self.start = start
        self.done = threading.Event()
        self.answer: T | None = None
        self.error: BaseException | None = None

    def run(self, store: Store) -> None:
        """On the database thread. Passes on only what asks for another try."""
        try:
            self.answer = self._work(store)
        except (StoreUnavailable, RowLocked, SchemaError):
            raise
        except BaseException as exc:
            self.error = exc
        self.done.set()

    def fail(self, error: BaseException) -> None:
        self.error = error
        self.done.set()


class DatabaseThread:
    """Errands and services of one process over one lazily opened connection.

    ``answering`` is the breaker: False from a failure until the thread succeeded again. Who
    waits by courtesy only (claim of a resumption, end of an attempt) looks at it first.
    """

    def __init__(
        self,
        open_store: Callable[[], Store],
        trouble: Trouble,
        *,
        name: str = "celery-awa",
        idle_after: float | None = None,
    ) -> None:
        self._open_store = open_store
        self._trouble = trouble
        self._name = name
        self._idle_after = idle_after
        self._changed = threading.Condition(threading.RLock())
        self._errands: deque[Errand[Any]] = deque()
        self._services: list[Service] = []
        self._thread: threading.Thread | None = None
        self._stop_at: float | None = None
        self._sleeping_until = float("inf")
        self._store: Store | None = None
        self._used_at = 0.0
        self._uses = 0
        self._last_error = ""
        self._pause = FIRST_PAUSE
        self._retry_at = 0.0
        self.answering = True
        self.dropped = 0
        _threads.add(self)

    # Any thread.

    def add_service(self, service: Service) -> None:
        """Before the first errand or expectation."""
        self._services.append(service)

    def ask(self, work: Callable[[Store], T], timeout: float) -> T:
        """Hand over work and wait for its answer; StoreUnavailable after ``timeout`` seconds."""
        errand = self._hand_over(work, expires=time.monotonic() + timeout)
        if not errand.done.wait(timeout):
            raise StoreUnavailable(
                f"the database did not confirm within {timeout:g} s{self._reason()}"
            )
        if errand.error is not None:
            raise errand.error
        return errand.answer  # type: ignore[return-value]  # set where there is no error

    def post(self, work: Callable[[Store], T], *, after: float = 0.0) -> Errand[T]:
        """Hand over work that is tried until it succeeds, from ``after`` seconds on."""
        return self._hand_over(work, expires=None, after=after)

    def expect(self, due: float) -> None:
        """A service will be due then. Cheap: wakes the thread only if it would sleep longer."""
        if due < self._sleeping_until:
            self._wake()

    def stop(self, timeout: float) -> bool:
        """Finish what was handed over, for ``timeout`` seconds at most; True if all was done."""
        with self._changed:
            self._stop_at = time.monotonic() + timeout
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join(timeout)
        return not self._errands

    def _hand_over(
        self, work: Callable[[Store], T], *, expires: float | None, after: float = 0.0
    ) -> Errand[T]:
        errand = Errand(work, expires=expires, start=time.monotonic() + after)
        with self._changed:
            if len(self._errands) >= KEPT_LIMIT:
                self._drop_oldest()
            self._errands.append(errand)
        self._wake()
        return errand

    def _drop_oldest(self) -> None:
        oldest = self._errands.popleft()
        self.dropped += 1
        oldest.fail(StoreUnavailable("dropped: too much is waiting for the database"))
        self._trouble.warn(
            "dropped", "celery-awa dropped %d writes: the database is away too long", self.dropped
        )

    def _wake(self) -> None:
        with self._changed:
            if self._thread is None:
                # A daemon: pool children leave without joining threads.
                self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify()

    def _reason(self) -> str:
        return f": {self._last_error}" if self._last_error else ""

    # The database thread.

    def _loop(self) -> None:
        while self._sleep():
            try:
                self._serve()
            except AwaError as exc:
                self._failed(exc)
            except Exception as exc:
                self._trouble.warn("bug", "celery-awa: unexpected error", exc_info=exc)
                self._retry_at = time.monotonic() + LONGEST_PAUSE
        self._disconnect()

    def _sleep(self) -> bool:
        """Until there is something to do; False when it is time to end."""
        with self._changed:
            while True:
                now = time.monotonic()
                if self._stop_at is not None and (not self._errands or now >= self._stop_at):
                    return False
                wake_at = self._wake_at(now)
                if wake_at <= now:
                    return True
                self._sleeping_until = wake_at
                self._changed.wait(None if wake_at == float("inf") else wake_at - now)
                self._sleeping_until = 0.0

    def _wake_at(self, now: float) -> float:
        # The bound is set before the services are asked, so that an attempt which begins in
        # between either is seen by them or finds a bound that makes it wake us.
        self._sleeping_until = float("inf")
        times = [errand.start for errand in self._errands]
        times += [due for service in self._services if (due := service.due()) is not None]
        work = max(min(times, default=float("inf")), self._retry_at)
        if self._stop_at is not None:
            work = min(work, self._stop_at)
        if self._store is not None and self._idle_after is not None:
            return min(work, self._used_at + self._idle_after)
        return work

    def _serve(self) -> None:
        now = time.monotonic()
        for errand in self._startable(now):
            self._run(errand)
        for service in self._services:
            due = service.due()
            if due is not None and due <= now:
                self._run_service(service)
        if self._idle_after is not None and now - self._used_at >= self._idle_after:
            self._disconnect()

    def _startable(self, now: float) -> list[Errand[Any]]:
        with self._changed:
            everything = list(self._errands)
        for errand in everything:
            if errand.expires is not None and errand.expires <= now:
                self._settle(errand, StoreUnavailable("nobody waits for this any more"))
        stopping = self._stop_at is not None
        return [e for e in everything if not e.done.is_set() and (stopping or e.start <= now)]

    def _run(self, errand: Errand[Any]) -> None:
        try:
            self._over_connection(lambda opened: errand.run(opened()))
        except RowLocked:
            errand.start = time.monotonic() + LOCKED_PAUSE
            return
        self._settle(errand)

    def _settle(self, errand: Errand[Any], error: AwaError | None = None) -> None:
        with self._changed:
            try:
                self._errands.remove(errand)
            except ValueError:
                return  # dropped meanwhile
        if error is not None:
            errand.fail(error)
        elif errand.error is not None and not isinstance(errand.error, AwaError):
            self._trouble.warn("bug", "celery-awa: unexpected error", exc_info=errand.error)

    def _run_service(self, service: Service) -> None:
        try:
            self._over_connection(service.run_once)
        except RowLocked:
            pass  # its next pass is its next try

    def _over_connection(self, work: Callable[[Callable[[], Store]], object]) -> None:
        """Run on the open connection, and once more on a new one if the old had died idle."""
        had_one, opened = self._store is not None, self._uses
        try:
            work(self._opened)
        except StoreUnavailable:
            self._disconnect()
            if not had_one:
                raise
            work(self._opened)
        if self._uses != opened:
            self._succeeded()

    def _opened(self) -> Store:
        if self._store is None:
            self._store = self._open_store()
        self._uses += 1
        self._used_at = time.monotonic()
        return self._store

    def _failed(self, exc: AwaError) -> None:
        self._disconnect()
        self.answering = False
        self._last_error = str(exc)
        self._retry_at = time.monotonic() + self._pause * random.uniform(0.5, 1.5)
        self._pause = min(self._pause * 2, LONGEST_PAUSE)
        self._trouble.warn(
            "database", "celery-awa cannot use its database, tasks go on without it: %s", exc
        )

    def _succeeded(self) -> None:
        self._pause, self._retry_at, self._last_error = FIRST_PAUSE, 0.0, ""
        if not self.answering:
            self.answering = True
            self._trouble.over("database", "celery-awa can use its database again")

    def _disconnect(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close()

    # A forked child, whose thread this is not.

    def forget(self) -> None:
        """Let go of an inherited connection without a word to the server over its socket."""
        store, self._store = self._store, None
        if store is not None:
            store.abandon()


_threads: weakref.WeakSet[DatabaseThread] = weakref.WeakSet()


def _forget_inherited() -> None:
    for thread in list(_threads):
        thread.forget()
    _threads.clear()


os.register_at_fork(after_in_child=_forget_inherited)
