"""celery_awa.testing: whatever the task's class and app are, and where it may be used."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, Task, _state, current_app, shared_task
from celery.contrib.django.task import DjangoTask
from celery.exceptions import Reject
from celery.signals import task_postrun, task_success
from kombu.exceptions import EncodeError
from pydantic import BaseModel

import celery_awa.django
from celery_awa import AwaMixin, AwaTask, current_attempt
from celery_awa.model import JobState
from celery_awa.plugin.current import here
from celery_awa.testing import crash, run_task

from . import testing_tasks as tasks
from .testing_tasks import diary


@pytest.fixture(autouse=True)
def _empty_diary() -> Iterator[None]:
    yield
    diary.empty()


class Order(BaseModel):
    number: int


class Timed(Task):
    """A base whose ``__call__`` passes on, and which has hooks."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        diary.note("call")
        return super().__call__(*args, **kwargs)

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        diary.note("before")

    def on_success(self, *args: Any) -> None:
        diary.note("success")

    def on_retry(self, *args: Any) -> None:
        diary.note("retry")


class Single(Task):
    """A base that publishes nothing twice."""

    def apply_async(self, *args: Any, **options: Any) -> Any:
        diary.note("published")
        return super().apply_async(*args, **options)


class TimedAwaTask(AwaMixin, Timed):
    abstract = True


class SingleAwaTask(AwaMixin, Single):
    abstract = True


BASES = [AwaTask, TimedAwaTask, SingleAwaTask, celery_awa.django.AwaTask]


@pytest.fixture(params=[False, True], ids=["", "eager"])
def app(request: pytest.FixtureRequest) -> Iterator[Celery]:
    """An app of the test's own, the current one; its broker cannot be had."""
    current = current_app._get_current_object()
    made = Celery("own", broker="amqp://nowhere.invalid//")
    made.conf.task_always_eager = request.param
    yield made
    made.close()
    current.set_current()


@pytest.mark.parametrize("base", BASES, ids=lambda base: base.__qualname__)
def test_a_task_may_have_any_base(base: type, app: Celery) -> None:
    @app.task(shared=False, base=base, bind=True)
    def body(self: Any, count: int) -> Any:
        assert not self.request.is_eager
        for _ in self.iterate(range(count)):
            pass
        if self.request.retries == 0:
            raise self.retry(countdown=1)
        return self.request.id, self.attempt.number

    crashed = run_task(body, 3, crash_after=2)
    retried = crashed.resume()
    assert (retried.state, retried.run_in, retried.items) == (JobState.RETRYABLE, 1, {"items": 3})
    run = retried.resume()
    assert (run.state, run.result[1]) == (JobState.COMPLETED, 3)
    told = {
        TimedAwaTask: ["before", "call", "before", "call", "retry", "before", "call", "success"],
        SingleAwaTask: ["published"],
    }
    assert diary.lines == told.get(base, [])


def test_a_failure_before_the_body_is_a_failure(app: Celery) -> None:
    class Refusing(AwaTask):
        def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
            raise OSError("no")

    @app.task(shared=False, base=Refusing)
    def body() -> None:
        """Never called."""

    run = run_task(body, checkpoint={"a": 1})
    assert (run.state, run.checkpoint) == (JobState.FAILED, {"a": 1})
    assert isinstance(run.error, OSError)
    assert run.resume().attempt == run.attempt + 1


def test_a_hook_after_the_body_may_reject_it(app: Celery) -> None:
    class Rejecting(AwaTask):
        def on_success(self, *args: Any) -> None:
            raise Reject("not in time", requeue=False)

    @app.task(shared=False, base=Rejecting)
    def body() -> str:
        return "done"

    run = run_task(body)
    assert (run.state, run.result) == (JobState.FAILED, None)
    assert isinstance(run.error, Reject)


def test_a_task_need_not_be_bound() -> None:
    assert run_task(tasks.unbound, "word").result == "WORD"


def test_a_task_may_be_a_class(app: Celery) -> None:
    class Import(AwaTask):
        name = "an import"

        def run(self, *, path: str) -> str:
            self.update_metadata({"path": path})
            self.snooze(1)

    run = run_task(app.register_task(Import()), path="a.csv")
    assert (run.state, run.checkpoint) == (JobState.SCHEDULED, {"path": "a.csv"})
    with pytest.raises(TypeError, match="needs a task with base=AwaTask"):
        run_task(Import, path="a.csv")


