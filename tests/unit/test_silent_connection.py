"""When a connection that says nothing is given up, step by step of the driver's waiting."""

from __future__ import annotations

import socket
from collections.abc import Generator, Iterator
from contextlib import suppress

import psycopg
import pytest

from celery_awa.settings import Settings
from celery_awa.store import connection as store_connection
from celery_awa.store.connection import ANSWER_WITHIN, _in_time
from tests.runtime_parts import Clock

#: What the driver's steps are told. Older drivers say that something came when nothing did.
NOTHING, SOMETHING = 0, 1


class Connection:
    """A connection that a server may answer on."""

    def __init__(self) -> None:
        self.ours, self.servers = socket.socketpair()

    def statement(self) -> Generator[str, int, bytes]:
        """What the driver does: looks after each step whether the answer is complete."""
        answer = b""
        while not answer.endswith(b";"):
            yield "readable"
            with suppress(BlockingIOError):
                answer += self.ours.recv(100, socket.MSG_DONTWAIT)
        return answer

    def begin(self) -> Generator[str, int, bytes]:
        """The steps of a statement, after the first."""
        steps = _in_time(self.statement(), self.ours.fileno())
        assert next(steps) == "readable"
        return steps


@pytest.fixture
def connection() -> Iterator[Connection]:
    made = Connection()
    with made.ours, made.servers:
        yield made


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch, store_connection)


def answer_of(steps: Generator[str, int, bytes], came: int = SOMETHING) -> bytes:
    with pytest.raises(StopIteration) as answered:
        steps.send(came)
    answer: bytes = answered.value.value
    return answer


def test_what_is_answered_in_time_is_answered(clock: Clock, connection: Connection) -> None:
    steps = connection.begin()
    clock.pass_by(ANSWER_WITHIN - 0.1)
    connection.servers.send(b"row, ")
    for came in (NOTHING, SOMETHING, NOTHING):
        assert steps.send(came) == "readable"
    connection.servers.send(b"row;")
    assert answer_of(steps) == b"row, row;"


@pytest.mark.parametrize("said", [NOTHING, SOMETHING])
def test_silence_is_given_up_after_its_time(
    clock: Clock, connection: Connection, said: int
) -> None:
    steps = connection.begin()
    clock.pass_by(ANSWER_WITHIN - 0.1)
    steps.send(said)
    clock.pass_by(0.2)
    with pytest.raises(psycopg.OperationalError, match="no answer within 10 s"):
        steps.send(said)


def test_a_thread_that_was_kept_from_looking_takes_the_answer_that_came(
    clock: Clock, connection: Connection
) -> None:
    """As by a task that computes for a minute and lets no other thread run meanwhile."""
    steps = connection.begin()
    connection.servers.send(b"row;")
    clock.pass_by(60)
    assert answer_of(steps, NOTHING) == b"row;"


def test_a_connection_that_ends_is_left_to_the_driver(clock: Clock, connection: Connection) -> None:
    steps = connection.begin()
    clock.pass_by(60)
    connection.servers.close()
    assert steps.send(SOMETHING) == "readable"


def test_by_default_a_silent_connection_makes_no_attempt_stale() -> None:
    defaults = Settings()
    assert defaults.heartbeat_interval + ANSWER_WITHIN < defaults.stale_after
