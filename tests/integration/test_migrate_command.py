"""``python -m celery_awa migrate``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from celery_awa.store import sql_files

ROOT = Path(__file__).resolve().parents[2]
LAST = sql_files.migrations()[-1][1]


def command(*options: str, **env: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if k != "AWA_DATABASE_URL"}
    return subprocess.run(
        [sys.executable, "-m", "celery_awa", "migrate", *options],
        cwd=ROOT,
        env=inherited | env,
        capture_output=True,
        text=True,
    )


def jobs_in(url: str, schema: str) -> int:
    with psycopg.connect(url) as connection:
        row = connection.execute(f"SELECT count(*) FROM {schema}.jobs").fetchone()
    assert row
    return int(row[0])


def test_makes_the_tables_once(empty_database_url: str) -> None:
    first = command("--database-url", empty_database_url)
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("schema celery_awa: applied ")
    assert LAST in first.stdout
    assert jobs_in(empty_database_url, "celery_awa") == 0

    again = command("--database-url", empty_database_url)
    assert (again.returncode, again.stdout) == (0, "schema celery_awa is up to date\n")


def test_takes_the_url_from_the_environment_and_the_schema_that_is_named(
    empty_database_url: str,
) -> None:
    done = command("--schema", "other", AWA_DATABASE_URL=empty_database_url)
    assert done.stdout.startswith("schema other: applied "), done.stderr
    assert jobs_in(empty_database_url, "other") == 0


def test_the_option_goes_before_the_environment(empty_database_url: str) -> None:
    done = command("--database-url", empty_database_url, AWA_DATABASE_URL="postgresql://wrong:1/x")
    assert done.returncode == 0, done.stderr


def test_an_empty_option_does_not_give_way_to_the_environment(empty_database_url: str) -> None:
    empty = {"AWA_DATABASE_URL": empty_database_url, "PGHOST": "/nowhere/at/all"}
    done = command("--database-url", "", **empty)
    assert (done.returncode, done.stdout) == (1, "")
    assert "the database URL is empty" in done.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "Error: which database? Give --database-url"),
        (["--database-url", "embedded:"], "name a folder: embedded:PATH"),
        (["--database-url", ""], "the database URL is empty"),
        (["--database-url", "nonsense"], "the database URL cannot be read"),
        (["--database-url", "postgresql://u:geheim@127.0.0.1:1/x"], "Connection refused"),
        (["--database-url", "postgresql://x/y", "--schema", "A-b"], "'A-b' is not allowed"),
    ],
)
def test_an_error_is_one_line_that_says_what_to_do(options: list[str], says: str) -> None:
    # A server that libpq finds by itself is none of this test's.
    done = command(*options, PGHOST="/nowhere/at/all")
    assert done.returncode == 1
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert "geheim" not in done.stderr
    assert done.stdout == ""
