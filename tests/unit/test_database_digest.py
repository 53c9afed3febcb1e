"""What stands for a database on a slate: the same for the same one, and nothing else to read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from celery_awa.errors import EmbeddedError
from celery_awa.runtime import database_digest as module
from celery_awa.runtime.database_digest import database_digest
from celery_awa.runtime.slate_layout import DATABASE_BYTES, NOBODYS
from celery_awa.store import embedded
from celery_awa.store.place import place

URL = "postgresql://user:secret@db.example:5433/shop"
SCHEMA = "celery_awa"


@pytest.mark.parametrize(
    "same",
    [
        "postgresql://user:secret@db.example:5433/shop",
        "postgres://another:word@db.example:5433/shop?application_name=x&connect_timeout=1",
        "host=db.example port=5433 dbname=shop user=third",
    ],
)
def test_whoever_logs_in_and_however_it_is_written_it_is_one_database(same: str) -> None:
    assert database_digest(same, SCHEMA) == database_digest(URL, SCHEMA)


@pytest.mark.parametrize(
    "other",
    [
        "postgresql://user:secret@db2.example:5433/shop",
        "postgresql://user:secret@db.example:5434/shop",
        "postgresql://user:secret@db.example:5433/shop2",
        "postgresql://user:secret@db.example:5433/shop?hostaddr=127.0.0.1",
        "service=shop",
        "host=db.example port=5433 dbname='shop celery_awa'",
    ],
)
def test_another_database_has_another(other: str) -> None:
    assert database_digest(other, SCHEMA) != database_digest(URL, SCHEMA)


def test_another_schema_has_another() -> None:
    assert database_digest(URL, "a") != database_digest(URL, "b")


@pytest.mark.parametrize("elsewhere", ["_PID_NAMESPACE", "nodename"])
def test_where_process_ids_mean_something_else_it_is_another(
    monkeypatch: pytest.MonkeyPatch, elsewhere: str, tmp_path: Path
) -> None:
    here = database_digest(URL, SCHEMA)
    if elsewhere == "nodename":
        named = os.uname()
        fields = ("sysname", "another", "release", "version", "machine")
        monkeypatch.setattr(os, "uname", lambda: type(named)(fields))
    else:
        (tmp_path / "link").symlink_to("pid:[1]")
        monkeypatch.setattr(module, "_PID_NAMESPACE", str(tmp_path / "link"))
    assert database_digest(URL, SCHEMA) != here


def test_a_system_without_namespaces_has_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PID_NAMESPACE", "/nowhere")
    assert database_digest(URL, SCHEMA) not in (NOBODYS, database_digest(URL, "other"))


def test_what_a_url_leaves_out_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGHOST", "db.example")
    monkeypatch.setenv("PGPORT", "5433")
    monkeypatch.setenv("PGDATABASE", "shop")
    assert database_digest("postgresql://", SCHEMA) == database_digest(URL, SCHEMA)


def test_where_no_database_can_be_told_it_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(url: str) -> str:
        raise EmbeddedError("there is no server")

    assert database_digest(None, SCHEMA) == NOBODYS
    assert database_digest("mysql://db.example/shop", SCHEMA) == NOBODYS
    monkeypatch.setattr(embedded, "resolve", refuse)
    assert database_digest("embedded:", SCHEMA) == NOBODYS


def test_where_a_function_opens_connections_the_apps_name_stands_for_the_database() -> None:
    digest = database_digest(None, SCHEMA, app="shop")
    assert digest == database_digest(None, SCHEMA, app="shop")
    assert database_digest(None, SCHEMA, app="other") not in (digest, NOBODYS)
    assert database_digest(None, "other", app="shop") not in (digest, NOBODYS)


def test_it_has_its_length_and_no_word_of_the_url() -> None:
    digest = database_digest(URL, SCHEMA)
    assert len(digest) == DATABASE_BYTES
    assert digest != NOBODYS
    assert "secret" not in place(URL)
    assert "user" not in place(URL)


def test_a_named_embedded_server_is_the_folder_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has another address after every start, and it need not run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "data")
    paths = ["data", f"{tmp_path}/data", f"{tmp_path}/./x/../data", "link"]
    digests = {database_digest(f"embedded:{path}", SCHEMA) for path in paths}
    assert len(digests) == 1
    assert digests != {database_digest("embedded:other", SCHEMA)}


def test_a_private_embedded_server_is_the_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one of that name has nothing of this one's jobs."""
    digests = []
    for run in ("/run/a", "/run/b", "/run/b"):
        monkeypatch.setattr(embedded, "resolve", lambda url, run=run: f"host={run} dbname=postgres")
        digests.append(database_digest("embedded:", SCHEMA))
    assert digests[0] != digests[1] == digests[2]