def test_a_shared_task_is_the_task_of_the_current_app(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Celery gives it to every app that lives and will, those of other tests too.
    monkeypatch.setattr(_state, "_apps", weakref.WeakSet([app]))
    monkeypatch.setattr(_state, "_on_app_finalizers", set())

    @shared_task(base=AwaTask, bind=True, name=f"shared {app.conf.task_always_eager}")
    def shared(self: Any) -> bool:
        return self.app is app

    assert run_task(shared).result is True


def test_a_task_may_take_models(app: Celery) -> None:
    def order(self: Any, given: Order) -> Order:
        assert isinstance(given, Order)
        if self.request.retries == 0:
            raise self.retry(args=({"number": given.number + 1},))
        return given

    # Not as text: older versions of Celery do not read that.
    order.__annotations__.update({"given": Order, "return": Order})
    task = app.task(shared=False, base=AwaTask, bind=True, pydantic=True)(order)
    run = run_task(task, {"number": 1})
    assert run.state is JobState.RETRYABLE, run.error
    assert run.resume().result == {"number": 2}


def test_each_attempt_gets_the_arguments_as_a_message_has_them(app: Celery) -> None:
    @app.task(shared=False, base=AwaTask, bind=True)
    def changing(self: Any, rows: list[int]) -> list[int]:
        rows.append(3)
        if not self.checkpoint:
            self.update_metadata({"a": 1})
            self.interrupt()
        return rows

    given = (1, 2)
    run = run_task(changing, given)
    assert run.resume().result == [1, 2, 3]


def test_arguments_that_cannot_be_sent_are_refused() -> None:
    with pytest.raises(EncodeError):
        run_task(tasks.loop, object())
    with pytest.raises(TypeError, match="argument"):
        run_task(tasks.loop)
    assert here.process is None


def test_a_signature_says_more_than_a_task(app: Celery) -> None:
    @app.task(shared=False, base=AwaTask, bind=True)
    def with_options(self: Any, *, crash_after: int) -> Any:
        request = self.request
        return request.id, request.retries, request.headers["customer"], crash_after

    signature = with_options.s(crash_after=3).set(task_id="x", headers={"customer": 7}, retries=1)
    run = run_task(signature)
    assert run.result == ("x", 1, 7, 3)
    assert run.attempt == 2
    with pytest.raises(TypeError, match="a signature has its own arguments"):
        run_task(signature, 3)


@pytest.mark.parametrize("what", [print, DjangoTask, "loop", tasks.app.tasks["celery.group"]])
def test_only_tasks_of_ours_are_run(what: Any) -> None:
    with pytest.raises(TypeError, match="run_task needs a task with base=AwaTask"):
        run_task(what)


def test_hooks_and_signals_are_as_in_a_worker() -> None:
    heard: list[str] = []

    def hear(sender: Any = None, signal: Any = None, **_: Any) -> None:
        if sender.name == tasks.loop.name:
            heard.append("success" if signal is task_success else "postrun")

    task_success.connect(hear)
    task_postrun.connect(hear)
    try:
        run_task(tasks.loop, 3)
        run_task(tasks.loop, 3, crash_after=1)
    finally:
        task_success.disconnect(hear)
        task_postrun.disconnect(hear)
    assert heard == ["success", "postrun", "postrun"]


def _surroundings() -> list[dict[str, Any]]:
    return [dict(vars(one)) for one in (here, tasks.loop, tasks.app)]


@pytest.mark.parametrize("count", [3, "three"])
def test_nothing_of_it_is_left(count: Any) -> None:
    before = _surroundings()
    run_task(tasks.loop, count)
    assert _surroundings() == before
    assert current_attempt() is None
    assert tasks.loop.request_stack.top is None


def test_nothing_is_published(monkeypatch: pytest.MonkeyPatch) -> None:
    published: list[object] = []
    monkeypatch.setattr(here, "publish", lambda *message: published.append(message))
    monkeypatch.setattr(tasks.app, "send_task", lambda *a, **k: published.append(a), raising=False)
    for task, state in (
        (tasks.snoozing, JobState.SCHEDULED),
        (tasks.retried_by_celery, JobState.RETRYABLE),
        (tasks.replaced, JobState.AVAILABLE),
    ):
        assert run_task(task).state is state
    assert published == []


def test_what_else_the_body_sends_goes_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    published: list[object] = []
    monkeypatch.setattr(tasks.app, "send_task", lambda name, *a, **k: published.append(name))
    diary.call = lambda line: tasks.loop.delay(1)
    run_task(tasks.loop, 1)
    assert published == [tasks.loop.name]


def test_what_is_no_error_of_the_task_passes_and_leaves_nothing() -> None:
    diary.call = lambda line: pytest.fail("in the task")
    with pytest.raises(pytest.fail.Exception):
        run_task(tasks.loop, 3)
    assert here.process is None
    diary.call = lambda line: None
    assert run_task(tasks.loop, 3).result == 3


def test_a_task_cannot_run_another() -> None:
    errors: list[BaseException] = []

    def run_another(line: Any) -> None:
        with pytest.raises(RuntimeError, match="cannot call run_task itself") as caught:
            run_task(tasks.unbound, "word")
        errors.append(caught.value)

    diary.call = run_another
    assert run_task(tasks.loop, 1).result == 1
    assert len(errors) == 1


@pytest.mark.parametrize("part", ["process", "pages"])
def test_a_worker_is_no_place_for_it(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = run_task(tasks.loop, 3, crash_after=1)
    monkeypatch.setattr(here, part, object())
    for call in (lambda: run_task(tasks.loop, 3), stopped.resume):
        with pytest.raises(RuntimeError, match="cannot be used inside of one"):
            call()


def test_threads_take_turns() -> None:
    inside, go_on = threading.Event(), threading.Event()

    def wait(line: Any) -> None:
        inside.set()
        assert go_on.wait(10)

    diary.call = wait
    runs: dict[str, Any] = {}
    first = threading.Thread(target=lambda: runs.update(first=run_task(tasks.loop, 1)))
    second = threading.Thread(target=lambda: runs.update(second=run_task(tasks.unbound, "word")))
    first.start()
    assert inside.wait(10)
    second.start()
    second.join(0.05)
    assert runs == {}
    go_on.set()
    for thread in (first, second):
        thread.join(10)
    assert (runs["first"].result, runs["second"].result) == (1, "WORD")


def test_a_thread_of_the_task_can_crash_it(app: Celery) -> None:
    @app.task(shared=False, base=AwaTask, bind=True)
    def with_a_thread(self: Any) -> bool:
        attempt = self.attempt

        def work() -> None:
            attempt.update_metadata({"thread": 1})
            with pytest.raises(BaseException, match="the worker died here"):
                crash()

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(10)
        attempt.update_metadata({"late": 1})
        return bool(self.flush_progress())

    run = run_task(with_a_thread)
    assert (run.state, run.checkpoint) == (JobState.RUNNING, {"thread": 1})
