"""The tools that break things do break them, and put them right again."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import kombu
import psycopg
import pytest
import redis
from psycopg.conninfo import make_conninfo

from tests.services.postgres import PASSWORD_ROLE, row_locked
from tests.waiting import eventually


@pytest.fixture
def proxy(proxy_to, private_postgres):
    return proxy_to(private_postgres.url())


@pytest.fixture
def url(proxy, private_postgres):
    return proxy.through(private_postgres.url())


@pytest.fixture
def table(private_postgres):
    """A table, read on a way around the proxy."""
    with private_postgres.observe() as connection:
        connection.execute("CREATE TABLE seen (value int)")
        yield lambda: [v for (v,) in connection.execute("SELECT value FROM seen ORDER BY 1")]
        connection.execute("DROP TABLE seen")


def connect(url):
    return psycopg.connect(url, autocommit=True, connect_timeout=2)


def test_a_proxy_passes_everything_on(url, proxy):
    with connect(url) as connection:
        size = 300_000
        assert connection.execute("SELECT repeat('x', %s)", [size]).fetchone() == ("x" * size,)
        assert (proxy.connections, proxy.accepted) == (1, 1)
    eventually(lambda: proxy.connections == 0)


def test_a_proxy_reaches_a_server_on_a_unix_socket(proxy_to, postgres_server):
    with connect(proxy_to(postgres_server).through(postgres_server)) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_latency_holds_both_ways_back(url, proxy):
    with connect(url) as connection:
        proxy.delay(0.1)
        began = time.monotonic()
        connection.execute("SELECT 1")
        assert time.monotonic() - began >= 0.2


def test_a_reset_ends_open_connections_only(url, proxy):
    with connect(url) as connection:
        proxy.reset()
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
    connect(url).close()


def test_refused_until_accepted_again(url, proxy):
    with connect(url) as connection:
        proxy.refuse()
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
    with pytest.raises(psycopg.OperationalError, match="refused"):
        connect(url)
    proxy.accept()
    connect(url).close()


def test_who_is_turned_away_is_counted(url, proxy):
    with connect(url) as connection:
        proxy.turn_away()
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
    for _ in range(3):
        with pytest.raises(psycopg.OperationalError):
            connect(url)
    assert (proxy.accepted, proxy.served, proxy.connections) == (4, 1, 0)
    proxy.accept()
    connect(url).close()
    assert (proxy.accepted, proxy.served) == (5, 2)


def test_a_black_hole_delivers_when_it_ends(url, proxy, table):
    with connect(url) as connection, ThreadPoolExecutor(1) as other_thread:
        proxy.swallow()
        insert = other_thread.submit(connection.execute, "INSERT INTO seen VALUES (1)")
        with pytest.raises(psycopg.OperationalError, match="timeout"):
            connect(url)
        assert (table(), insert.done()) == ([], False)
        proxy.deliver()
        insert.result(timeout=5)
        assert table() == [1]


def test_only_open_connections_fall_silent(url, proxy):
    with connect(url) as connection, ThreadPoolExecutor(1) as other_thread:
        proxy.swallow_open()
        query = other_thread.submit(connection.execute, "SELECT 1")
        connect(url).close()
        assert not query.done()
        proxy.reset()
        with pytest.raises(psycopg.OperationalError):
            query.result(timeout=5)


@pytest.mark.parametrize(("answered", "arrived"), [(True, [1]), (False, [])])
def test_a_cut_at_a_statement_loses_its_answer_or_itself(url, proxy, table, answered, arrived):
    with connect(url) as connection:
        proxy.cut_at("INSERT INTO seen", answered=answered)
        connection.execute("SELECT 1")
        with pytest.raises(psycopg.OperationalError):
            connection.execute("INSERT INTO seen VALUES (1)")
    assert table() == arrived
    assert proxy.cuts == 1
    with connect(url) as connection:
        connection.execute("INSERT INTO seen VALUES (2)")
    assert table() == [*arrived, 2]


def test_a_cut_after_commit_leaves_it_committed(url, proxy, table):
    proxy.cut_at("COMMIT")
    with pytest.raises(psycopg.OperationalError), psycopg.connect(url) as connection:
        connection.execute("INSERT INTO seen VALUES (1)")
    assert table() == [1]


def test_a_cut_after_some_bytes_tears_a_statement(url, proxy, table):
    with connect(url) as connection:
        proxy.cut_after(20)
        with pytest.raises(psycopg.OperationalError):
            connection.execute("INSERT INTO seen VALUES (1)")
    assert (table(), proxy.cuts) == ([], 1)


def test_a_private_server_stops_and_starts_with_its_data(private_postgres):
    url = private_postgres.url(private_postgres.create_database())
    with connect(url) as connection:
        connection.execute("CREATE TABLE kept ()")
        private_postgres.stop()
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
    with pytest.raises(psycopg.OperationalError, match="refused"):
        connect(url)
    private_postgres.start()
    with connect(url) as connection:
        connection.execute("SELECT FROM kept")


def test_a_private_server_refuses_writes_while_it_is_read_only(private_postgres):
    url = private_postgres.url(private_postgres.create_database())
    with connect(url) as connection:
        private_postgres.set_read_only(True)
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
            connection.execute("CREATE TABLE refused ()")
        private_postgres.set_read_only(False)
        eventually(lambda: connection.execute("CREATE TABLE IF NOT EXISTS taken ()"))


def test_a_private_server_ends_the_backends_of_others(private_postgres):
    with psycopg.connect(private_postgres.url(), application_name="victim") as connection:
        assert private_postgres.connections() == ["victim"]
        assert private_postgres.terminate_backends() == 1
        with pytest.raises(psycopg.errors.AdminShutdown):
            connection.execute("SELECT 1")
    eventually(lambda: private_postgres.connections() == [])


def test_a_private_server_is_put_right_after_a_test(private_postgres):
    url = private_postgres.url(private_postgres.create_database())
    private_postgres.set_read_only(True)
    private_postgres.stop(immediate=True)
    private_postgres.restore()
    with connect(private_postgres.url()) as connection:
        connection.execute("CREATE TEMP TABLE writable ()")
    with pytest.raises(psycopg.OperationalError, match="does not exist"):
        connect(url)


def test_a_private_server_lets_a_role_in_by_its_password_only(private_postgres):
    url = make_conninfo(private_postgres.url(), user=PASSWORD_ROLE)
    for password in ("first", "second"):
        private_postgres.set_password(password)
        connect(make_conninfo(url, password=password)).close()
    for refused in (url, make_conninfo(url, password="first")):
        with pytest.raises(psycopg.OperationalError, match="password"):
            connect(refused)
    private_postgres.restore()
    with pytest.raises(psycopg.OperationalError, match="does not exist"):
        connect(url)


def test_a_private_server_talks_tls(private_postgres):
    with connect(private_postgres.url(tls=True)) as connection:
        assert connection.pgconn.ssl_in_use


def test_a_locked_row_keeps_others_out(database_url):
    with connect(database_url) as connection:
        connection.execute(
            "INSERT INTO celery_awa.jobs_hot (task_id, kind, state, run_token)"
            " VALUES ('t', 'tests.task', 'running', 'run')"
        )
        with row_locked(database_url, "t"), pytest.raises(psycopg.errors.LockNotAvailable):
            connection.execute("SELECT FROM celery_awa.jobs_hot FOR UPDATE NOWAIT")
        connection.execute("SELECT FROM celery_awa.jobs_hot FOR UPDATE NOWAIT")


def test_a_private_redis_stops_and_starts(private_redis):
    with redis.Redis.from_url(private_redis.url) as client:
        assert client.ping()
        private_redis.stop()
        with pytest.raises(redis.ConnectionError):
            client.ping()
        private_redis.start()
        assert client.ping()


def test_a_private_rabbitmq_is_stopped_killed_and_started(private_rabbitmq):
    arrived = []
    for immediate in (True, False):
        # Confirmed, so that it is on the disk.
        options = {"confirm_publish": True}
        with kombu.Connection(private_rabbitmq.url, transport_options=options) as connection:
            connection.SimpleQueue("kept").put("message")
            private_rabbitmq.stop(immediate=immediate)
        with kombu.Connection(private_rabbitmq.url) as connection:
            with pytest.raises(connection.connection_errors):
                connection.connect()
            private_rabbitmq.start()
            message = connection.SimpleQueue("kept").get_nowait()
            arrived.append(message.payload)
            message.ack()
    assert arrived == ["message"] * 2


@pytest.mark.pgbouncer
def test_clients_of_a_pooler_share_few_connections(pgbouncer, private_postgres):
    url = pgbouncer.through(private_postgres.url(private_postgres.create_database()))
    clients = [connect(url) for _ in range(5)]
    for client in clients:
        assert client.execute("SELECT 1").fetchone() == (1,)
    assert 1 <= len(private_postgres.connections()) <= pgbouncer.pool_size
    pgbouncer.stop()
    with pytest.raises(psycopg.OperationalError):
        clients[0].execute("SELECT 1")
    for client in clients:
        client.close()
    pgbouncer.start()
    connect(url).close()


def test_a_proxy_keeps_a_broker_away(proxy_to, private_redis):
    proxy = proxy_to(private_redis.url)
    with redis.Redis.from_url(proxy.through(private_redis.url)) as client:
        assert client.ping()
        proxy.refuse()
        with pytest.raises(redis.ConnectionError):
            client.ping()
