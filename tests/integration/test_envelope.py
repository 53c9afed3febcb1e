"""Envelopes of real messages: each is received from a broker as a worker receives it."""

from __future__ import annotations

import json
import logging
import pickle
import zlib
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest
from celery import Celery, Task, chord, group
from celery.app.task import Context
from celery.worker.request import Request
from kombu.serialization import loads
from kombu.utils.uuid import uuid

from celery_awa.errors import ForeignEnvelope, Unsendable
from celery_awa.model import Envelope
from celery_awa.plugin import envelope, wire
from celery_awa.plugin.wire import Message
from celery_awa.runtime.trouble import Trouble
from tests.acceptance.brokers import memory_broker
from tests.integration.letters import (
    SERIALIZERS,
    Keeping,
    Take,
    attempt_of,
    import_rows,
    properties_of,
    received,
    shop,
    taking,
    without,
)

ARGUMENTS = ([1, "zwölf", None], {"deep": {"list": [1.5, True]}})


@pytest.fixture
def app() -> Celery:
    return shop(memory_broker())


@pytest.fixture(autouse=True)
def trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever there is to tell is told, though another test had it told a moment before."""
    monkeypatch.setattr(envelope, "trouble", Trouble())


@pytest.fixture
def take(app: Celery) -> Iterator[Take]:
    with taking(app, app.conf.task_default_queue) as take:
        yield take


@pytest.fixture
def deliver(app: Celery, take: Take) -> Callable[..., Any]:
    """Send a task with these options and take its message."""

    def deliver(task: Any, args: Any = ARGUMENTS, **options: Any) -> Any:
        task.apply_async(args, {"path": "rows.csv"}, **options)
        return take()

    return deliver


def kept(found: Envelope | None) -> Message:
    return envelope.opened(found)


def linked(task: Any, serializer: str) -> Any:
    """A callback; YAML as Celery writes it can hold none."""
    return None if serializer == "yaml" else task.si("linked")


def body_of(message: Message) -> Any:
    return loads(
        message.body,
        message.content_type,
        message.content_encoding,
        accept=[message.content_type],
    )


@pytest.mark.parametrize("serializer", SERIALIZERS)
def test_a_body_is_kept_byte_for_byte(
    app: Celery, deliver: Callable[..., Any], serializer: str
) -> None:
    task = import_rows(app, serializer="json")
    message = deliver(task, serializer=serializer, link=linked(task, serializer))
    found = envelope.build(task, attempt_of(task, message))
    assert found is not None
    assert found.whole
    assert kept(found).body == message.body
    assert kept(found).content_type == message.content_type
    assert kept(found).content_encoding == message.content_encoding


def test_arguments_are_kept_as_they_came_whatever_the_task_does_to_them(
    app: Celery, deliver: Callable[..., Any]
) -> None:
    task = import_rows(app)
    message = deliver(task)
    request = attempt_of(task, message)
    request.args[0].append(object())
    request.kwargs.clear()
    assert kept(envelope.build(task, request)).body == message.body


def test_headers_properties_and_address_are_the_messages_own(
    app: Celery, deliver: Callable[..., Any]
) -> None:
    task = import_rows(app)
    message = deliver(
        task,
        headers={"tenant": "north", "trace": {"id": [1, 2]}, "hostname": "a header of the user's"},
        priority=3,
        time_limit=60,
        soft_time_limit=50,
        shadow="rows",
        argsrepr="(secret)",
        ignore_result=True,
        reply_to="somebody",
        root_id="root",
        parent_id="parent",
        group_id="group",
        group_index=4,
        expires=3600,
        app_id="producer",
    )
    found = kept(envelope.build(task, attempt_of(task, message)))
    assert found.headers == message.headers
    assert found.headers["timelimit"] == [60, 50]
    assert found.properties == without(properties_of(message), "expiration")
    assert found.properties["app_id"] == "producer"
    assert (found.exchange, found.routing_key) == ("", app.conf.task_default_queue)


def test_a_header_that_is_no_json_comes_back_as_it_was(
    app: Celery, deliver: Callable[..., Any]
) -> None:
    task = import_rows(app)
    odd = {"at": datetime(2024, 1, 2, 3, 4, tzinfo=timezone.utc), "price": Decimal("1.10")}
    found = kept(envelope.build(task, attempt_of(task, deliver(task, headers=odd))))
    assert {name: found.headers[name] for name in odd} == odd


def test_what_belongs_to_one_delivery_is_left_out(app: Celery, deliver: Callable[..., Any]) -> None:
    task = import_rows(app)
    message = deliver(task, compression="gzip")
    message.headers["redelivered"] = True
    message.headers["x-death"] = [{"count": 1}]
    message.headers["x-first-death-queue"] = "rows"
    message.headers["x-delivery-count"] = 2
    found = kept(envelope.build(task, attempt_of(task, message)))
    assert not {"compression", "redelivered"} & found.headers.keys()
    assert [name for name in found.headers if name.startswith("x-")] == []
    # Compressed it was on the way only.
    assert body_of(found) == message.payload


def test_the_property_expiration_is_kept_where_no_header_says_the_same(
    app: Celery, deliver: Callable[..., Any]
) -> None:
    task = import_rows(app)
    found = kept(envelope.build(task, attempt_of(task, deliver(task, expiration=60))))
    assert found.properties["expiration"] == "60000"
    found = kept(envelope.build(task, attempt_of(task, deliver(task, expires=60))))
    assert "expiration" not in found.properties


def test_a_claim_keeps_no_arguments_where_a_lost_task_fails(
    app: Celery, deliver: Callable[..., Any]
) -> None:
    task = import_rows(app, lost_policy="fail")
    message = deliver(task, serializer="pickle", link_error=task.si("errback"))
    found = envelope.while_running(task, attempt_of(task, message))
    assert found is not None
    assert not found.whole
    args, kwargs, canvas = body_of(kept(found))
    assert (args, kwargs) == ((), {})
    assert canvas == message.payload[2]
    assert kept(found).content_type == message.content_type
    assert b"zw" not in kept(found).body
    assert kept(found).headers == without(message.headers, "argsrepr", "kwargsrepr")


@pytest.mark.parametrize("options", [{"acks_late": True}, {"lost_policy": "requeue"}])
def test_a_claim_keeps_all_where_a_lost_task_is_sent_again(
    app: Celery, deliver: Callable[..., Any], options: dict[str, Any]
) -> None:
    task = import_rows(app, **options)
    message = deliver(task)
    found = envelope.while_running(task, attempt_of(task, message))
    assert found is not None
    assert found.whole
    assert kept(found).body == message.body


def test_a_message_above_the_limit_is_kept_without_its_arguments(
    app: Celery, deliver: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    app.conf.update(awa_max_envelope_bytes=4_000)
    task = import_rows(app, acks_late=True)
    request = attempt_of(task, deliver(task, ["x" * 4_000], link_error=task.si("errback")))
    for found in (envelope.build(task, request), envelope.while_running(task, request)):
        assert found is not None
        assert not found.whole
        args, _, canvas = body_of(kept(found))
        assert args == []
        assert canvas["errbacks"][0]["args"] == ["errback"]
    [warning] = [record.getMessage() for record in caplog.records]
    assert request.id in warning
    assert "awa_max_envelope_bytes is 4000" in warning


def test_nothing_is_kept_of_a_message_whose_canvas_is_above_the_limit(
    app: Celery, deliver: Callable[..., Any]
) -> None:
    app.conf.update(awa_max_envelope_bytes=4_000)
    task = import_rows(app)
    message = deliver(task, link_error=task.si("x" * 4_000))
    assert envelope.build(task, attempt_of(task, message)) is None


@pytest.mark.parametrize("serializer", SERIALIZERS)
def test_without_the_message_itself_it_is_made_anew(
    app: Celery, deliver: Callable[..., Any], serializer: str
) -> None:
    task = import_rows(app, serializer=serializer)
    message = deliver(
        task,
        link=linked(task, serializer),
        headers={"tenant": "north"},
        priority=3,
        time_limit=60,
        expires=3600,
        argsrepr="(secret)",
        shadow="rows",
        ignore_result=True,
    )
    request = attempt_of(task, message, Request)
    assert wire.received(task, request) is None
    found = envelope.build(task, request)
    assert found is not None
    assert found.whole
    assert [*body_of(kept(found))[:2]] == [*message.payload[:2]]
    assert body_of(kept(found))[2] == message.payload[2]
    assert kept(found).content_type == message.content_type
    assert kept(found).headers == message.headers
    assert kept(found).properties == without(properties_of(message), "expiration")
    assert kept(found).routing_key == app.conf.task_default_queue


def test_a_message_that_can_be_kept_no_way_costs_a_warning(
    app: Celery, deliver: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    task = import_rows(app)
    request = attempt_of(task, deliver(task, link=task.si()), Request)
    request.args = [object()]
    found = envelope.build(task, request)
    assert found is not None
    assert not found.whole
    request.callbacks = [object()]
    assert envelope.build(task, request) is None
    [warning] = caplog.records
    assert warning.getMessage().startswith("celery-awa: a message cannot be kept")
    assert warning.exc_info is not None


class TestRetry:
    """The envelope of what ``retry()`` is about to publish, and what it publishes."""

    @pytest.fixture
    def retried(self, app: Celery, take: Take) -> Callable[..., tuple[Message, Any]]:
        def retried(task: Any, message: Any, **options: Any) -> tuple[Message, Any]:
            request = attempt_of(task, message)
            # Celery's own: ours is to be called where an attempt runs.
            signature = Task.signature_from_request(
                task, request, retries=request.retries + 1, **options
            )
            found = envelope.build(task, request, signature)
            assert found is not None
            assert found.whole
            signature.apply_async()
            return kept(found), take()

        return retried

    @pytest.mark.parametrize("serializer", SERIALIZERS)
    def test_it_is_the_message_that_celery_publishes(
        self,
        app: Celery,
        deliver: Callable[..., Any],
        retried: Callable[..., tuple[Message, Any]],
        serializer: str,
    ) -> None:
        task = import_rows(app, serializer=serializer)
        message = deliver(
            task,
            link=linked(task, serializer),
            headers={"tenant": "north"},
            priority=3,
            time_limit=60,
            expires=3600,
            group_id="group",
            group_index=2,
            parent_id="parent",
        )
        found, published = retried(task, message, args=[2], kwargs={"again": True}, countdown=60)
        assert found.body == published.body
        assert found.content_type == published.content_type
        assert found.content_encoding == published.content_encoding
        assert found.headers == {**published.headers, "eta": None}
        assert found.headers["retries"] == 1
        assert found.headers["argsrepr"] == "(2,)"
        assert found.properties == without(
            # Celery puts the producer's name there by mistake.
            properties_of(published),
            "expiration",
            "origin",
        )
        assert found.routing_key == published.delivery_info["routing_key"]

    def test_its_own_options_count(
        self,
        app: Celery,
        deliver: Callable[..., Any],
        retried: Callable[..., tuple[Message, Any]],
    ) -> None:
        task = import_rows(app)
        found, published = retried(
            task,
            deliver(task, headers={"tenant": "north"}),
            queue=app.conf.task_default_queue,
            serializer="yaml",
            priority=5,
            headers={"tenant": "south"},
            soft_time_limit=7,
        )
        assert found.content_type == "application/x-yaml"
        assert found.body == published.body
        assert found.headers["tenant"] == "south"
        assert found.headers["timelimit"] == [None, 7]
        assert found.properties["priority"] == 5

    def test_to_another_queue_it_goes_there(self, app: Celery, deliver: Callable[..., Any]) -> None:
        task = import_rows(app)
        request = attempt_of(task, deliver(task))
        signature = Task.signature_from_request(task, request, queue="slow")
        found = kept(envelope.build(task, request, signature))
        assert (found.exchange, found.routing_key) == ("", "slow")

    def test_a_producers_text_of_the_arguments_stays_while_they_are_the_same(
        self, app: Celery, deliver: Callable[..., Any]
    ) -> None:
        task = import_rows(app)
        request = attempt_of(task, deliver(task, argsrepr="(secret)"))
        same = Task.signature_from_request(task, request)
        assert kept(envelope.build(task, request, same)).headers["argsrepr"] == "(secret)"
        other = Task.signature_from_request(task, request, [1], {})
        assert kept(envelope.build(task, request, other)).headers["argsrepr"] == "(1,)"


def test_canvas_and_stamps_are_kept_in_chords_of_groups(
    app: Celery, deliver: Callable[..., Any], take: Take
) -> None:
    app.conf.update(result_backend="cache+memory://")
    task = import_rows(app)
    header = group(task.si(i) for i in range(2))
    header.stamp(tenant="north")
    body = task.si("body").on_error(task.si("errback"))
    chord(header, body).apply_async()
    members = [take() for _ in range(2)]
    for message in members:
        found = kept(envelope.build(task, attempt_of(task, message)))
        assert found.headers == message.headers
        assert found.headers["stamps"] == {"tenant": "north"}
        assert body_of(found)[2]["chord"]["options"]["link_error"]


def test_an_envelope_of_another_version_is_not_read(
    app: Celery, deliver: Callable[..., Any]
) -> None:
    task = import_rows(app)
    found = envelope.build(task, attempt_of(task, deliver(task)))
    assert found is not None
    newer = {**json.loads(found.data), "version": envelope.VERSION + 1}
    with pytest.raises(ForeignEnvelope, match="version 3, this celery-awa reads 2"):
        envelope.opened(Envelope(json.dumps(newer).encode(), True))
    with pytest.raises(Unsendable, match="cannot be read"):
        envelope.opened(Envelope(b"\x00", True))
    with pytest.raises(Unsendable, match="not kept"):
        envelope.opened(None)


class TestReceivedMessage:
    """What the worker's request hands on to an attempt, and what shows of it."""

    def test_it_is_in_no_headers_so_nothing_copies_it(
        self, app: Celery, deliver: Callable[..., Any], take: Take
    ) -> None:
        task = import_rows(app)
        request = attempt_of(task, deliver(task, headers={"tenant": "north"}))
        assert set(request.headers) == {"tenant", "awa_run"}
        Task.signature_from_request(task, request).apply_async()
        again = take()
        assert wire.RECEIVED not in again.properties
        assert wire.RECEIVED not in again.headers

    def test_it_names_each_execution_for_worker_and_child(
        self, app: Celery, deliver: Callable[..., Any]
    ) -> None:
        task = import_rows(app)
        message = deliver(task)
        request = received(task, message)
        crossed = pickle.loads(pickle.dumps(request.request_dict))
        names = [wire.token_of(Context(known)) for known in (request.request_dict, crossed)]
        assert names[0] == names[1]
        assert len(names[0] or "") == 32
        # Delivered again, it makes another request; a request of no worker's has no name.
        assert wire.token_of(attempt_of(task, message)) not in (None, *names)
        assert wire.token_of(Context()) is None

    def test_it_does_not_show(
        self, app: Celery, deliver: Callable[..., Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        task = import_rows(app)
        secret = "a-secret-that-nobody-logs"
        message = deliver(task, [secret], argsrepr="(…)", kwargsrepr="{}")
        request = received(task, message)
        attempt = attempt_of(task, message)
        # Celery's Context shows its own arguments.
        attempt.args, attempt.kwargs = (), {}
        shown = (repr(request), str(request), repr(request.info(safe=True)), repr(attempt))
        assert [text for text in shown if secret in text] == []
        assert wire.RECEIVED not in repr(request.info())

    def test_the_message_itself_is_left_as_it_was(
        self, app: Celery, deliver: Callable[..., Any]
    ) -> None:
        task = import_rows(app)
        message = deliver(task)
        received(task, message)
        # What is returned to a virtual transport is written as JSON.
        assert wire.RECEIVED not in message.properties
        json.dumps(message.serializable())

    def test_a_body_crosses_to_a_pool_child_once(
        self, app: Celery, deliver: Callable[..., Any]
    ) -> None:
        task = import_rows(app)
        noise = zlib.compress(uuid().encode()).hex() * 200
        message = deliver(task, [noise], argsrepr="(…)")

        def to_child(request: type[Request]) -> int:
            made = received(task, message, request)
            # Without the arguments, which the request holds decoded as well.
            known = without(made.request_dict, "args", "kwargs")
            return len(pickle.dumps((known, made.body, made.content_type)))

        assert to_child(Keeping) - to_child(Request) < 1_000

    def test_a_fault_of_ours_costs_the_request_nothing(
        self,
        app: Celery,
        deliver: Callable[..., Any],
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setattr(wire, "Received", None)
        task = import_rows(app)
        message = deliver(task)
        assert received(task, message).id == message.headers["id"]
        assert "celery-awa: a received message is not kept" in caplog.text

    def test_a_message_of_the_first_protocol_is_made_anew(
        self, app: Celery, deliver: Callable[..., Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.WARNING)
        app.conf.update(task_protocol=1)
        task = import_rows(app)
        message = deliver(task)
        body = message.payload
        request = Keeping(
            message,
            app=app,
            task=task,
            body=(body["args"], body["kwargs"], {"callbacks": None}),
            headers=body,
            decoded=True,
        )
        found = kept(envelope.build(task, request._context))
        assert [*body_of(found)[:2]] == [body["args"], body["kwargs"]]
        assert found.headers["id"] == body["id"]
        assert caplog.records == []


def test_a_message_that_expires_is_kept_with_the_time_it_had(
    app: Celery, deliver: Callable[..., Any]
) -> None:
    task = import_rows(app)
    at = datetime.now(timezone.utc) + timedelta(hours=1)
    found = kept(envelope.build(task, attempt_of(task, deliver(task, expires=at))))
    assert datetime.fromisoformat(found.headers["expires"]) == at
