"""Tasks that wait for somebody outside, without a worker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from celery_awa import Callback, Client
from tests.acceptance.brokers import on_every_broker
from tests.acceptance.diary import Diary, Gate
from tests.acceptance.jobs import Jobs, outcome
from tests.acceptance.workers import FAST, Worker

Start = Callable[..., Worker]
APP = "tests.acceptance.apps.resuming"


@pytest.fixture
def settings(settings: dict[str, Any]) -> dict[str, Any]:
    return {**settings, **FAST, "awa_stale_after": 60}


@pytest.fixture
def operator(database_url: str) -> Iterator[Client]:
    with Client(database_url) as one:
        yield one


@on_every_broker
def test_a_waiting_task_takes_no_worker_and_goes_on_with_the_payload(
    start: Start, client: ModuleType, jobs: Jobs, diary: Diary, operator: Client
) -> None:
    start("solo", concurrency=1)
    sent = client.ask_outside.delay(60)
    token = diary.wait_for("asks", sent.id)["token"]
    job = jobs.wait_for(sent.id, "waiting_external")
    assert job.callback_id == token
    assert job.callback_timeout_at is not None
    assert job.attempt == 0
    # Its only process is free.
    assert outcome(client.in_steps.delay()) == ["first", "second", "third"]
    assert operator.complete_callback(token, {"paid": 12}) is Callback.DONE
    assert outcome(sent) == {"paid": 12}
    assert len(diary.entries("began", sent.id)) == 2
    assert jobs.wait_for(sent.id, "completed").attempt == 1
    assert operator.complete_callback(token, {"paid": 13}) is Callback.REFUSED


def test_of_concurrent_answers_one_wins(
    start: Start, client: ModuleType, jobs: Jobs, diary: Diary, database_url: str
) -> None:
    start()
    sent = client.ask_outside.delay(60)
    token = diary.wait_for("asks", sent.id)["token"]
    jobs.wait_for(sent.id, "waiting_external")
    answers: dict[int, Callback] = {}
    together = threading.Barrier(6)

    def answer(number: int) -> None:
        with Client(database_url) as one:
            one.get_job(sent.id)
            together.wait()
            answers[number] = one.complete_callback(token, number)

    threads = [threading.Thread(target=answer, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers.values()) == [Callback.DONE] + [Callback.REFUSED] * 5
    assert answers[outcome(sent)] is Callback.DONE


def test_an_answer_that_comes_before_the_task_waits_is_not_lost(
    start: Start, client: ModuleType, diary: Diary, gate: Gate, operator: Client
) -> None:
    start()
    sent = client.ask_outside.delay(60, gate.path)
    token = diary.wait_for("asks", sent.id)["token"]
    assert operator.complete_callback(token, "quick") is Callback.DONE
    gate.open()
    assert outcome(sent) == "quick"


def test_a_failed_callback_fails_the_task(
    start: Start, client: ModuleType, jobs: Jobs, diary: Diary, operator: Client
) -> None:
    start()
    sent = client.ask_outside.delay(60)
    token = diary.wait_for("asks", sent.id)["token"]
    jobs.wait_for(sent.id, "waiting_external")
    assert operator.fail_callback(token, "the bank said no") is Callback.DONE
    assert "the bank said no" in repr(outcome(sent))
    assert "the bank said no" in jobs.wait_for(sent.id, "failed").errors[0].error


@pytest.mark.parametrize("policy", ["requeue", "fail"])
def test_a_callback_that_does_not_come_is_treated_by_policy(
    start: Start, client: ModuleType, jobs: Jobs, diary: Diary, operator: Client, policy: str
) -> None:
    start(config={"task_annotations": {"*": {"lost_policy": policy}}})
    sent = client.ask_outside.delay(0.5)
    first = diary.wait_for("asks", sent.id)["token"]
    if policy == "fail":
        assert "no callback came in time" in repr(outcome(sent))
    else:
        # It asks anew, and the token of the old lease counts no more.
        second = diary.wait_for("asks", sent.id, count=2)["token"]
        assert operator.complete_callback(first, "late") is Callback.REFUSED
        assert operator.complete_callback(second, "in time") is Callback.DONE
        assert outcome(sent) == "in time"


def test_two_waits_of_one_task_each_get_their_own_answer(
    start: Start, client: ModuleType, diary: Diary, operator: Client
) -> None:
    start()
    sent = client.ask_twice.delay()
    for number, name in enumerate(["bank", "carrier"], 1):
        asked = diary.wait_for("asks", sent.id, count=number)
        assert asked["name"] == name
        assert operator.complete_callback(asked["token"], f"of the {name}") is Callback.DONE
    assert outcome(sent) == ["of the bank", "of the carrier"]


def test_a_waiting_task_is_cancelled_at_once(
    start: Start, client: ModuleType, jobs: Jobs, diary: Diary, operator: Client
) -> None:
    start()
    sent = client.ask_outside.delay(60)
    token = diary.wait_for("asks", sent.id)["token"]
    jobs.wait_for(sent.id, "waiting_external")
    assert operator.request_cancel(sent.id) == "cancelled"
    assert "TaskRevokedError" in repr(outcome(sent))
    assert operator.complete_callback(token) is Callback.REFUSED
