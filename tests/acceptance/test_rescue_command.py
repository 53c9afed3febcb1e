"""``python -m celery_awa rescue``, apart from workers that leave rescues to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner

from celery_awa.cli import main
from tests.acceptance.apps.configured import CONFIG_VARIABLE
from tests.acceptance.brokers import Broker
from tests.acceptance.diary import Diary, Gate
from tests.acceptance.jobs import Jobs
from tests.acceptance.workers import FAST, ROOT, Worker, merged
from tests.processes import Process
from tests.waiting import eventually

Start = Callable[..., Worker]
APP = "tests.acceptance.apps.rescued"
#: It registers no task, and ``install`` was never called.
BARE = "tests.acceptance.apps.bare"
LEFT = {"last_id": 7}


@pytest.fixture
def settings(settings: dict[str, Any]) -> dict[str, Any]:
    apart = {
        "awa_rescue_in_workers": False,
        "task_annotations": {"*": {"lost_policy": "requeue"}},
    }
    return {**settings, **FAST, **apart}


@pytest.fixture
def start(start_worker: Start, tmp_path: Path) -> Start:
    def start() -> Worker:
        slates = tmp_path / f"slates {len(list(tmp_path.iterdir()))}"
        slates.mkdir()
        return start_worker(app=APP, config={"awa_slate_dir": str(slates)})

    return start


@pytest.fixture
def environment(broker: Broker, settings: dict[str, Any], database_url: str) -> dict[str, str]:
    """The environment of a command whose app does not name its database."""
    config = merged(broker.config, settings)
    del config["awa_database_url"]
    return {
        **os.environ,
        CONFIG_VARIABLE: json.dumps(config),
        "AWA_DATABASE_URL": database_url,
        "PYTHONUNBUFFERED": "1",
    }


def command(*options: str) -> list[str]:
    return [sys.executable, "-m", "celery_awa", "rescue", "--app", BARE, *options]


def test_lost_jobs_are_rescued_by_an_app_that_knows_nothing_of_their_tasks(
    start: Start,
    client: ModuleType,
    jobs: Jobs,
    diary: Diary,
    gate: Gate,
    environment: dict[str, str],
    tmp_path: Path,
) -> None:
    first = start()
    sent = client.resume.delay(gate.path, "value")
    diary.wait_for("left", sent.id)
    rescuer = Process(command(), log=tmp_path / "rescuer.log", env=environment, cwd=ROOT)
    try:
        first.kill()
        line = rescuer.wait_for_log(r"^\S+ 1 requeued.*$", timeout=20)
        assert line[0].endswith(" 1 requeued, 1 sent")
        second = start()
        assert diary.wait_for("began", sent.id, count=2)["checkpoint"] == LEFT
        rescuer.kill(signal.SIGTERM)
        assert rescuer.wait(5) == 0
        assert len(rescuer.log().splitlines()) == 1
    finally:
        rescuer.end()

    second.kill()
    eventually(lambda: silent_for(jobs, sent.id) > FAST["awa_stale_after"], what="a stale attempt")
    done = subprocess.run(
        command("--once"), cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(" 1 requeued, 1 sent\n")
    assert jobs.wait_for(sent.id, "retryable").rescues == 2


def silent_for(jobs: Jobs, task_id: str) -> float:
    """Seconds since the last heartbeat."""
    job = jobs.get(task_id)
    assert job is not None
    assert job.heartbeat_at is not None
    return time.time() - job.heartbeat_at.timestamp()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--app", "no.such.app"], "the app no.such.app cannot be loaded: ModuleNotFoundError"),
        (["--app", "json"], "the app json cannot be loaded"),
        (["--app", BARE], "which database? Give --database-url postgresql://…"),
        (["--app", BARE, "--database-url", "embedded:"], "would end with this command"),
        (["--app", BARE, "--database-url", "mysql://x"], "the database URL cannot be read"),
        (
            ["--app", BARE, "--database-url", "postgresql://127.0.0.1:1/x", "--once"],
            "Connection refused",
        ),
    ],
)
def test_what_is_wrong_from_the_start_is_said_in_one_line(
    options: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CONFIG_VARIABLE, "{}")
    monkeypatch.delenv("AWA_DATABASE_URL", raising=False)
    done = CliRunner().invoke(main, ["rescue", *options])
    assert (done.exit_code, len(done.output.splitlines())) == (1, 1)
    assert said in done.output


def test_a_schema_without_tables_is_an_error(
    empty_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CONFIG_VARIABLE, "{}")
    options = ["--app", BARE, "--schema", "other", "--database-url", empty_database_url]
    done = CliRunner().invoke(main, ["rescue", *options])
    assert done.exit_code == 1
    assert "schema other has no tables of celery-awa: run `python -m celery_awa" in done.output
