"""Messages that are sent again, on real brokers, past whatever a task's class does."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import kombu
import pytest
import redis as redis_client
from amqp.exceptions import ChannelError
from celery import Celery
from kombu.exceptions import OperationalError

from celery_awa import AwaTask
from celery_awa.errors import ForeignBroker, Unsendable
from celery_awa.model import Envelope, JobState
from celery_awa.plugin import broker as broker_module
from celery_awa.plugin import envelope, wire
from celery_awa.plugin.sending import Courier
from tests.acceptance.brokers import AMQP, FILESYSTEM, REDIS, Broker, memory_broker, open_broker
from tests.faults import Proxy
from tests.integration.letters import (
    SERIALIZERS,
    Take,
    attempt_of,
    carried,
    import_rows,
    shop,
    taking,
    unsent,
)
from tests.services.fixtures import private_redis, proxy_to  # noqa: F401  # found by being here
from tests.services.redis import PrivateRedis
from tests.waiting import eventually

MEMORY = pytest.param("memory", id="memory")
VIRTUAL = [MEMORY, FILESYSTEM, REDIS]
BROKERS = [*VIRTUAL, AMQP]
#: Seconds that a call may take though nobody answers.
BOUND = 10.0


@pytest.fixture
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Broker]:
    """The broker of the test: memory unless parametrised otherwise."""
    kind = getattr(request, "param", "memory")
    if kind == "memory":
        yield memory_broker()
    else:
        with open_broker(kind, tmp_path) as opened:
            yield opened


@pytest.fixture
def app(broker: Broker) -> Celery:
    return shop(broker)


@pytest.fixture
def take(app: Celery) -> Iterator[Take]:
    with taking(app, app.conf.task_default_queue) as take:
        yield take


@pytest.fixture
def courier_of() -> Iterator[Callable[[Celery], Courier]]:
    """Couriers that are closed after the test."""
    with ExitStack() as closing:

        def courier_of(app: Celery) -> Courier:
            courier = Courier(app)
            closing.callback(courier.close)
            return courier

        yield courier_of


@pytest.fixture
def courier(courier_of: Callable[[Celery], Courier], app: Celery) -> Courier:
    return courier_of(app)


@pytest.fixture
def deliver(take: Take) -> Callable[..., Any]:
    """Send a task with these options, and take its message."""

    def deliver(task: Any, args: Any = (1, "zwölf"), **options: Any) -> Any:
        task.apply_async(args, {"path": "rows.csv"}, **options)
        return take()

    return deliver


def kept(task: Any, message: Any) -> Envelope:
    """The whole envelope of a received message."""
    found = envelope.build(task, attempt_of(task, message))
    assert found is not None
    assert found.whole
    return found


@pytest.mark.parametrize("serializer", SERIALIZERS)
@pytest.mark.parametrize("broker", BROKERS, indirect=True)
def test_a_message_arrives_with_everything_that_it_had(
    app: Celery, deliver: Callable[..., Any], take: Take, courier: Courier, serializer: str
) -> None:
    task = import_rows(app, serializer="json")
    first = deliver(
        task,
        serializer=serializer,
        task_id="the-task",
        headers={"tenant": "north", "trace": {"id": [1, 2]}},
        priority=3,
        time_limit=60,
        soft_time_limit=50,
        expires=3600,
        shadow="rows",
        ignore_result=True,
        reply_to="somebody",
        group_id="group",
        group_index=4,
        argsrepr="(secret)",
        delivery_mode=1,
    )
    courier.send(unsent(kept(task, first), "the-task"))
    again = take()
    expected = carried(first)
    expected["properties"].pop("expiration")
    assert carried(again) == expected
    assert again.payload == first.payload
    assert again.headers["awa_run"] == "run"
    assert again.headers["awa_from"] == 3


@pytest.mark.parametrize("broker", BROKERS, indirect=True)
def test_its_canvas_arrives(
    app: Celery, deliver: Callable[..., Any], take: Take, courier: Courier
) -> None:
    task = import_rows(app)
    first = deliver(
        task,
        link=task.si("linked"),
        link_error=task.si("errback"),
        chain=[task.si("last"), task.si("next")],
        chord=task.si("body"),
    )
    courier.send(unsent(kept(task, first)))
    assert take().payload == first.payload
    assert [sig["args"] for sig in first.payload[2]["chain"]] == [["last"], ["next"]]


def test_what_was_sent_again_can_be_kept_and_sent_again(
    app: Celery, deliver: Callable[..., Any], take: Take, courier: Courier
) -> None:
    task = import_rows(app)
    message = first = deliver(task, serializer="pickle", compression="gzip", headers={"x": 1})
    for lease in range(3):
        courier.send(unsent(kept(task, message)))
        message = take()
        assert message.body == first.body, lease
        assert message.headers["x"] == 1


def test_a_message_that_was_compressed_arrives_as_a_worker_decompressed_it(
    app: Celery, deliver: Callable[..., Any], take: Take, courier: Courier
) -> None:
    task = import_rows(app)
    first = deliver(task, ["x" * 1_000], compression="gzip")
    courier.send(unsent(kept(task, first)))
    again = take()
    assert "compression" not in again.headers
    assert again.payload == first.payload


@pytest.mark.parametrize("broker", BROKERS, indirect=True)
def test_one_that_is_to_run_later_says_when(
    app: Celery, deliver: Callable[..., Any], take: Take, courier: Courier
) -> None:
    task = import_rows(app)
    first = deliver(task, countdown=30)
    assert first.headers["eta"] is not None
    later = datetime.now(timezone(timedelta(hours=2))) + timedelta(minutes=5)
    courier.send(unsent(kept(task, first), run_at=later))
    assert datetime.fromisoformat(take().headers["eta"]) == later
    for now in (None, datetime.now(timezone.utc) - timedelta(seconds=1)):
        courier.send(unsent(kept(task, first), run_at=now))
        assert take().headers["eta"] is None


@pytest.mark.parametrize("broker", BROKERS, indirect=True)
def test_one_that_has_expired_is_sent_and_no_broker_drops_it(
    app: Celery, deliver: Callable[..., Any], take: Take, courier: Courier
) -> None:
    task = import_rows(app)
    first = deliver(task, expires=0.5)
    over = datetime.now(timezone.utc) - timedelta(minutes=1)
    known = envelope.opened(kept(task, first))
    known.headers["expires"] = over.isoformat()
    courier.send(unsent(Envelope(envelope._written(known), True)))
    again = take()
    assert datetime.fromisoformat(again.headers["expires"]) == over
    assert "expiration" not in again.properties


@pytest.mark.parametrize("broker", BROKERS, indirect=True)
def test_the_class_of_the_task_has_no_say(
    app: Celery, deliver: Callable[..., Any], take: Take, courier: Courier
) -> None:
    class Singleton(AwaTask):
        abstract = True

        def apply_async(self, *args: Any, **kwargs: Any) -> None: ...

    single = import_rows(app, base=Singleton)

    first = deliver(import_rows(shop(None, **app.conf.changes)), task_id="held")
    single.apply_async(task_id="held")
    courier.send(unsent(kept(single, first), "held"))
    assert take().headers["id"] == "held"


@pytest.mark.parametrize("broker", BROKERS, indirect=True)
def test_an_app_that_does_not_register_the_task_can_send_it(
    app: Celery,
    broker: Broker,
    deliver: Callable[..., Any],
    take: Take,
    courier_of: Callable[[Celery], Courier],
) -> None:
    task = import_rows(app)
    first = deliver(task, serializer="pickle")
    other = shop(broker, accept_content=["json"], task_default_queue="other")
    courier_of(other).send(unsent(kept(task, first)))
    assert carried(take()) == carried(first)


def test_a_message_of_another_broker_is_left_to_whoever_works_on_that(
    app: Celery, deliver: Callable[..., Any], courier: Courier
) -> None:
    foreign = from_broker(kept(import_rows(app), deliver(import_rows(app))), "redis:0")
    ours = re.escape(f"redis:0, this one is {wire.broker_of(app)}")
    with pytest.raises(ForeignBroker, match=ours):
        courier.send(unsent(foreign))
    with pytest.raises(ForeignBroker, match=ours):
        courier.tell(unsent(foreign, state=JobState.FAILED))


def from_broker(found: Envelope, name: str) -> Envelope:
    """The envelope as a worker on that broker makes it."""
    known = json.loads(found.data)
    return Envelope(json.dumps({**known, "broker": name}).encode(), found.whole)


def test_what_was_not_kept_whole_is_not_sent(
    app: Celery, deliver: Callable[..., Any], courier: Courier
) -> None:
    task = import_rows(app, lost_policy="fail")
    found = envelope.while_running(task, attempt_of(task, deliver(task)))
    with pytest.raises(Unsendable, match="without its arguments"):
        courier.send(unsent(found))
    with pytest.raises(Unsendable, match="not kept"):
        courier.send(unsent(None))
    with pytest.raises(Unsendable, match="version 1"):
        courier.send(unsent(Envelope(b'{"version": 1}', True)))


class TestRouting:
    """Exchanges that the sending process may never have declared."""

    @pytest.fixture
    def queues(self, broker: Broker) -> Iterator[list[kombu.Queue]]:
        def named(name: str) -> str:
            return f"{broker.queue}.{name}"

        exchanges = {
            name: kombu.Exchange(named(name), type=name) for name in ("topic", "direct", "fanout")
        }
        queues = [
            kombu.Queue(named("rows"), exchanges["topic"], routing_key="shop.#"),
            kombu.Queue(named("one"), exchanges["direct"], routing_key="one"),
            kombu.Queue(named("all"), exchanges["fanout"]),
        ]
        yield queues
        if broker.kind == "amqp":
            with kombu.Connection(broker.url) as connection:
                channel = connection.channel()
                for queue in queues:
                    queue(channel).delete()
                    queue.exchange(channel).delete()

    @pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
    @pytest.mark.parametrize(
        ("number", "routing_key"), [(0, "shop.rows.north"), (1, "one"), (2, "")]
    )
    @pytest.mark.parametrize("broker", BROKERS, indirect=True)
    def test_a_message_goes_where_the_first_one_went(
        self,
        broker: Broker,
        queues: list[kombu.Queue],
        number: int,
        routing_key: str,
        known: bool,
        courier_of: Callable[[Celery], Courier],
    ) -> None:
        app = shop(broker, task_queues=queues)
        task = import_rows(app)
        queue = queues[number]
        with app.connection_for_write() as connection:
            queue(connection.channel()).declare()
        with taking(app, queue) as take:
            task.apply_async(queue=queue, exchange=queue.exchange, routing_key=routing_key)
            first = take()
            found = kept(task, first)
            _forget_exchanges(app)
            sender = shop(broker, task_queues=queues) if known else shop(broker)
            courier_of(sender).send(unsent(found))
            again = take()
        assert carried(again) == carried(first)
        assert again.delivery_info["exchange"] == queue.exchange.name

    @pytest.mark.parametrize("broker", VIRTUAL, indirect=True)
    def test_one_that_no_queue_is_bound_for_is_not_lost_in_silence(
        self, broker: Broker, queues: list[kombu.Queue], courier_of: Callable[[Celery], Courier]
    ) -> None:
        app = shop(broker, task_queues=queues)
        task = import_rows(app)
        with app.connection_for_write() as connection:
            queues[1](connection.channel()).declare()
        with taking(app, queues[1]) as take:
            task.apply_async(queue=queues[1], exchange=queues[1].exchange, routing_key="one")
            first = take()
        first.delivery_info["routing_key"] = "nobody"
        courier = courier_of(app)
        with pytest.raises(OperationalError, match="no queue is bound"):
            courier.send(unsent(kept(task, first)))

    @pytest.mark.amqp
    @pytest.mark.parametrize("broker", [AMQP], indirect=True)
    def test_rabbitmq_says_that_it_could_not_deliver_a_message(
        self, app: Celery, broker: Broker, deliver: Callable[..., Any], courier: Courier
    ) -> None:
        task = import_rows(app)
        found = kept(task, deliver(task))
        with app.connection_for_write() as connection:
            connection.channel().queue_delete(broker.queue)
        with pytest.raises(ChannelError, match="NO_ROUTE"):
            courier.send(unsent(found))
        # Nothing of it is left that would harm the next one.
        with app.connection_for_write() as connection:
            app.amqp.queues[broker.queue](connection.channel()).declare()
        courier.send(unsent(found))
        with taking(app, broker.queue) as take:
            assert take().headers["id"] == envelope.opened(found).headers["id"]

    @pytest.mark.amqp
    @pytest.mark.parametrize("broker", [AMQP], indirect=True)
    def test_rabbitmq_says_that_an_exchange_is_not_there(
        self, app: Celery, deliver: Callable[..., Any], courier: Courier
    ) -> None:
        task = import_rows(app)
        message = deliver(task)
        message.delivery_info.update(exchange="nowhere", routing_key="nobody")
        with pytest.raises(ChannelError, match="NOT_FOUND"):
            courier.send(unsent(kept(task, message)))

    @pytest.mark.redis
    @pytest.mark.parametrize("broker", [REDIS], indirect=True)
    def test_redis_has_it_among_those_of_its_priority(
        self, app: Celery, broker: Broker, deliver: Callable[..., Any], courier: Courier
    ) -> None:
        task = import_rows(app)
        found = kept(task, deliver(task, priority=6))
        courier.send(unsent(found))
        with redis_client.Redis.from_url(broker.url, socket_timeout=5) as client:
            lists = [k for k in client.keys(f"{broker.queue}:*") if client.type(k) == b"list"]
        assert lists == [f"{broker.queue}:{broker.queue}\x06\x166".encode()]


def _forget_exchanges(app: Celery) -> None:
    """As in a process that has neither published nor consumed, but for the broker's own memory."""
    with app.connection_for_write() as connection:
        transport = connection.transport
        if transport.driver_type in ("redis", "filesystem"):
            transport.state.clear()


