"""A connection that lives and says nothing: it is given up, however well the network confirms."""

from __future__ import annotations

from contextlib import closing

import pytest

from celery_awa.errors import StoreUnavailable
from celery_awa.model import Answer, JobState, Transition
from celery_awa.store import connection as store_connection
from celery_awa.store.canonical import open_store
from celery_awa.store.connection import connect, translated
from tests.conftest import SCHEMA
from tests.faults import Proxy
from tests.runtime_parts import SOON, StartProcess, claimed
from tests.waiting import eventually

from .jobs import Database

pytest_plugins = ["tests.integration.stores", "tests.integration.runtime"]

Proxied = tuple[Proxy, str]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A statement must be answered within half a second."""
    monkeypatch.setattr(store_connection, "ANSWER_WITHIN", 0.5)


@pytest.mark.usefixtures("impatient")
def test_what_waits_on_a_silent_connection_goes_on_over_a_new_one(
    proxied: Proxied, start_process: StartProcess, private_url: str
) -> None:
    proxy, url = proxied
    process = start_process(url, write_interval=0.05, heartbeat_interval=0.1)
    one, beating, ending = (claimed(process, name) for name in ("one", "beating", "ending"))
    proxy.swallow_open()
    one.set_progress(50)
    beating.set_progress(60)
    assert one.flush_progress(timeout=SOON) is True
    eventually(lambda: not beating.pending)
    ended = process.end(ending, Transition(JobState.FAILED))
    assert ended is not None
    assert ended.answer is Answer.DONE
    with closing(Database(private_url)) as look:
        assert look.row("one")["progress"] == {"percent": 50}
        assert look.row("beating")["progress"] == {"percent": 60}
    assert proxy.served == 2


@pytest.mark.usefixtures("impatient")
def test_silence_while_it_is_connected_is_told_and_tried_again(
    proxied: Proxied, start_process: StartProcess
) -> None:
    proxy, url = proxied
    process = start_process(f"{url}&connect_timeout=2")
    proxy.swallow()
    with pytest.raises(StoreUnavailable):
        process.database.ask(lambda store: None, 0.1)
    proxy.swallow_open()
    proxy.deliver()
    # The one that is being opened: libpq's own bound, ``connect_timeout``, counts there.
    process.database.ask(lambda store: None, 20)


@pytest.mark.usefixtures("impatient")
def test_a_slow_answer_is_waited_for_and_one_that_is_slower_still_is_not(
    database: Database,
) -> None:
    with closing(open_store(database.url, SCHEMA)) as store:
        connection = store._connection
        for _ in range(5):
            assert connection.execute("SELECT 1 FROM pg_sleep(0.2)").fetchone() == (1,)
        # Rows that keep coming are an answer.
        rows = connection.execute("SELECT repeat('x', 1000) FROM generate_series(1, 20000)")
        assert len(rows.fetchall()) == 20_000
        with pytest.raises(StoreUnavailable, match=r"no answer within 0\.5 s"), translated():
            connection.execute("SELECT pg_sleep(30)")
    assert connection.closed


@pytest.mark.usefixtures("impatient")
def test_a_migration_may_take_its_time(database: Database) -> None:
    with connect(database.url) as connection:
        connection.execute("SELECT pg_sleep(1)")
