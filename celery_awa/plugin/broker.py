"""Called on the rescue thread, or in the command ``rescue``: one connection, to publish with.

That is opened when it is needed, kept while it is used and healthy, and closed by a timer's thread
when it has not been used for a while. ``publish_once`` is called on the thread of a task, and has
a connection of its own. No call waits for longer than some seconds.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from kombu import Exchange, Producer
from kombu.exceptions import OperationalError
from kombu.transport import virtual

from . import wire
from .wire import Message

#: Seconds for one answer of the broker.
TIMEOUT = 4.0
#: Seconds without use after which the connection is closed.
IDLE = 5.0


class Broker:
    """An app's broker as one thread publishes to it."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._connection: Any = None
        self._used_at = 0.0
        #: Held while publishing. The timer's thread does not wait for it.
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    def publish(self, message: Message) -> None:
        """Publish it, confirmed where the broker confirms.

        Raises whatever kombu raises; OperationalError too where no queue would get it.
        """
        with self._lock:
            try:
                connection = self._open()
                _publish(self._app, connection, message)
            except BaseException:
                self._abandon()
                raise
            self._used_at = time.monotonic()
            if self._timer is None:
                self._look_later(IDLE)

    def close(self) -> None:
        """Close the connection unless it is in use. Never raises."""
        if self._lock.acquire(blocking=False):
            connection, self._connection = self._connection, None
            self._lock.release()
            _release(connection)

    def _open(self) -> Any:
        if self._connection is not None and not self._connection.connected:
            self._abandon()
        if self._connection is None:
            self._connection = _connected(self._app)
        return self._connection

    def _abandon(self) -> None:
        connection, self._connection = self._connection, None
        _abandon(connection)

    def _look_later(self, seconds: float) -> None:
        self._timer = threading.Timer(seconds, self._close_if_idle)
        self._timer.name = "celery-awa-broker"
        self._timer.daemon = True
        self._timer.start()

    def _close_if_idle(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._look_later(IDLE)
            return
        connection = None
        left = self._used_at + IDLE - time.monotonic()
        if left > 0 and self._connection is not None:
            self._look_later(left)
        else:
            self._timer = None
            connection, self._connection = self._connection, None
        self._lock.release()
        # Outside the lock: a broker may take its time to say goodbye.
        _release(connection)


def publish_once(app: Any, message: Message) -> None:
    """Publish over a connection of this call's own; bounded in time and raising as Broker's."""
    connection = _connected(app)
    try:
        _publish(app, connection, message)
    except BaseException:
        _abandon(connection)
        raise
    _release(connection)


def _connected(app: Any) -> Any:
    connection = app.connection_for_write(
        connect_timeout=min(app.conf.broker_connection_timeout or TIMEOUT, TIMEOUT)
    )
    for name, value in _options(connection.transport).items():
        connection.transport_options.setdefault(name, value)
    # One try for each broker of the URL, without a pause: a later pass tries again.
    connection.ensure_connection(
        max_retries=max(1, len(connection.alt or ())) - 1, interval_start=0
    )
    return connection


def _abandon(connection: Any) -> None:
    """Let go of a connection that may be broken, without a word to the broker."""
    if connection is not None and _confirms(connection.transport):
        connection.collect()
    else:
        _release(connection)


def _confirms(transport: Any) -> bool:
    return bool(transport.driver_name == "py-amqp")


def _options(transport: Any) -> dict[str, Any]:
    """What a connection that only publishes needs, where the app's configuration has no other."""
    if _confirms(transport):
        return {"confirm_publish": True}
    if transport.driver_type == "redis":
        return {"socket_timeout": TIMEOUT, "socket_connect_timeout": TIMEOUT}
    return {}


def _release(connection: Any) -> None:
    if connection is not None:
        try:
            connection.release()
        except Exception:  # it is gone, which is all we want
            pass


def _publish(app: Any, connection: Any, message: Message) -> None:
    channel = connection.default_channel
    if isinstance(channel, virtual.Channel) and message.exchange:
        _find_queues(app, channel, message)
    properties = dict(message.properties)
    if "expiration" in properties:
        # kombu takes seconds and makes this of them.
        properties["expiration"] = float(properties["expiration"]) / 1000
    Producer(channel, auto_declare=False).publish(
        message.body,
        exchange=message.exchange,
        routing_key=message.routing_key,
        content_type=message.content_type,
        content_encoding=message.content_encoding,
        headers=message.headers,
        priority=properties.pop("priority", None),
        # Without it a broker drops what no queue is bound for, and confirms that.
        mandatory=_confirms(connection.transport),
        timeout=TIMEOUT,
        confirm_timeout=TIMEOUT,
        **properties,
    )


def _find_queues(app: Any, channel: Any, message: Message) -> None:
    """Have a virtual transport know exchange and queues, which it keeps in each process.

    It would take an exchange that it does not know for a direct one, and drop in silence what
    no queue is bound for.
    """
    kind = message.exchange_type or wire.exchange_type(app, message.exchange) or "direct"
    if kind == "fanout":
        Exchange(message.exchange, kind, channel=channel).declare()
        return
    for queue in wire.queues_of(app, message.exchange):
        queue(channel).declare()
    if message.exchange not in channel.state.exchanges:
        Exchange(message.exchange, kind, channel=channel).declare()
    bound = channel.typeof(message.exchange).lookup(
        channel.get_table(message.exchange), message.exchange, message.routing_key, None
    )
    if not bound:
        raise OperationalError(
            f"no queue is bound to exchange {message.exchange!r} for {message.routing_key!r}"
        )
