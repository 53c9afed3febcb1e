"""The SQL files: where they lie, and their text for one schema."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import SettingsError

_SCHEMA_NAME = re.compile(r"[a-z_][a-z0-9_]{0,62}")
_MIGRATION_NAME = re.compile(r"(\d{4})_\w+")


def sql_root() -> Path:
    """The folder with ``migrations/`` and ``queries/``.

    A wheel carries it inside the package, a checkout beside the package.
    """
    package = Path(__file__).resolve().parents[1]
    inside = package / "sql"
    return inside if inside.is_dir() else package.parent / "sql"


def quoted(schema: Any) -> str:
    """The schema's name as an SQL identifier; SettingsError for a name that is not allowed."""
    if not isinstance(schema, str):
        raise SettingsError(
            f"schema name of type {type(schema).__name__} is not allowed: use a text"
        )
    if not _SCHEMA_NAME.fullmatch(schema) or schema.startswith("pg_"):
        raise SettingsError(
            f"schema name {schema!r} is not allowed: use lower-case letters, digits and _, "
            "at most 63, not beginning with a digit or with pg_"
        )
    return f'"{schema}"'


@cache
def query(name: str, schema: str) -> str:
    """The statement of ``sql/queries/<name>.sql`` for this schema, without its comment head."""
    path = sql_root() / "queries" / f"{name}.sql"
    return _without_head(path.read_text("utf-8")).replace("{schema}", quoted(schema))


def migrations() -> list[tuple[int, str, str]]:
    """Number, name and text of each migration, in order; ``{schema}`` still stands in the text."""
    found = []
    for path in sorted((sql_root() / "migrations").glob("*.sql")):
        numbered = _MIGRATION_NAME.fullmatch(path.stem)
        if numbered:
            found.append((int(numbered[1]), path.stem, path.read_text("utf-8")))
    return found


def _without_head(text: str) -> str:
    lines = text.splitlines()
    while lines and (not lines[0].strip() or lines[0].startswith("--")):
        lines.pop(0)
    return "\n".join(lines).strip()
