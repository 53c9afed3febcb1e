"""A TCP proxy between a client and its server that behaves as badly as a test asks.

It runs in a thread of its own; every method may be called from any thread and has taken effect
when it returns, for the connections that are open as for those to come.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qs, urlsplit, urlunsplit

_CHUNK = 65_536
_PORTS = {"postgresql": 5432, "redis": 6379, "amqp": 5672}
#: Seconds for the proxy's own thread to do what a test asks.
_SOON = 10.0


class Proxy:
    """Listens on a port of 127.0.0.1 and passes bytes on to ``upstream`` and back.

    ``upstream`` is host and port, or the path of a Unix socket.
    """

    def __init__(self, upstream: tuple[str, int] | str) -> None:
        self._upstream = upstream
        self._latency = 0.0
        self._open: set[_Connection] = set()
        self._listener: asyncio.Server | None = None
        self._cut_at: bytes | None = None
        self._cut_answered = False
        self._cut_after: int | None = None
        self._turning_away = False
        #: Connections accepted so far, those of them that were not turned away, and those that a
        #: cut has ended.
        self.accepted = 0
        self.served = 0
        self.cuts = 0
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._run(self._prepare())
        self.accept()

    @classmethod
    def before(cls, url: str) -> Proxy:
        """A proxy to the server of a database's or broker's URL; the first may be a Unix socket."""
        parts = urlsplit(url)
        asked = parse_qs(parts.query)
        host = asked.get("host", [parts.hostname or "127.0.0.1"])[0]
        port = int(asked.get("port", [parts.port or _PORTS[parts.scheme]])[0])
        return cls(f"{host}/.s.PGSQL.{port}" if host.startswith("/") else (host, port))

    def through(self, url: str) -> str:
        """The URL with the proxy in place of its server; a database's without encryption."""
        parts = urlsplit(url)
        user, at, _ = parts.netloc.rpartition("@")
        # A database's query may name the socket to go around us by.
        query = "sslmode=disable" if parts.scheme == "postgresql" else parts.query
        return urlunsplit(parts._replace(netloc=f"{user}{at}127.0.0.1:{self.port}", query=query))

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return len(self._open)

    def delay(self, seconds: float) -> None:
        """Hold every chunk back for that long, each way; 0 ends it."""
        self._latency = seconds

    def reset(self) -> None:
        """Reset every open connection, on both sides; new ones are served."""
        self._call(self._reset_all)

    def refuse(self) -> None:
        """Refuse new connections and reset the open ones, until :meth:`accept`."""
        self._run(self._stop_listening())
        self.reset()

    def turn_away(self) -> None:
        """As :meth:`refuse`, and count who comes: each is accepted and reset at once."""
        self._turning_away = True
        self.reset()

    def accept(self) -> None:
        """Take connections and serve them, on the same port as before."""
        self._turning_away = False
        self._run(self._listen())

    def swallow(self) -> None:
        """Deliver nothing any more and say nothing, until :meth:`deliver`: a black hole."""
        self._call(self._flowing.clear)

    def swallow_open(self) -> None:
        """As :meth:`swallow` on the connections that are open, for good; new ones are served."""
        self._call(self._silence_open)

    def deliver(self) -> None:
        """Deliver again, what was held back first, as a network does that comes back."""
        self._call(self._flowing.set)

    def cut_after(self, count: int) -> None:
        """Let ``count`` more bytes pass to the server, then reset the connection they came on."""
        self._cut_after = count

    def cut_at(self, text: str, *, answered: bool = True) -> None:
        """Reset, once, the connection on which a client next sends this text.

        The server has carried the message out by then, and its answer is lost; with
        ``answered=False`` the message is lost as well.
        """
        self._cut_answered = answered
        self._cut_at = text.encode()

    def close(self) -> None:
        """End the proxy and all its connections."""
        self.refuse()
        self._run(self._finish())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_SOON)
        self._loop.close()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _prepare(self) -> None:
        # Made in the loop's thread: on Python 3.10 an event belongs to the loop that made it.
        self._flowing = asyncio.Event()
        self._flowing.set()

    async def _listen(self) -> None:
        if self._listener is None:
            self._listener = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
            self.port = self._listener.sockets[0].getsockname()[1]

    async def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def _finish(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        client = _Peer(reader, writer)
        if self._turning_away:
            client.reset()
            return
        self.served += 1
        try:
            connect = (
                asyncio.open_unix_connection(self._upstream)
                if isinstance(self._upstream, str)
                else asyncio.open_connection(*self._upstream)
            )
            server = _Peer(*await connect)
        except OSError:
            client.reset()
            return
        connection = _Connection(client, server)
        self._open.add(connection)
        try:
            await connection.until_either_ends(
                self._pump_to_server(connection), self._pump_to_client(connection)
            )
        finally:
            self._open.discard(connection)

    async def _pump_to_server(self, connection: _Connection) -> None:
        while data := await connection.client.read():
            await self._pass_time(connection)
            passing = self._until_cut(connection, data)
            if passing is not None:
                await connection.server.write(passing)
                return connection.reset()
            await connection.server.write(data)
        return None

    async def _pump_to_client(self, connection: _Connection) -> None:
        while data := await connection.server.read():
            await self._pass_time(connection)
            if connection.cut_on_answer:
                self.cuts += 1
                return connection.reset()
            await connection.client.write(data)
        return None

    async def _pass_time(self, connection: _Connection) -> None:
        if self._latency:
            await asyncio.sleep(self._latency)
        await self._flowing.wait()
        if connection.silent:
            await asyncio.Event().wait()

    def _until_cut(self, connection: _Connection, data: bytes) -> bytes | None:
        """What is still to be passed on before the cut; None where there is none to make now."""
        if self._cut_after is not None:
            left, self._cut_after = self._cut_after, self._cut_after - len(data)
            if self._cut_after <= 0:
                self._cut_after = None
                self.cuts += 1
                return data[:left]
        # A text may be spread over two chunks.
        seen = connection.tail + data
        connection.tail = seen[-200:]
        if self._cut_at is None or self._cut_at not in seen:
            return None
        self._cut_at = None
        connection.cut_on_answer = self._cut_answered
        if self._cut_answered:
            return None
        self.cuts += 1
        return b""

    def _silence_open(self) -> None:
        for connection in self._open:
            connection.silent = True

    def _reset_all(self) -> None:
        for connection in list(self._open):
            connection.reset()

    def _run(self, todo: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(todo, self._loop).result(_SOON)

    def _call(self, todo: Callable[[], None]) -> None:
        async def call() -> None:
            todo()

        self._run(call())


class _Peer:
    """One side of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def read(self) -> bytes:
        """The next chunk; empty at the end, whichever way it came."""
        with suppress(OSError):
            return await self._reader.read(_CHUNK)
        return b""

    async def write(self, data: bytes) -> None:
        """Send a chunk; a side that is gone takes nothing."""
        with suppress(OSError):
            self._writer.write(data)
            await self._writer.drain()

    def reset(self) -> None:
        """Close at once and without good manners."""
        plug = self._writer.get_extra_info("socket")
        if plug is not None and plug.family != socket.AF_UNIX:
            with suppress(OSError):
                # To linger for 0 s is what sends a reset in place of an orderly end.
                plug.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    def close(self) -> None:
        """Close after what is on its way."""
        self._writer.close()


class _Connection:
    """A client's connection and ours to the server."""

    def __init__(self, client: _Peer, server: _Peer) -> None:
        self.client, self.server = client, server
        self.silent = False
        self.cut_on_answer = False
        self.tail = b""

    def reset(self) -> None:
        """Reset both sides."""
        self.client.reset()
        self.server.reset()

    async def until_either_ends(self, *pumps: Coroutine[Any, Any, None]) -> None:
        """Pump until one side ends, then close the other."""
        tasks = [asyncio.ensure_future(pump) for pump in pumps]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            self.client.close()
            self.server.close()
