"""What goes on between greenlets and the real thread beside them, each as a process of its own.

``python -m tests.integration.beside_greenlets gevent|eventlet NAME``. It ends with status 0 where
all went as it should; a greenlet that waits for ever ends in the watchdog's status instead.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

WATCHDOG = 30.0


def patch(library: str) -> Any:
    """Put the library's greenlets in the place of threads."""
    warnings.simplefilter("ignore")  # eventlet says that it is deprecated
    loaded = importlib.import_module(library)
    if library == "gevent":
        importlib.import_module("gevent.monkey").patch_all()
    else:
        loaded.monkey_patch()
    return loaded


def records_of_the_real_thread_are_written(library: str) -> None:
    """Greenlets that log, through a handler that switches, go on beside a real thread that logs."""
    green = patch(library)
    import logging
    import time

    from celery_awa import native
    from celery_awa.runtime import loop

    written: list[str] = []

    class Switching(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            time.sleep(0.001)
            written.append(record.getMessage())

    logging.getLogger().addHandler(Switching())
    over = []

    def real() -> None:
        for number in range(100):
            logging.getLogger("celery_awa").warning("ours %d", number)
            logging.getLogger("psycopg").warning("the driver's %d", number)
            native_sleep(0.001)
        over.append(True)

    def greenlet() -> None:
        while not over:
            logging.getLogger("app").warning("the app's")
            time.sleep(0.001)

    native_sleep = native._original("time", "sleep")
    loop.serve()
    native.start_thread(real, "real")
    for one in [green.spawn(greenlet) for _ in range(5)]:
        getattr(one, "join", getattr(one, "wait", None))()
    while len([text for text in written if text != "the app's"]) < 200:
        time.sleep(0.01)
    for whose in ("ours", "the driver's"):
        assert [text for text in written if text.startswith(whose)] == [
            f"{whose} {number}" for number in range(100)
        ]
    assert written.count("the app's") > 20


def greenlets_wait_without_keeping_others(library: str) -> None:
    """Twenty greenlets ask at once, each is answered, and another sleeps undisturbed meanwhile."""
    green = patch(library)
    import time

    from celery_awa import native

    thread, native_sleep = _thread(), native._original("time", "sleep")

    def slow(number: int) -> Callable[[object], int]:
        def work(store: object) -> int:
            native_sleep(0.05)
            return number

        return work

    answers: list[int] = []
    for number in range(20):
        green.spawn(lambda number=number: answers.append(thread.ask(slow(number), 20)))
    longest = 0.0
    while len(answers) < 20:
        began = time.monotonic()
        time.sleep(0.001)
        longest = max(longest, time.monotonic() - began)
    assert sorted(answers) == list(range(20))
    # One after the other they take a second.
    assert longest < 0.5, longest
    assert thread.stop(20)


def what_was_made_before_the_patch_works_after_it(library: str) -> None:
    """An app may import us first; bells and locks that exist by then do their work."""
    import threading

    from celery_awa import native
    from celery_awa.progress import ProgressBuffer
    from celery_awa.runtime.bell import Bell

    bell, buffer = Bell(), ProgressBuffer()
    green = patch(library)
    ticks: list[bool] = []
    green.spawn(lambda: ticks.append(bell.wait(0.2)))
    green.spawn(lambda: ticks.append(True))
    green.sleep(0.1)
    assert ticks == [True]
    bell.ring()
    green.sleep(0.2)
    assert ticks == [True, True]
    buffer.set_progress(5)
    assert type(native.lock()).__module__ == "_thread"
    assert type(threading.Lock()).__module__ != "_thread"


def the_loop_itself_does_not_wait(library: str) -> None:
    """Celery's handlers of signals run on the loop, where nothing may wait."""
    green = patch(library)
    import time

    from celery_awa.runtime.bell import Bell

    answers: list[tuple[bool, float]] = []
    rung, silent = Bell(), Bell()
    rung.ring()

    def wait() -> None:
        began = time.monotonic()
        answers.append((rung.wait(20), 0.0))
        answers.append((silent.wait(20), time.monotonic() - began))

    if library == "gevent":
        green.get_hub().loop.run_callback(wait)
    else:
        green.hubs.get_hub().schedule_call_global(0, wait)
    green.sleep(0.01)
    (heard, _), (unheard, took) = answers
    assert heard
    assert not unheard
    assert took < 1


def a_killed_greenlet_leaves_the_thread_to_others(library: str) -> None:
    """A greenlet that is killed while it waits for an answer takes nothing along."""
    green = patch(library)
    import time

    from celery_awa import native

    thread, native_sleep = _thread(), native._original("time", "sleep")
    began: list[bool] = []

    def work(store: object) -> None:
        began.append(True)
        native_sleep(0.3)

    waiting = green.spawn(lambda: thread.ask(work, 20))
    while not began:
        time.sleep(0.01)
    waiting.kill()
    assert thread.ask(lambda store: "an answer", 20) == "an answer"
    assert not thread._errands
    assert thread.stop(20)


def forks_hardly_wait_for_the_driver(library: str) -> None:
    """Nothing can run while a fork waits, so it does so for a moment only."""
    patch(library)
    import time

    from celery_awa import native

    thread, native_sleep = _thread(), native._original("time", "sleep")
    began: list[bool] = []

    def work(store: object) -> None:
        began.append(True)
        native_sleep(2)

    errand = thread.post(work)
    while not began:
        time.sleep(0.01)
    at = time.monotonic()
    child = os.fork()
    if not child:
        os._exit(0)
    took = time.monotonic() - at
    assert not errand.done
    assert took < 0.5, took
    assert os.waitpid(child, 0)[1] == 0
    assert thread.stop(20)


class _Store:
    """Says nothing of its own."""

    def close(self) -> None:
        """There is nothing to close."""

    def abandon(self) -> None:
        """There is nothing to let go of."""


def _thread() -> Any:
    from celery_awa.runtime.database_thread import DatabaseThread
    from celery_awa.runtime.trouble import Trouble

    return DatabaseThread(_Store, Trouble())  # type: ignore[arg-type]  # never asked for a verb


SCENES = (
    records_of_the_real_thread_are_written,
    greenlets_wait_without_keeping_others,
    what_was_made_before_the_patch_works_after_it,
    the_loop_itself_does_not_wait,
    a_killed_greenlet_leaves_the_thread_to_others,
    forks_hardly_wait_for_the_driver,
)

if __name__ == "__main__":
    faulthandler.dump_traceback_later(WATCHDOG, exit=True)
    {scene.__name__: scene for scene in SCENES}[sys.argv[2]](sys.argv[1])
