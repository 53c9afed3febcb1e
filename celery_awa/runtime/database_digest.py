"""Runs in the worker before its pool starts: what a slate says of the database it belongs to.

A slate is adopted by workers of the same database only, and where process ids mean the same:
whether its worker is dead is told by its id.
"""

from __future__ import annotations

import os
from hashlib import blake2b

from ..errors import AwaError
from ..store.place import place
from .slate_layout import DATABASE_BYTES, NOBODYS

_PID_NAMESPACE = "/proc/self/ns/pid"


def database_digest(url: str | None, schema: str, *, app: str | None = None) -> bytes:
    """16 bytes that stand for a database and schema, on this machine and in this pid namespace.

    Neither credentials nor names can be read from them. ``app`` is the name of an app whose own
    function opens the connections; it stands for the database then. Where that cannot be told (no
    URL, or one that cannot be read) they are NOBODYS, and nobody adopts what bears those: the
    leases of one database mean nothing in another.
    """
    try:
        named = place(url or "") if app is None else f"app:{app}"
        parts = (named, schema, os.uname().nodename, _pid_namespace())
    except AwaError:  # whoever opens the database tells of it
        return NOBODYS
    # Each with its length, so that no two lists of parts read the same.
    text = "".join(f"{len(part)}:{part}" for part in parts)
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=DATABASE_BYTES).digest()


def _pid_namespace() -> str:
    try:
        return os.readlink(_PID_NAMESPACE)
    except OSError:  # a system without such spaces
        return ""
