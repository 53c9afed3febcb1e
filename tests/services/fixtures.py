"""Fixtures of the private servers, for the tests that break them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.faults import Proxy
from tests.services.pgbouncer import PgBouncer
from tests.services.postgres import PrivatePostgres
from tests.services.rabbitmq import PrivateRabbitMQ
from tests.services.redis import PrivateRedis


@pytest.fixture(scope="session")
def private_postgres_of_session(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[PrivatePostgres]:
    """The server behind ``private_postgres``: making one takes longer than most tests."""
    server = PrivatePostgres(tmp_path_factory.mktemp("postgres") / "log")
    yield server
    server.end()


@pytest.fixture
def private_postgres(private_postgres_of_session: PrivatePostgres) -> Iterator[PrivatePostgres]:
    """A server that the test may stop, restart and set; put right again after the test."""
    yield private_postgres_of_session
    private_postgres_of_session.restore()


@pytest.fixture
def private_redis(tmp_path: Path) -> Iterator[PrivateRedis]:
    """A Redis that the test may stop and start."""
    server = PrivateRedis(tmp_path)
    yield server
    server.end()


@pytest.fixture(scope="session")
def private_rabbitmq_of_session(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[PrivateRabbitMQ]:
    """The server behind ``private_rabbitmq``: a start takes several seconds."""
    server = PrivateRabbitMQ(tmp_path_factory.mktemp("rabbitmq"))
    yield server
    server.end()


@pytest.fixture
def private_rabbitmq(private_rabbitmq_of_session: PrivateRabbitMQ) -> Iterator[PrivateRabbitMQ]:
    """A RabbitMQ that the test may stop, kill and start; it runs again after the test."""
    yield private_rabbitmq_of_session
    private_rabbitmq_of_session.restore()


@pytest.fixture
def pgbouncer(private_postgres: PrivatePostgres) -> Iterator[PgBouncer]:
    """A pooler in transaction mode before ``private_postgres``; for tests with its mark."""
    pooler = PgBouncer(private_postgres.port)
    yield pooler
    pooler.end()


@pytest.fixture
def proxy_to() -> Iterator[Callable[[str], Proxy]]:
    """Put a proxy before the server of a database's or broker's URL: see ``Proxy.through``."""
    with ExitStack() as opened:
        yield lambda url: opened.enter_context(Proxy.before(url))
