"""Messages that were published, and that a broker then forgets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import psycopg
import pytest

from tests.acceptance.brokers import Broker
from tests.acceptance.diary import Diary, Gate
from tests.acceptance.jobs import Jobs, outcome
from tests.acceptance.workers import FAST, Worker
from tests.waiting import eventually

Start = Callable[..., Worker]
APP = "tests.acceptance.apps.rescued"
LEFT = {"last_id": 7}
#: Seconds until the retry.
COUNTDOWN = 3.0


@pytest.fixture
def settings(settings: dict[str, Any]) -> dict[str, Any]:
    return {**settings, **FAST, "awa_resend_after": 1}


@pytest.mark.parametrize("policy", ["requeue", "fail"])
def test_a_retry_whose_message_is_lost_in_the_broker_is_sent_again_and_executed_once(
    start: Start,
    client: ModuleType,
    jobs: Jobs,
    diary: Diary,
    gate: Gate,
    broker: Broker,
    database_url: str,
    policy: str,
) -> None:
    worker = start(config={"task_annotations": {"*": {"lost_policy": policy}}})
    sent = client.retry_once.delay(COUNTDOWN, gate.path)
    left = diary.wait_for("left", sent.id)
    # Else it would take the message at once, and keep it until its time.
    client.app.control.cancel_consumer(broker.queue)
    worker.wait_for_log("Canceling queue")
    gate.open()
    eventually(lambda: sent_at(database_url, sent.id), what="the note that it was published")

    (message,) = waiting(broker)
    message.unlink()
    client.app.control.add_consumer(broker.queue)

    assert outcome(sent) == LEFT
    job = jobs.wait_for(sent.id, "completed")
    assert (job.attempt, job.run_lease, job.rescues) == (2, 2, 0)
    _, again = diary.entries("began", sent.id)
    assert again["checkpoint"] == LEFT
    # Its time, and then how long it was waited for.
    assert again["at"] - left["at"] >= COUNTDOWN + 1
    assert "jobs rescued or sent: 1 sent" in worker.log()


def waiting(broker: Broker) -> list[Path]:
    """The messages in the queue, on the filesystem broker."""
    folder = Path(broker.config["broker_transport_options"]["data_folder_in"])
    return list(folder.glob(f"*.{broker.queue}.msg"))


def sent_at(url: str, task_id: str) -> Any:
    """When the message that a job waits for was published."""
    with psycopg.connect(url) as connection:
        row = connection.execute(
            "SELECT sent_at FROM celery_awa.jobs WHERE task_id = %s", [task_id]
        ).fetchone()
    return row and row[0]
