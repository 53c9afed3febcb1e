"""Which database URLs are taken, and that none of the others leads to a server."""

from __future__ import annotations

from typing import Any

import pytest

from celery_awa.errors import SettingsError
from celery_awa.store.connection import check_url, connect
from celery_awa.store.migrations import migrate


@pytest.fixture(autouse=True)
def no_server_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What libpq would take in place of an empty URL leads nowhere."""
    monkeypatch.setenv("PGHOST", "/nowhere/at/all")


@pytest.mark.parametrize(
    "url",
    [
        *("postgresql://host/database", "postgres://host", "host=here dbname=shop"),
        *("embedded:", "embedded:/tmp/somewhere"),
    ],
)
def test_a_url_of_libpqs_and_one_of_ours_are_taken(url: str) -> None:
    check_url(url)


@pytest.mark.parametrize("use", [check_url, connect, migrate])
@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("", "empty"),
        (" \t\n", "empty"),
        (None, "of type NoneType"),
        (5, "of type int"),
        (b"postgresql://user:geheim@host", "of type bytes"),
    ],
)
def test_no_url_is_not_whatever_libpq_finds(use: Any, url: Any, shown: str) -> None:
    with pytest.raises(SettingsError, match=f"^the database URL is {shown}; it must be") as told:
        use(url)
    assert "embedded:PATH" in str(told.value)
    assert "geheim" not in str(told.value)


def test_a_schema_without_a_name_is_refused_before_anything_is_connected() -> None:
    with pytest.raises(SettingsError, match="schema name of type NoneType"):
        migrate("dbname=nothing", schema=None)  # type: ignore[arg-type]
