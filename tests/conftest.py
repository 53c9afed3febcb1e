"""Fixtures and rules for all tests: a database for each test, and services that may be absent.

``AWA_TEST_DATABASE_URL`` names a server to use instead of an embedded one; its role must be
allowed to create databases. ``AWA_TEST_POSTGRES_BIN`` names the PostgreSQL programs to embed.
``AWA_TEST_REDIS_URL`` and ``AWA_TEST_AMQP_URL`` name servers for the tests that need them, and
PgBouncer is used where it is installed; with ``AWA_TEST_REQUIRE_SERVICES=1`` the run fails unless
such tests ran.
"""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest

from celery_awa.store import embedded
from celery_awa.store.embedded_binaries import BIN_VARIABLE
from celery_awa.store.migrations import migrate

SCHEMA = "celery_awa"

#: Marks of the tests that need a service.
SERVICES = frozenset({"redis", "amqp", "pgbouncer"})

# A shell has what it starts in the background ignore SIGINT, and processes inherit that: those
# that tests interrupt would go on.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def postgres_server() -> str:
    """URL of a server, for the session, with a role that may create databases."""
    named = os.environ.get("AWA_TEST_DATABASE_URL")
    if named:
        return named
    return embedded.resolve("embedded:")


@pytest.fixture(scope="session")
def template_database(postgres_server: str) -> Iterator[str]:
    """Name of a migrated database; nobody may be connected to it while it is cloned."""
    with _database(postgres_server, "template1") as name:
        migrate(with_database(postgres_server, name), schema=SCHEMA)
        yield name


@pytest.fixture
def database_url(postgres_server: str, template_database: str) -> Iterator[str]:
    """URL of a database of the test's own, migrated and empty."""
    with _database(postgres_server, template_database) as name:
        yield with_database(postgres_server, name)


@pytest.fixture(scope="module")
def module_database_url(postgres_server: str, template_database: str) -> Iterator[str]:
    """URL of a migrated database that the tests of one module share."""
    with _database(postgres_server, template_database) as name:
        yield with_database(postgres_server, name)


@pytest.fixture
def empty_database_url(postgres_server: str) -> Iterator[str]:
    """URL of a database of the test's own in which nothing was migrated."""
    with _database(postgres_server, "template1") as name:
        yield with_database(postgres_server, name)


def with_database(url: str, name: str) -> str:
    """The same server's URL with another database."""
    return urlunsplit(urlsplit(url)._replace(path=f"/{name}"))


@contextmanager
def _database(server: str, template: str) -> Iterator[str]:
    name = f"awa_test_{uuid.uuid4().hex[:16]}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
    try:
        yield name
    finally:
        with psycopg.connect(server, autocommit=True) as connection:
            connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


class _ServicesRequired:
    """Fails the run where a test that needs a service was skipped, or no test of a mark ran.

    Under pytest-xdist the first is found out by the processes that run the tests, the second by
    the one that hears of them all.
    """

    def __init__(self) -> None:
        self.ran: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        report = yield
        if report.skipped and SERVICES.intersection(report.keywords):
            report.outcome = "failed"
            report.longrepr = f"skipped, though services are required: {report.longrepr}"
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.ran.update(SERVICES.intersection(report.keywords))

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        runs_a_part = hasattr(session.config, "workerinput")
        if exitstatus == pytest.ExitCode.OK and self.ran < SERVICES and not runs_a_part:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for mark in sorted(SERVICES - self.ran):
            terminalreporter.write_line(f"ERROR no test with the mark {mark} ran", red=True)


def pytest_configure(config: pytest.Config) -> None:
    binaries = os.environ.get("AWA_TEST_POSTGRES_BIN")
    if binaries:
        os.environ[BIN_VARIABLE] = binaries
    if os.environ.get("AWA_TEST_REQUIRE_SERVICES") == "1":
        config.pluginmanager.register(_ServicesRequired())