class TestConnection:
    """One connection, used while it is healthy, and never waited for."""

    @pytest.fixture
    def proxied(
        self,
        broker: Broker,
        proxy_to: Callable[[str], Proxy],  # noqa: F811  # the fixture
    ) -> tuple[Proxy, Celery]:
        proxy = proxy_to(broker.url)
        app = shop(broker, broker_url=proxy.through(broker.url), broker_connection_timeout=None)
        return proxy, app

    @pytest.fixture
    def found(self, app: Celery, deliver: Callable[..., Any]) -> Envelope:
        task = import_rows(app)
        return kept(task, deliver(task))

    @pytest.mark.parametrize("broker", [REDIS, AMQP], indirect=True)
    def test_many_messages_share_it(
        self,
        proxied: tuple[Proxy, Celery],
        found: Envelope,
        take: Take,
        courier_of: Callable[[Celery], Courier],
    ) -> None:
        proxy, app = proxied
        courier = courier_of(app)
        for _ in range(20):
            courier.send(unsent(found))
        assert proxy.accepted <= 2  # Redis has one to look with
        for _ in range(20):
            take()

    @pytest.mark.parametrize("broker", [REDIS, AMQP], indirect=True)
    def test_it_is_closed_when_it_is_not_used(
        self,
        proxied: tuple[Proxy, Celery],
        found: Envelope,
        courier_of: Callable[[Celery], Courier],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(broker_module, "IDLE", 0.2)
        proxy, app = proxied
        courier = courier_of(app)
        courier.send(unsent(found))
        assert proxy.connections > 0
        eventually(lambda: proxy.connections == 0, what="the unused connection closed")
        courier.send(unsent(found))
        assert proxy.connections > 0
        courier.close()
        eventually(lambda: proxy.connections == 0, what="the connection closed")

    @pytest.mark.parametrize("broker", [REDIS, AMQP], indirect=True)
    def test_one_that_broke_is_replaced(
        self,
        proxied: tuple[Proxy, Celery],
        found: Envelope,
        take: Take,
        courier_of: Callable[[Celery], Courier],
    ) -> None:
        proxy, app = proxied
        courier = courier_of(app)
        courier.send(unsent(found))
        take()
        proxy.refuse()
        began = time.monotonic()
        with pytest.raises(Exception):  # noqa: B017, PT011  # whatever kombu raises
            courier.send(unsent(found))
        assert time.monotonic() - began < BOUND
        proxy.accept()
        courier.send(unsent(found))
        assert take().headers["awa_run"] == "run"

    @pytest.mark.parametrize("broker", [REDIS, AMQP], indirect=True)
    @pytest.mark.parametrize("connected", [True, False], ids=["connected", "unconnected"])
    def test_a_broker_that_says_nothing_is_not_waited_for(
        self,
        proxied: tuple[Proxy, Celery],
        found: Envelope,
        connected: bool,
        courier_of: Callable[[Celery], Courier],
    ) -> None:
        proxy, app = proxied
        courier = courier_of(app)
        if connected:
            courier.send(unsent(found))
        proxy.swallow()
        began = time.monotonic()
        with pytest.raises(Exception):  # noqa: B017, PT011  # whatever kombu raises
            courier.send(unsent(found))
        assert time.monotonic() - began < BOUND
        proxy.deliver()
        courier.send(unsent(found))

    @pytest.mark.parametrize("broker", [AMQP], indirect=True)
    def test_what_a_slow_broker_says_of_one_message_is_not_taken_for_the_next(
        self,
        broker: Broker,
        proxied: tuple[Proxy, Celery],
        found: Envelope,
        take: Take,
        courier_of: Callable[[Celery], Courier],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(broker_module, "TIMEOUT", 0.5)
        proxy, app = proxied
        courier = courier_of(app)
        courier.send(unsent(found))
        take()
        proxy.delay(1.0)
        with pytest.raises(TimeoutError):
            courier.send(unsent(found))
        take()  # it arrived, and the answer is on its way
        with app.connection_for_write(broker.url) as connection:
            connection.channel().queue_delete(broker.queue)
        monkeypatch.setattr(broker_module, "TIMEOUT", BOUND)
        proxy.delay(0.0)
        with pytest.raises(ChannelError, match="NO_ROUTE"):
            courier.send(unsent(found))

    @pytest.mark.redis
    def test_the_next_broker_of_the_url_is_tried(
        self,
        private_redis: PrivateRedis,  # noqa: F811  # the fixture
        found: Envelope,
        courier_of: Callable[[Celery], Courier],
    ) -> None:
        app = shop(None, broker_url=f"redis://127.0.0.1:1/0;{private_redis.url}")
        courier_of(app).send(unsent(from_broker(found, "redis:0")))
        queue = envelope.opened(found).routing_key
        with redis_client.Redis.from_url(private_redis.url, socket_timeout=5) as client:
            assert client.llen(queue) == 1
