"""``install(connect=…)``: what is taken, which database counts, and what a spawned child gets."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import psycopg
import pytest
from celery import Celery

from celery_awa.client import Client
from celery_awa.errors import SettingsError, StoreUnavailable
from celery_awa.plugin.install import install
from celery_awa.plugin.start import settings_of, store_opener
from celery_awa.store.connection import connect_by

URL = "postgresql://user:geheim@host/database"
calls: list[str] = []


def opens_nothing(word: str = "called") -> Any:
    """A user's function, which can be found by its name."""
    calls.append(word)
    raise OSError("no route")


class NotToBePickled:
    """A user's object that holds something which cannot leave its process."""

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle a session")

    def __call__(self) -> Any:
        return opens_nothing()


@pytest.fixture
def app() -> Celery:
    return Celery("shop", set_as_current=False)


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment names a database that is none of this app's."""
    calls.clear()
    monkeypatch.setenv("AWA_DATABASE_URL", "postgresql://nowhere.invalid/other")


def opened_by(app: Celery) -> Any:
    """What the processes of this app connect by, and what goes wrong with it."""
    with pytest.raises(StoreUnavailable) as failed:
        store_opener(app, settings_of(app))()
    return str(failed.value)


def test_a_function_and_a_url_together_are_refused(app: Celery) -> None:
    with pytest.raises(SettingsError, match="database_url or connect, not both"):
        install(app, URL, connect=opens_nothing)


@pytest.mark.parametrize("wrong", [URL, 5, b"postgresql://user:geheim@host", object()])
def test_only_what_can_be_called_is_taken_and_it_is_not_shown(app: Celery, wrong: Any) -> None:
    with pytest.raises(SettingsError, match=r"^connect must be a function that opens") as told:
        install(app, connect=wrong)
    assert "geheim" not in str(told.value)


def test_a_function_goes_before_setting_and_environment(app: Celery) -> None:
    app.conf.awa_database_url = "postgresql://nowhere.invalid/configured"
    install(app, connect=opens_nothing)
    assert "no route" in opened_by(app)
    with pytest.raises(StoreUnavailable, match="no route"):
        Client(app).list_jobs()
    assert settings_of(app).database_url is None


def test_the_last_call_of_install_decides(app: Celery) -> None:
    install(app, URL)
    install(app, connect=opens_nothing)
    install(app, default_base=True)
    assert "no route" in opened_by(app)
    install(app, URL)
    assert settings_of(app).database_url == URL


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (OSError("no route\nto it"), "OSError: no route"),
        (KeyError("PASSWORD"), "KeyError: 'PASSWORD'"),
        (SystemExit(3), "SystemExit: 3"),
        (psycopg.OperationalError("it is away"), "OperationalError: it is away"),
        (SettingsError("not set"), "SettingsError: not set"),
    ],
)
def test_whatever_the_function_raises_is_a_database_that_is_away(
    failure: BaseException, told: str
) -> None:
    def fail() -> Any:
        raise failure

    with pytest.raises(StoreUnavailable, match="connect= failed") as caught:
        connect_by(fail)
    assert str(caught.value).endswith(f": {told}")
    assert caught.value.__cause__ is failure


def test_what_libpq_quotes_of_a_url_is_not_shown() -> None:
    with pytest.raises(StoreUnavailable) as caught:
        connect_by(partial(psycopg.connect, "postgresql//user:geheim@host"))
    assert "neither postgresql://" in str(caught.value)
    assert "geheim" not in str(caught.value)


def test_an_interrupt_is_none_of_ours() -> None:
    def interrupted() -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        connect_by(interrupted)


@pytest.mark.parametrize(
    ("returned", "told"), [(None, "a NoneType"), (URL, "a str"), (psycopg, "a module")]
)
def test_what_is_no_connection_is_told_by_its_type(returned: Any, told: str) -> None:
    with pytest.raises(StoreUnavailable, match=r"must open a psycopg\.Connection") as caught:
        connect_by(lambda: returned)
    assert str(caught.value).endswith(f"it returned {told}")


@pytest.mark.parametrize("connect", [opens_nothing, partial(opens_nothing, "partly")])
def test_a_spawned_child_calls_the_same_function(app: Celery, connect: Callable[[], Any]) -> None:
    install(app, connect=connect)
    for _ in range(2):  # a child may have children
        app = pickle.loads(pickle.dumps(app))
    assert calls == []
    assert "OSError: no route" in opened_by(app)
    assert calls == ["called" if connect is opens_nothing else "partly"]


@pytest.mark.parametrize("connect", [lambda: opens_nothing(), NotToBePickled()])
def test_a_function_that_cannot_be_passed_keeps_no_child_from_starting(
    app: Celery, connect: Callable[[], Any]
) -> None:
    app.conf.awa_database_url = "postgresql://nowhere.invalid/configured"
    install(app, connect=connect)
    for _ in range(2):
        app = pickle.loads(pickle.dumps(app))
    told = opened_by(app)
    assert "it cannot be passed to a spawned pool child, let it be a function of a module" in told
    assert "\n" not in told
    assert calls == []


def test_neither_function_nor_url_is_shown_by_what_is_pickled_with_the_app(app: Celery) -> None:
    for named in ({"database_url": URL}, {"connect": partial(opens_nothing, URL)}):
        install(app, **named)
        assert "geheim" not in repr(app.fixups)
        assert "geheim" not in repr(pickle.loads(pickle.dumps(app)).fixups)
