"""What the result backend says of a lost job, and what it is told of one that ended."""

from __future__ import annotations

import builtins
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from billiard.exceptions import TimeLimitExceeded, WorkerLostError
from celery import Celery, chord, states
from celery.backends.base import BaseBackend
from celery.exceptions import ChordError, TaskRevokedError
from kombu.exceptions import OperationalError

from celery_awa.errors import ForeignEnvelope
from celery_awa.model import Envelope, JobState, Lease, LostJob, UnsentJob
from celery_awa.plugin import envelope, results
from celery_awa.plugin.sending import Courier
from celery_awa.runtime.trouble import Trouble
from tests.acceptance.brokers import Broker, memory_broker, redis_broker
from tests.acceptance.workers import worker_thread
from tests.faults import Proxy
from tests.integration.letters import Take, attempt_of, import_rows, shop, taking, unsent
from tests.services.fixtures import proxy_to  # noqa: F401  # found by being here
from tests.services.required import service_url
from tests.waiting import eventually

FILES = pytest.param("files", id="files")
REDIS = pytest.param("redis", id="redis", marks=pytest.mark.redis)
ERROR = "WorkerLostError: no heartbeat for 30 s"
SECOND = timedelta(seconds=1)


@pytest.fixture(autouse=True)
def trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever there is to tell is told, though another test had it told a moment before."""
    monkeypatch.setattr(results, "trouble", Trouble())


@pytest.fixture
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Broker]:
    """Messages in memory; results in files unless parametrised otherwise."""
    memory = memory_broker()
    if getattr(request, "param", "files") == "files":
        folder = tmp_path / "results"
        folder.mkdir()
        yield Broker("files", memory.queue, {**memory.config, "result_backend": f"file://{folder}"})
    else:
        with redis_broker(service_url("AWA_TEST_REDIS_URL", "Redis")) as redis:
            yield Broker("redis", memory.queue, {**redis.config, **_messages(memory)})


def _messages(memory: Broker) -> dict[str, Any]:
    return {k: v for k, v in memory.config.items() if k != "result_backend"}


@pytest.fixture
def app(broker: Broker) -> Celery:
    return shop(broker)


@pytest.fixture
def take(app: Celery) -> Iterator[Take]:
    with taking(app, app.conf.task_default_queue) as take:
        yield take


@pytest.fixture
def courier(app: Celery) -> Courier:
    return Courier(app)


def now() -> datetime:
    return datetime.now(timezone.utc)


def lost(task_id: str = "task", attempted_at: datetime | None = None) -> LostJob:
    return LostJob(Lease(7, 3), task_id, "shop.import_rows", attempted_at or now())


def failed(found: Envelope | None, task_id: str, **fields: Any) -> UnsentJob:
    """A job that failed a moment ago, of which nobody knows yet."""
    ended: dict[str, Any] = {"state": JobState.FAILED, "error": ERROR, "attempted_at": now()}
    return unsent(found, task_id, **(ended | fields))


class Away(Exception):
    """What a backend calls the loss of its connection."""


class Row:
    """An argument whose class another worker may not have."""


class Told:
    """A task that was sent, received and claimed, and is told to have ended."""

    def __init__(self, take: Take, courier: Courier) -> None:
        self.take = take
        self._courier = courier

    def __call__(self, task: Any, *, whole: bool = False, **options: Any) -> Any:
        """The caller's result, and the envelope that a claim stored."""
        result = task.apply_async(("rows.csv",), **options)
        return result, self.envelope_of(task, self.take(), whole=whole)

    def envelope_of(self, task: Any, message: Any, *, whole: bool = False) -> Envelope:
        make = envelope.build if whole else envelope.while_running
        found = make(task, attempt_of(task, message))
        assert found is not None
        assert found.whole is whole
        return found

    def tell(self, found: Envelope | None, task_id: str, **fields: Any) -> None:
        self._courier.tell(failed(found, task_id, **fields))


@pytest.fixture
def told(take: Take, courier: Courier) -> Told:
    return Told(take, courier)


