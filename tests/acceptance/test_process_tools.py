"""Processes that tests start are watched, and nothing of them is left."""

from __future__ import annotations

import signal
import sys

import pytest

from tests.processes import Process, command_line
from tests.services.required import unavailable
from tests.waiting import eventually


@pytest.fixture
def run(tmp_path):
    started = []

    def start(script):
        started.append(Process([sys.executable, "-uc", script], log=tmp_path / "log"))
        return started[-1]

    yield start
    for process in started:
        process.end()


def test_what_leaves_its_session_and_outlives_its_parent_fails_the_end_and_dies(run):
    process = run(
        "import subprocess\n"
        "print(subprocess.Popen(['sleep', '60'], start_new_session=True).pid, 'started')"
    )
    left = int(process.wait_for_log(r"(\d+) started").group(1))
    assert process.wait() == 0
    assert process.family() == [left]
    with pytest.raises(AssertionError, match=r"left running .*sleep 60"):
        process.end(timeout=0.2)
    assert command_line(left) == ""


def test_a_signal_reaches_the_process_and_its_log_tells(run):
    process = run(
        "import signal\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('asked'))\n"
        "print('listening')\n"
        "signal.pause()\n"
        "raise SystemExit(7)"
    )
    process.wait_for_log("^listening$")
    assert process.running
    process.kill(signal.SIGTERM)
    assert process.wait() == 7
    assert "asked" in process.log()


def test_waiting_for_the_log_of_a_process_that_ended_shows_it(run):
    process = run("print('no luck'); raise SystemExit(3)")
    with pytest.raises(RuntimeError, match=r"ended with 3 .*(?s:.*)no luck"):
        process.wait_for_log("ready")


def test_what_never_comes_true_says_what_it_was_and_stood_at(run):
    with pytest.raises(
        AssertionError, match=r"not within 0\.05 s: the moon; the last answer was 0"
    ):
        eventually(lambda: 0, timeout=0.05, what="the moon")


def test_a_missing_service_skips_unless_services_are_required(monkeypatch):
    monkeypatch.delenv("AWA_TEST_REQUIRE_SERVICES", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no moon"):
        unavailable("no moon")
    monkeypatch.setenv("AWA_TEST_REQUIRE_SERVICES", "1")
    with pytest.raises(pytest.fail.Exception, match="no moon"):
        unavailable("no moon")
