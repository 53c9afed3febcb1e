"""Which files are indexed, in which order, and what is noted of each."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

#: Where packages are installed: not the standard library's own.
_FOREIGN = frozenset({"site-packages", "dist-packages"})


@dataclass(frozen=True)
class Source:
    """One file; ``path`` is relative to the root, ``size`` is bytes."""

    path: str
    size: int
    lines: int
    sha256: str


def standard_library() -> Path:
    """The folder of this Python's own source files."""
    return Path(sysconfig.get_path("stdlib"))


def list_sources(root: Path) -> list[str]:
    """The ``.py`` files below the root, relative to it, sorted: the same at every attempt."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _FOREIGN]
        paths = (Path(folder, name) for name in names if name.endswith(".py"))
        found += [path.relative_to(root).as_posix() for path in paths if path.is_file()]
    return sorted(found)


def read_source(root: Path, path: str) -> Source:
    """Read one file and describe it."""
    data = (root / path).read_bytes()
    return Source(path, len(data), len(data.splitlines()), hashlib.sha256(data).hexdigest())
