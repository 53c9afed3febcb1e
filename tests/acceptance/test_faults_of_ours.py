"""Bugs in the plugin and refusals of the store: results stay Celery's, and workers live."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.acceptance.diary import Diary
from tests.acceptance.jobs import Jobs
from tests.acceptance.workers import Worker
from tests.waiting import eventually

Start = Callable[..., Worker]
APP = "tests.acceptance.apps.faulty"


@pytest.fixture
def start(start_worker: Start) -> Start:
    def start(fault: str, **options: Any) -> Worker:
        return start_worker(app=APP, env={"AWA_TEST_FAULT": fault}, **options)

    return start


@pytest.mark.parametrize(
    "fault",
    [
        "opening raises",
        "the store raises",
        "the store refuses",
        "the parts raise",
        "noting what was sent raises",
    ],
)
def test_every_end_is_celerys_own_whatever_fails_in_ours(
    start: Start, client: ModuleType, tmp_path: Path, fault: str
) -> None:
    worker = start(fault, pool="threads")
    revoked = client.wait.apply_async(("never",), countdown=2)
    worker.wait_for_log(rf"\[{revoked.id}\] received")
    revoked.revoke()
    expected = {
        client.end.delay("success"): ("SUCCESS", "done"),
        client.end.delay("failure"): ("FAILURE", "on purpose"),
        client.end.delay("retry"): ("SUCCESS", "again"),
        client.autoretry.delay(): ("SUCCESS", "again"),
        client.end.delay("replace"): ("SUCCESS", "replaced"),
        client.come_back.delay(str(tmp_path / "rejected"), "requeue"): ("SUCCESS", "again"),
        revoked: ("REVOKED", "revoked"),
    }
    ignored, rejected = client.end.delay("ignore"), client.end.delay("reject")
    assert [outcome(sent) for sent in expected] == list(expected.values())
    worker.wait_for_log(rf"\[{ignored.id}\] ignored")
    worker.wait_for_log(rf"\[{rejected.id}\] reject requeue=False")
    assert ignored.state == "PENDING"
    assert client.echo.delay("still there").get(timeout=10) == "still there"
    # Told, but once: of a database and of a bug that are there, or of a refusal.
    assert 1 <= worker.log().count(" celery-awa") <= 2


@pytest.mark.parametrize(("how", "state"), [("success", "completed"), ("failure", "failed")])
def test_an_end_that_a_time_limit_broke_off_is_made_all_the_same(
    start: Start, client: ModuleType, jobs: Jobs, how: str, state: str
) -> None:
    start("a time limit strikes each end", config={"awa_claim_after": 0})
    sent = client.end.delay(how)
    eventually(sent.ready, timeout=20, what=f"end of {sent.id}")
    assert jobs.wait_for(sent.id, state).attempt == 1


@pytest.mark.parametrize("fault", ["the store raises", "the parts raise"])
def test_celerys_verdict_on_a_child_stands_whatever_fails_in_ours(
    start: Start, client: ModuleType, diary: Diary, tmp_path: Path, fault: str
) -> None:
    worker = start(fault, concurrency=1)
    # One after the other: a child that is killed takes along what it was handed already.
    lost = client.end.delay("kill")
    assert outcome(lost) == ("FAILURE", "Worker exited prematurely: signal 9 (SIGKILL)")
    worker.wait_until_replaced(diary.wait_for("began", lost.id)["pid"])
    returned = client.come_back.delay(str(tmp_path / "killed"), "kill")
    assert outcome(returned) == ("SUCCESS", "again")
    over_time = client.wait.apply_async(("never",), time_limit=1)
    assert outcome(over_time) == ("FAILURE", "TimeLimitExceeded(1,)")
    worker.wait_until_replaced(diary.wait_for("reported", over_time.id)["pid"])
    terminated = client.wait.delay("never")
    child = diary.wait_for("reported", terminated.id)["pid"]
    terminated.revoke(terminate=True)
    assert outcome(terminated) == ("REVOKED", "terminated")
    worker.wait_until_replaced(child)
    assert client.echo.delay("still there").get(timeout=10) == "still there"
    processes = len({entry["pid"] for entry in diary.entries()}) + 1
    assert 1 <= worker.log().count(" celery-awa") <= 2 * processes


def outcome(sent: Any) -> tuple[str, str]:
    eventually(sent.ready, timeout=20, what=f"end of {sent.id}")
    return sent.state, str(sent.result).partition(" Job:")[0]
