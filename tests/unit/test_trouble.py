"""Warnings of what is wrong: seldom, counted, and never a trouble of their own."""

from __future__ import annotations

import logging
import os
import signal
import threading

import pytest

from celery_awa.runtime import trouble as trouble_module
from celery_awa.runtime.trouble import EVERY, Trouble, logger
from tests.runtime_parts import SOON, Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch, trouble_module)


@pytest.fixture(autouse=True)
def _everything_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "celery_awa")


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_one_warning_a_minute_and_kind_counts_what_was_held_back(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    trouble = Trouble()
    for number in range(5):
        trouble.warn("database", "away for the %d. time", number)
    trouble.warn("bug", "another kind")
    assert messages(caplog) == ["away for the 0. time", "another kind"]
    clock.pass_by(EVERY)
    trouble.warn("database", "away at %d%%", 100)
    assert messages(caplog)[2] == "away at 100% (and 4 more like it since the last warning)"
    clock.pass_by(EVERY)
    trouble.warn("database", "away")
    assert messages(caplog)[3] == "away"


def test_the_end_of_a_trouble_is_told_once_and_only_if_the_trouble_was(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    trouble = Trouble()
    trouble.over("database", "back")
    assert messages(caplog) == []
    trouble.warn("database", "away")
    trouble.over("database", "back")
    trouble.over("database", "back")
    assert messages(caplog) == ["away", "back"]


def test_a_trouble_that_comes_and_goes_is_warned_of_once_a_minute(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    trouble = Trouble()
    for _ in range(100):
        trouble.warn("database", "away")
        trouble.over("database", "back")
        clock.pass_by(EVERY / 100)
    assert messages(caplog) == ["away", "back"]
    clock.pass_by(1)
    trouble.warn("database", "away")
    assert messages(caplog)[2:] == ["away (and 99 more like it since the last warning)"]


def test_a_handler_that_raises_reaches_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(logging.Handler):
        def handle(self, record: logging.LogRecord) -> bool:
            raise OSError("the disk is full")

    trouble, handler = Trouble(), Broken()
    logger.addHandler(handler)
    try:
        trouble.warn("database", "away")
        trouble.over("database", "back")
    finally:
        logger.removeHandler(handler)


def test_many_threads_warn_once(caplog: pytest.LogCaptureFixture) -> None:
    trouble = Trouble()
    threads = [
        threading.Thread(target=lambda: [trouble.warn("database", "away") for _ in range(500)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert messages(caplog) == ["away"]


def test_a_handler_of_a_signal_may_warn_in_the_midst_of_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trouble = Trouble()
    with trouble._lock:
        trouble.warn("database", "away")
    assert messages(caplog) == ["away"]


def test_a_child_forked_while_another_thread_warns_can_warn() -> None:
    trouble = Trouble()
    taken, enough = threading.Event(), threading.Event()

    def hold() -> None:
        with trouble._lock:
            taken.set()
            enough.wait(SOON)

    holder = threading.Thread(target=hold)
    holder.start()
    assert taken.wait(SOON)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(5)
        logger.disabled = True
        try:
            trouble.warn("database", "away")
            trouble.over("database", "back")
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    enough.set()
    holder.join(SOON)


def test_a_forked_process_tells_of_its_own_troubles_and_not_of_its_parents() -> None:
    trouble = Trouble()
    trouble.warn("database", "away")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        heard: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("celery_awa").addHandler(handler)
        logging.getLogger("celery_awa").setLevel(logging.INFO)
        trouble.over("database", "back")
        trouble.warn("database", "away from here")
        os.write(writing, ",".join(heard).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 1_000) == b"away from here"
    os.close(reading)
    os.close(writing)