class TestResult:
    """What a backend holds counts if it is this run's."""

    @pytest.mark.parametrize(
        ("word", "value", "state"),
        [
            (states.SUCCESS, 42, JobState.COMPLETED),
            (states.FAILURE, ValueError("boom"), JobState.FAILED),
            (states.REVOKED, TaskRevokedError("revoked"), JobState.CANCELLED),
            (states.RETRY, ValueError("boom"), None),
            (states.STARTED, {"pid": 1}, None),
            (None, None, None),
        ],
    )
    @pytest.mark.parametrize("broker", [FILES, REDIS], indirect=True)
    def test_a_final_one_is_found(
        self, app: Celery, courier: Courier, word: str | None, value: Any, state: JobState | None
    ) -> None:
        job = lost()
        if word:
            app.backend.store_result("task", value, word)
        assert courier.result(job) is state

    def test_it_is_looked_for_afresh_each_time(self, app: Celery, courier: Courier) -> None:
        job = lost()
        assert courier.result(job) is None
        app.backend.store_result("task", 42, states.SUCCESS)
        assert courier.result(job) is JobState.COMPLETED
        app.backend.forget("task")
        assert courier.result(job) is None

    def test_one_from_before_the_attempt_is_of_an_earlier_run(
        self, app: Celery, courier: Courier
    ) -> None:
        app.backend.store_result("task", 42, states.SUCCESS)
        assert courier.result(lost(attempted_at=now())) is None
        assert courier.result(lost(attempted_at=now() - SECOND)) is JobState.COMPLETED
        assert courier.result(unsent(None, attempted_at=None)) is None

    def test_without_a_backend_there_is_none(self) -> None:
        for backend in (None, "disabled", "rpc"):
            # No broker is there to be asked either.
            app = shop(None, broker_url="amqp://127.0.0.1:1//", result_backend=backend)
            assert Courier(app).result(lost()) is None

    def test_a_backend_that_cannot_be_asked_says_so_soon(self) -> None:
        for always in (False, True):
            app = shop(
                None,
                broker_url="memory://",
                result_backend="redis://127.0.0.1:1/0",
                result_backend_always_retry=always,
            )
            began = time.monotonic()
            with pytest.raises(Exception, match="refused"):
                Courier(app).result(lost())
            assert time.monotonic() - began < 10

    @pytest.mark.redis
    @pytest.mark.parametrize("broker", [REDIS], indirect=True)
    def test_a_backend_that_says_nothing_is_not_waited_for(
        self,
        broker: Broker,
        proxy_to: Callable[[str], Proxy],  # noqa: F811  # the fixture
    ) -> None:
        url = broker.config["result_backend"]
        proxy = proxy_to(url)
        courier = Courier(shop(broker, result_backend=proxy.through(url)))
        assert courier.result(lost()) is None
        proxy.swallow()
        began = time.monotonic()
        with pytest.raises(Exception, match="Timeout"):
            courier.result(lost())
        assert time.monotonic() - began < 10
        proxy.deliver()
        assert courier.result(lost()) is None

    def test_one_that_nobody_can_read_is_no_reason_to_wait(
        self, app: Celery, courier: Courier
    ) -> None:
        job = lost()
        app.backend.set(app.backend.get_key_for_task("task"), b"\x80garbage")
        assert courier.result(job) is None

    def test_a_task_may_have_a_backend_of_its_own(
        self, app: Celery, courier: Courier, tmp_path: Path
    ) -> None:
        own = shop(None, result_backend=f"file://{tmp_path}").backend
        import_rows(app, backend=own)
        job = lost()
        own.store_result("task", 42, states.SUCCESS)
        assert courier.result(job) is JobState.COMPLETED

    @pytest.mark.parametrize(
        ("done", "counts"),
        [
            ("2024-05-01T12:00:00.500000+00:00", True),
            ("2024-05-01T12:00:00.499999+00:00", False),
            ("2024-05-01T14:00:00.500001+02:00", True),
            ("2024-05-01T12:00:00.500001", True),
            ("2024-05-01T12:00:00.500001Z", True),
            ("2024-05-01T11:59:59.999999", False),
            (datetime(2024, 5, 1, 12, 0, 0, 500_001), True),
            (datetime(2024, 5, 1, 12, 0, 0, 499_999), False),
            # A backend that keeps seconds, or milliseconds, cuts off the rest.
            ("2024-05-01T12:00:00+00:00", True),
            ("2024-05-01T11:59:59+00:00", False),
            (datetime(2024, 5, 1, 12, 0, 0, 500_000), True),
            (datetime(2024, 5, 1, 12, 0, 0, 499_000), False),
            (None, False),
        ],
    )
    def test_its_time_is_read_as_backends_write_it(
        self, app: Celery, courier: Courier, done: Any, counts: bool
    ) -> None:
        class Backend(BaseBackend):
            def _get_task_meta_for(self, task_id: str) -> dict[str, Any]:
                return {"status": states.SUCCESS, "result": 42, "date_done": done}

        import_rows(app, backend=Backend(app))
        began = datetime(2024, 5, 1, 12, 0, 0, 500_000, tzinfo=timezone.utc)
        found = courier.result(lost(attempted_at=began))
        assert found is (JobState.COMPLETED if counts else None)

    def test_sql_columns_are_in_the_apps_zone(self, app: Celery, courier: Courier) -> None:
        class Backend(BaseBackend):
            __module__ = "celery.backends.database"

            def _get_task_meta_for(self, task_id: str) -> dict[str, Any]:
                done = datetime(2024, 5, 1, 12, 0, 0, 1)
                return {"status": states.SUCCESS, "result": 42, "date_done": done}

        app.conf.update(timezone="Asia/Tokyo")
        import_rows(app, backend=Backend(app))
        began = datetime(2024, 5, 1, 3, 0, tzinfo=timezone.utc)
        assert courier.result(lost(attempted_at=began)) is JobState.COMPLETED
        assert courier.result(lost(attempted_at=began + SECOND)) is None


