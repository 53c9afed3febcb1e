"""The SQL files: found, complete, and turned into statements for a schema."""

from __future__ import annotations

import re

import pytest

from celery_awa.errors import SettingsError
from celery_awa.store import sql_files


def test_a_checkout_finds_its_files_beside_the_package() -> None:
    root = sql_files.sql_root()
    assert root.name == "sql"
    assert (root / "migrations").is_dir()
    assert (root / "queries").is_dir()


def test_a_statement_names_the_schema_and_has_no_head() -> None:
    text = sql_files.query("get_job", "other")
    assert '"other".' in text
    assert "{schema}" not in text
    assert not text.startswith("--")


def test_an_unknown_statement_is_an_error() -> None:
    with pytest.raises(FileNotFoundError):
        sql_files.query("no_such_verb", "celery_awa")


def test_migrations_are_numbered_from_1_without_a_gap() -> None:
    found = sql_files.migrations()
    assert [number for number, _, _ in found] == list(range(1, len(found) + 1))
    assert all(re.fullmatch(r"\d{4}_[a-z0-9_]+", name) for _, name, _ in found)
    assert all("{schema}" in text for _, _, text in found)


@pytest.mark.parametrize("schema", ["celery_awa", "_x", "a" * 63, "a1_b"])
def test_a_plain_schema_name_is_quoted(schema: str) -> None:
    assert sql_files.quoted(schema) == f'"{schema}"'


@pytest.mark.parametrize(
    "schema",
    ["", "Awa", "1a", "a-b", 'a"b', "a" * 64, "a\n", "é", "pg_awa", "x; DROP TABLE y", "a.b"],
)
def test_any_other_schema_name_is_refused(schema: str) -> None:
    with pytest.raises(SettingsError, match="is not allowed: use lower-case letters"):
        sql_files.quoted(schema)


@pytest.mark.parametrize("schema", [None, 5, b"awa"])
def test_a_schema_name_of_another_type_is_refused(schema: object) -> None:
    with pytest.raises(SettingsError, match=f"schema name of type {type(schema).__name__} is not"):
        sql_files.quoted(schema)
    with pytest.raises(SettingsError):
        sql_files.query("get_job", schema)
