"""Every make of task, and the real packages beside Celery: Django, Flask, Sentry, pydantic."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from celery_awa import SettingsError
from tests.acceptance.diary import Diary, Gate
from tests.acceptance.jobs import Jobs
from tests.acceptance.workers import CAN_SPAWN, POOLS, Worker
from tests.waiting import eventually

Start = Callable[..., Worker]
Load = Callable[..., ModuleType]
APPS = "tests.acceptance.apps"
INTEGRATED = f"{APPS}.integrated"
#: With as many children as the test has at work: one that is still being spawned when its worker
#: is killed does not notice.
METHODS = ["fork", *(["spawn"] * CAN_SPAWN)]


def wait_for_progress(jobs: Jobs, task_id: str, percent: int, message: str) -> None:
    def shown() -> bool:
        job = jobs.get(task_id)
        assert job is not None
        assert (job.state, job.percent, job.message) == ("running", percent, message)
        return True

    eventually(shown, what=f"{percent} {message!r} in the row")


@pytest.mark.parametrize("pool", POOLS)
def test_tasks_of_every_make_report_and_take_their_annotations(
    start_worker: Start, load_client: Load, jobs: Jobs, diary: Diary, tmp_path: Path, pool: dict
) -> None:
    annotated = {
        f"{INTEGRATED}.shared": {"lost_policy": "fail"},
        f"{INTEGRATED}.unbound": {"lost_policy": "requeue"},
    }
    client = load_client(INTEGRATED)
    start_worker(
        app=INTEGRATED, **pool | {"concurrency": 1}, config={"task_annotations": annotated}
    )
    makes = {
        client.shared: ("shared", "fail"),
        client.unbound: ("unbound", "requeue"),
        client.class_based: ("class", "fail"),
    }
    # Celery does not tell spawned children of tasks that were registered as objects.
    if pool.get("start_method") == "spawn":
        del makes[client.class_based]
    for task, (make, policy) in makes.items():
        gate = Gate(tmp_path / f"gate of {make}")
        sent = task.delay(30, gate.path)
        assert diary.wait_for("reported", sent.id)["lost_policy"] == policy
        wait_for_progress(jobs, sent.id, 30, make)
        gate.open()
        assert sent.get(timeout=20) == 30
        assert jobs.wait_for(sent.id, "completed").kind == task.name


def test_an_annotation_of_all_tasks_sets_our_option(load_client: Load) -> None:
    client = load_client(INTEGRATED, config={"task_annotations": {"*": {"lost_policy": "requeue"}}})
    tasks = (client.shared, client.unbound, client.class_based)
    assert [task.lost_policy for task in tasks] == ["requeue"] * 3


@pytest.mark.parametrize(
    "annotations",
    [{"*": {"lost_policy": "again"}}, {f"{INTEGRATED}.shared": {"lost_policy": "again"}}],
    ids=["all tasks", "by name"],
)
def test_a_wrong_annotation_says_what_is_allowed(
    load_client: Load, annotations: dict[str, Any]
) -> None:
    with pytest.raises(SettingsError) as told:
        load_client(INTEGRATED, config={"task_annotations": annotations})
    assert re.fullmatch(
        r"lost_policy of task \S+ is 'again'; it must be 'requeue', 'fail' or None",
        str(told.value),
    )


def test_settings_of_a_namespace_count_and_misspelt_ones_are_told(
    start_worker: Start, client: ModuleType, jobs: Jobs
) -> None:
    worker = start_worker(
        app=f"{APPS}.namespaced",
        config={
            "awa_max_progress_bytes": 256,
            "awa_claim_after": -1,
            "awa_write_intervl": 5,
            "test_foreign": {"AWA_OTHER": 1, "OTHER_AWA_SHEMA": 2, "awa_shema": "lower"},
        },
    )
    sent = client.app.send_task(f"{APPS}.namespaced.report_too_much", (300,))
    assert sent.get(timeout=20) == 256
    jobs.wait_for(sent.id, "completed")
    told = [line for line in worker.log().splitlines() if "awa_" in line.lower()]
    assert [line.partition("celery-awa: ")[2] for line in told] == [
        "awa_claim_after is -1; it must not be less than 0; the default 1.0 is used",
        "unknown setting awa_shema; did you mean awa_schema?",
        "unknown setting awa_write_intervl; did you mean awa_write_interval?",
    ]


@pytest.mark.parametrize("start_method", METHODS)
def test_django_tasks_report_and_keep_their_sending_on_commit(
    start_worker: Start,
    client: ModuleType,
    jobs: Jobs,
    diary: Diary,
    tmp_path: Path,
    start_method: str,
) -> None:
    config = {"test_sqlite": str(tmp_path / "sqlite"), "test_default_base": True}
    name = f"{APPS}.in_django"
    worker = start_worker(app=name, start_method=start_method, config=config, concurrency=2)
    for count, task in enumerate(("with_base", "with_default"), 1):
        gate = Gate(tmp_path / f"gate of {task}")
        sent = client.app.send_task(f"{name}.send_on_commit", (task, gate.path))
        assert sent.get(timeout=20) == {"rolled back": 0, "within": 0, "committed": 2}
        diary.wait_for("reported", count=2 * count)
        for entry in diary.entries("reported")[-2:]:
            bases = entry["bases"]
            assert bases[0] == task
            assert bases.index("AwaMixin") < bases.index("DjangoTask")
            wait_for_progress(jobs, entry["task_id"], entry["percent"], "django")
        gate.open()
        for entry in diary.entries("reported")[-2:]:
            jobs.wait_for(entry["task_id"], "completed")
    assert "celery-awa" not in worker.log()


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_flask_tasks_report_within_the_context_of_their_application(
    start_worker: Start, client: ModuleType, jobs: Jobs, diary: Diary, gate: Gate, pool: str
) -> None:
    worker = start_worker(app=f"{APPS}.in_flask", pool=pool)
    sent = [
        client.app.send_task(f"{APPS}.in_flask.{task}", (30, gate.path))
        for task in ("with_base", "with_default")
    ]
    for result in sent:
        bases = diary.wait_for("reported", result.id)["bases"]
        assert bases.index("AwaMixin") < bases.index("FlaskTask")
        wait_for_progress(jobs, result.id, 30, "shop")
    gate.open()
    for result in sent:
        assert result.get(timeout=20) == "shop"
        jobs.wait_for(result.id, "completed")
    assert "celery-awa" not in worker.log()


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_under_sentry_tasks_report_and_their_failures_reach_it(
    start_worker: Start,
    client: ModuleType,
    jobs: Jobs,
    diary: Diary,
    gate: Gate,
    tmp_path: Path,
    pool: str,
) -> None:
    events = tmp_path / "events"
    worker = start_worker(app=f"{APPS}.with_sentry", pool=pool, config={"test_events": str(events)})
    name = f"{APPS}.with_sentry.report_and_fail"
    sent = client.app.send_task(name, (30, gate.path))
    assert diary.wait_for("reported", sent.id)["wrapped"]
    wait_for_progress(jobs, sent.id, 30, "watched")
    gate.open()
    job = jobs.wait_for(sent.id, "failed")
    assert (job.attempt, job.percent, job.metadata) == (2, 30, {"last_id": 7})
    assert diary.entries("reported", sent.id)[1]["checkpoint"] == {"last_id": 7}
    eventually(events.exists)
    assert [json.loads(line) for line in events.read_text().splitlines()] == [[name, "Unlucky"]]
    assert "celery-awa" not in worker.log()


def test_tasks_that_are_handed_on_as_proxies_report(
    start_worker: Start, client: ModuleType, jobs: Jobs, diary: Diary, gate: Gate
) -> None:
    worker = start_worker(app=f"{APPS}.proxied")
    sent = client.app.send_task(f"{APPS}.proxied.retry_once", (30, gate.path))
    wait_for_progress(jobs, sent.id, 30, "traced")
    gate.open()
    assert sent.get(timeout=20) == {"last_id": 7}
    assert jobs.wait_for(sent.id, "completed").attempt == 2
    assert len(diary.entries("traced", sent.id)) == 2
    assert "celery-awa" not in worker.log()


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_tasks_with_models_are_validated_and_report(
    start_worker: Start, load_client: Load, jobs: Jobs, gate: Gate, pool: str
) -> None:
    client = load_client(INTEGRATED)
    start_worker(app=INTEGRATED, pool=pool)
    sent = client.validated.delay({"number": 30}, gate.path)
    wrong = client.validated.delay({"number": "many"})
    wait_for_progress(jobs, sent.id, 30, "Order")
    gate.open()
    assert sent.get(timeout=20) == {"number": 30, "customer": "nobody"}
    assert jobs.wait_for(sent.id, "completed").attempt == 1
    job = jobs.wait_for(wrong.id, "failed")
    assert job.progress is None
    assert "ValidationError" in job.errors[0].error


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_body_and_nested_calls_have_the_requests_that_celery_gives_them(
    start_worker: Start, load_client: Load, pool: str
) -> None:
    client = load_client(INTEGRATED)
    start_worker(app=INTEGRATED, pool=pool)
    seen = []
    for task in (client.look, client.look_through_base, client.look_without):
        sent = task.delay(2)
        looked = sent.get(timeout=20)
        assert [facts.pop("attempt") for facts in looked] == (
            [task is not client.look_without, *([False] * 4), task is not client.look_without]
        )
        assert looked[0] == own_request(sent.id)
        assert {facts.pop("id") for facts in looked} == {sent.id}
        seen.append(looked)
    assert seen[0] == seen[1] == seen[2]


def own_request(task_id: str) -> dict[str, Any]:
    """What the request says in an attempt's body."""
    return {
        "id": task_id,
        "args": [2],
        "delivered": True,
        "called_directly": False,
        "requests": 1,
    }


def test_tasks_that_are_applied_or_called_directly_have_their_usual_requests(
    load_client: Load,
) -> None:
    client = load_client(INTEGRATED)
    applied = client.look.apply((2,))
    own = own_request(applied.id) | {"attempt": True}
    # Celery gives a call within a copy of the request around it, with the call's own arguments.
    within = [own | {"args": [2 - n], "requests": n + 1, "attempt": False} for n in (1, 2)]
    assert applied.get() == [own, *within, *reversed(within), own]
    directly = {"id": None, "delivered": False, "called_directly": True, "attempt": False}
    calls = [directly | {"args": [2 - n], "requests": n + 1} for n in (0, 1, 2)]
    assert client.look(2) == [*calls, *reversed(calls)]
    assert len(client.look.request_stack) == 0