class TestFailure:
    """Who waits for a failed job hears of it, as if its worker had said so."""

    @pytest.mark.parametrize(
        ("error", "kind", "args"),
        [
            (ERROR, WorkerLostError, ("no heartbeat for 30 s",)),
            ("TimeLimitExceeded: deadline of 60 s", TimeLimitExceeded, ("deadline of 60 s",)),
            ("TimeoutError: no callback", builtins.TimeoutError, ("no callback",)),
            ("its message cannot be sent again: …", WorkerLostError, None),
            ("KeyError: 'x'", WorkerLostError, ("KeyError: 'x'",)),
            (None, WorkerLostError, None),
        ],
    )
    @pytest.mark.parametrize("serializer", ["json", "pickle"])
    @pytest.mark.parametrize("broker", [FILES, REDIS], indirect=True)
    def test_the_caller_gets_an_exception(
        self,
        app: Celery,
        told: Told,
        serializer: str,
        error: str | None,
        kind: type[Exception],
        args: tuple[Any, ...] | None,
    ) -> None:
        app.conf.update(result_serializer=serializer)
        result, found = told(import_rows(app, lost_policy="fail"))
        told.tell(found, result.id, error=error)
        with pytest.raises(kind) as caught:
            result.get(timeout=5)
        assert caught.type is kind
        assert caught.value.args == (args or (error or "the job was lost",))
        assert result.state == states.FAILURE

    @pytest.mark.parametrize("broker", [FILES, REDIS], indirect=True)
    def test_a_caller_of_a_cancelled_job_too(self, app: Celery, told: Told) -> None:
        result, found = told(import_rows(app))
        told.tell(found, result.id, state=JobState.CANCELLED)
        with pytest.raises(TaskRevokedError):
            result.get(timeout=5)
        assert result.state == states.REVOKED

    def test_without_an_envelope_the_caller_hears_of_it_all_the_same(
        self, app: Celery, told: Told
    ) -> None:
        for state in (JobState.FAILED, JobState.CANCELLED):
            told.tell(None, state.value, state=state)
            assert app.AsyncResult(state.value).state == state.celery_state

    def test_an_app_that_does_not_register_the_task_can_tell_it(
        self, app: Celery, told: Told, broker: Broker, take: Take
    ) -> None:
        result, found = told(import_rows(app), link_error=app.signature("shop.errback"))
        Courier(shop(broker, accept_content=["json"])).tell(failed(found, result.id))
        assert result.state == states.FAILURE
        assert take().headers["task"] == "shop.errback"

    @pytest.mark.parametrize("word", [states.SUCCESS, states.FAILURE, states.REVOKED])
    @pytest.mark.parametrize("state", [JobState.FAILED, JobState.CANCELLED])
    @pytest.mark.parametrize("broker", [FILES, REDIS], indirect=True)
    def test_what_the_backend_knows_of_this_run_stands(
        self, app: Celery, told: Told, word: str, state: JobState
    ) -> None:
        called = []
        task = import_rows(app)

        @app.task(name="shop.errback", shared=False)
        def errback(request: Any, exc: Exception, traceback: Any) -> None:
            called.append(exc)

        result, found = told(task, link_error=errback.s())
        began = now()
        value = 42 if word == states.SUCCESS else ValueError("its own")
        app.backend.store_result(result.id, value, word)
        told.tell(found, result.id, state=state, attempted_at=began)
        assert result.state == word
        assert called == []

    def test_a_failure_of_an_earlier_run_is_replaced(self, app: Celery, told: Told) -> None:
        task = import_rows(app)
        app.backend.store_result("the-task", ValueError("before"), states.FAILURE)
        result, found = told(task, task_id="the-task")
        told.tell(found, result.id)
        with pytest.raises(WorkerLostError):
            result.get(timeout=5)

    @pytest.mark.parametrize(
        ("of_task", "of_message", "of_app", "stored"),
        [
            ({}, {}, {}, True),
            ({"ignore_result": True}, {}, {}, False),
            ({"ignore_result": True, "store_errors_even_if_ignored": True}, {}, {}, True),
            ({}, {"ignore_result": True}, {}, False),
            ({"ignore_result": True}, {"ignore_result": False}, {}, True),
            ({}, {}, {"task_ignore_result": True}, False),
        ],
    )
    def test_it_is_stored_where_a_worker_would_store_it(
        self,
        broker: Broker,
        of_task: dict[str, Any],
        of_message: dict[str, Any],
        of_app: dict[str, Any],
        stored: bool,
    ) -> None:
        app = shop(broker, **of_app)
        with taking(app, app.conf.task_default_queue) as take:
            told = Told(take, Courier(app))
            result, found = told(import_rows(app, **of_task), **of_message)
            told.tell(found, result.id)
        assert (result.state == states.FAILURE) is stored

    @pytest.mark.parametrize(
        ("of_message", "of_app", "stored"),
        [
            ({}, {}, True),
            ({"ignore_result": True}, {}, False),
            ({"ignore_result": True}, {"task_store_errors_even_if_ignored": True}, True),
            ({"ignore_result": False}, {"task_ignore_result": True}, True),
        ],
    )
    def test_where_the_task_is_not_registered_message_and_app_say_so(
        self,
        app: Celery,
        take: Take,
        broker: Broker,
        of_message: dict[str, Any],
        of_app: dict[str, Any],
        stored: bool,
    ) -> None:
        told = Told(take, Courier(shop(broker, **of_app)))
        result, found = told(import_rows(app), **of_message)
        told.tell(found, result.id)
        assert (result.state == states.FAILURE) is stored

    @pytest.mark.parametrize("registered", [True, False])
    def test_rpc_callers_hear_of_it_at_their_address(self, registered: bool) -> None:
        app = shop(memory_broker(), result_backend="rpc")
        with taking(app, app.conf.task_default_queue) as take:
            told = Told(take, Courier(app if registered else shop(None, **app.conf.changes)))
            result, found = told(import_rows(app))
            told.tell(found, result.id)
            with pytest.raises(WorkerLostError):
                result.get(timeout=5)
            told.tell(None, "another")  # nobody can be told: no reason to try again

    def test_the_rest_of_its_chain_fails_with_it(self, app: Celery, told: Told) -> None:
        task = import_rows(app)
        last = (task.s() | task.si() | task.si()).apply_async()
        first = last.parent.parent
        found = told.envelope_of(task, told.take())
        told.tell(found, first.id)
        for result in (first, last.parent, last):
            assert result.state == states.FAILURE

    def test_an_extended_result_says_what_it_was_about(self, app: Celery, told: Told) -> None:
        app.conf.update(result_extended=True)
        result, found = told(import_rows(app, acks_late=True), whole=True)
        told.tell(found, result.id)
        assert result.name == "shop.import_rows"
        assert result.args == ["rows.csv"]
        assert result.queue == app.conf.task_default_queue


class TestErrbacks:
    """They are called, or sent, as Celery's worker does it."""

    def test_one_that_takes_the_request_is_called(self, app: Celery, told: Told) -> None:
        called = []

        @app.task(name="shop.errback", shared=False)
        def errback(request: Any, exc: Exception, traceback: Any) -> None:
            called.append((request.id, request.headers["tenant"], exc, traceback))

        result, found = told(import_rows(app), link_error=errback.s(), headers={"tenant": "north"})
        told.tell(found, result.id)
        [(task_id, tenant, exc, traceback)] = called
        assert (task_id, tenant, traceback) == (result.id, "north", None)
        assert isinstance(exc, WorkerLostError)

    def test_one_that_takes_an_id_is_sent(self, app: Celery, told: Told, take: Take) -> None:
        @app.task(name="shop.errback", shared=False)
        def errback(task_id: str) -> None: ...

        result, found = told(import_rows(app), link_error=errback.s())
        told.tell(found, result.id)
        message = take()
        assert message.headers["task"] == "shop.errback"
        assert message.payload[0] == [result.id]
        assert message.headers["parent_id"] == result.id

    def test_one_that_raises_is_called_once(
        self, app: Celery, told: Told, caplog: pytest.LogCaptureFixture
    ) -> None:
        @app.task(name="shop.errback", shared=False)
        def errback(request: Any, exc: Exception, traceback: Any) -> None:
            raise KeyError("a bug of the user's")

        result, found = told(import_rows(app), link_error=errback.s())
        told.tell(found, result.id)
        assert result.state == states.FAILURE
        assert "a bug of the user's" in caplog.text

    def test_telling_that_broke_off_is_done_again(
        self, app: Celery, told: Told, take: Take, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        result, found = told(import_rows(app), link_error=app.signature("shop.errback"))
        began = now()

        def away(*args: Any, **kwargs: Any) -> None:
            raise OperationalError("the broker is away")

        with monkeypatch.context() as patched:
            patched.setattr(app.amqp, "send_task_message", away)
            with pytest.raises(OperationalError):
                told.tell(found, result.id, attempted_at=began)
        assert result.state == states.FAILURE
        told.tell(found, result.id, attempted_at=began)
        assert take().headers["task"] == "shop.errback"

    @pytest.mark.parametrize("state", [JobState.FAILED, JobState.CANCELLED])
    @pytest.mark.parametrize("broker", [FILES, REDIS], indirect=True)
    def test_by_a_body_that_is_not_accepted_here_the_caller_hears_and_it_is_said_once(
        self, app: Celery, told: Told, state: JobState, caplog: pytest.LogCaptureFixture
    ) -> None:
        result, found = told(import_rows(app), serializer="pickle")
        app.conf.update(accept_content=["json"])
        began = now()
        for _ in range(2):  # telling broke off before it was noted
            told.tell(found, result.id, state=state, attempted_at=began)
        assert result.state == (states.FAILURE if state is JobState.FAILED else states.REVOKED)
        assert caplog.text.count(f"only the result of task {result.id} says") == 1
        assert "untrusted content of type pickle" in caplog.text

    def test_by_a_body_whose_class_is_not_here_the_caller_hears(
        self,
        app: Celery,
        told: Told,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        task = import_rows(app, acks_late=True)
        sent = task.apply_async((Row(),), serializer="pickle")
        found = told.envelope_of(task, told.take(), whole=True)
        monkeypatch.delattr(f"{__name__}.Row")
        told.tell(found, sent.id)
        assert sent.state == states.FAILURE
        assert "Can't get attribute 'Row'" in caplog.text

    def test_an_envelope_of_a_newer_version_is_left_to_another(
        self, app: Celery, told: Told
    ) -> None:
        result, _ = told(import_rows(app))
        with pytest.raises(ForeignEnvelope):
            told.tell(Envelope(b'{"version": 3}', False), result.id)
        assert result.state == states.PENDING

    @pytest.mark.parametrize("state", [JobState.FAILED, JobState.CANCELLED])
    def test_by_a_chord_that_raises_the_caller_hears_unless_its_backend_is_away(
        self,
        app: Celery,
        told: Told,
        state: JobState,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        raised: list[Exception] = []

        class Backend(type(app.backend)):  # type: ignore[misc]
            connection_errors = (Away,)

            def on_chord_part_return(self, request: Any, state: Any, result: Any, **_: Any) -> None:
                raise raised[-1]

        backend = Backend(app=app, url=app.conf.result_backend)
        result, found = told(import_rows(app, backend=backend), chord=app.signature("shop.body"))
        for error in (OperationalError("away"), TimeoutError("away"), Away("away")):
            raised.append(error)
            with pytest.raises(type(error)):
                told.tell(found, result.id, state=state)
        assert caplog.text == ""
        raised.append(KeyError("a bug of a chord's"))
        told.tell(found, result.id, state=state)
        assert result.state in states.EXCEPTION_STATES
        assert "a bug of a chord's" in caplog.text

    @pytest.mark.parametrize("data", [b'{"version": 1}', b'{"version": 2, "body": "!"}', b"\0"])
    def test_by_an_envelope_that_nobody_can_read_the_caller_hears_at_least(
        self, app: Celery, told: Told, data: bytes
    ) -> None:
        result, _ = told(import_rows(app))
        told.tell(Envelope(data, True), result.id)
        assert result.state == states.FAILURE


class TestChord:
    """A chord whose member was lost for good ends: its body fails, its errback is called."""

    @pytest.mark.parametrize("broker", [FILES, REDIS], indirect=True)
    @pytest.mark.parametrize("last", [True, False], ids=["last", "first"])
    def test_its_body_and_errback_hear_of_it(
        self, app: Celery, courier: Courier, last: bool
    ) -> None:
        called: list[Any] = []
        done: list[int] = []

        @app.task(name="shop.errback", shared=False)
        def errback(request: Any, exc: Exception, traceback: Any) -> None:
            called.append(exc)

        @app.task(name="shop.count", shared=False)
        def count(number: int) -> None:
            done.append(number)

        task = import_rows(app)
        body = chord(
            [task.si("rows.csv").set(queue="lost"), count.si(1), count.si(2)],
            count.si(3).on_error(errback.s()),
        ).apply_async()
        with taking(app, "lost") as take:
            message = take()
        found = envelope.while_running(task, attempt_of(task, message))

        def tell() -> None:
            courier.tell(failed(found, message.headers["id"]))

        if not last:
            tell()
        with worker_thread(app):
            eventually(lambda: len(done) == 2, what="the other members")
            if last:
                tell()
            with pytest.raises(WorkerLostError):
                body.get(timeout=20)
            eventually(body.ready, what="the result of the chord's body")
            eventually(lambda: called, what="the chord's errback")
        assert isinstance(body.result, ChordError)
        assert "no heartbeat for 30 s" in str(body.result)
        assert [type(exc) for exc in called] == [ChordError]
        assert sorted(done) == [1, 2]
