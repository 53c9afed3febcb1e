"""Runs where an attempt is claimed, and on its task's thread: what earlier attempts left.

A checkpoint has two parts: the metadata that heartbeats and ends wrote, and what the task wrote in
transactions of its own (``committed``), which wins key by key. Each names the version of the code
that wrote it; what is of another version is migrated by the task, or discarded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from ..errors import InvalidProgress

#: Keys of the metadata and of what is committed that are celery-awa's own: what its loops and
#: steps keep, there and here, and the version of the code.
STATE, COMMITTED_STATE, VERSION = "awa", "awa_committed", "awa_version"
RESERVED = frozenset({STATE, COMMITTED_STATE, VERSION})

#: Makes the metadata of an older version (with its number) fit; None discards it.
Migrate = Callable[[dict[str, Any], int], "Mapping[str, Any] | None"]
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Checkpoint:
    """What one attempt found. ``version`` is that of its code."""

    def __init__(self, version: int = 0, migrate: Migrate | None = None) -> None:
        self.version = version
        #: Both parts, as the task may read them.
        self.values = _NOTHING
        self.committed = _NOTHING
        self._migrate = migrate
        self._old: tuple[dict[str, Any], int] | None = None

    def found(self, metadata: object, committed: object) -> bool:
        """Take over what the row held; False where the task is to migrate it first."""
        # What is in the row was perhaps edited by hand: what is no object is no checkpoint.
        kept = metadata if isinstance(metadata, dict) else {}
        more = committed if isinstance(committed, dict) else {}
        of_kept, of_more = _version(kept), _version(more)
        fits = not kept or of_kept == self.version
        if more and of_more == self.version:
            self.committed = MappingProxyType(dict(more))
        elif more and (not kept or of_kept == of_more):
            kept, of_kept, fits = {**kept, **more}, of_more, False
        if not fits:
            self._old = (kept, of_kept)
            kept = {}
        self._take(kept)
        return fits

    def _take(self, kept: Mapping[str, Any]) -> None:
        if COMMITTED_STATE in kept:
            # In eager mode, and where an operator or the task made one, there is one part.
            states = {**kept[COMMITTED_STATE], **self.committed.get(COMMITTED_STATE, {})}
            self.committed = MappingProxyType({**self.committed, COMMITTED_STATE: states})
        self.values = MappingProxyType({**kept, **self.committed})

    @property
    def unmigrated(self) -> bool:
        """Whether another version's checkpoint was found that the task has not been asked about."""
        return self._old is not None

    def migrated(self) -> Mapping[str, Any]:
        """What the task makes of another version's checkpoint, once; empty where it discards it.

        For the task's thread: raises whatever the task's ``migrate_checkpoint`` raises.
        """
        if self._old is None:
            return {}
        old, version = self._old
        made = self._migrate(dict(old), version) if self._migrate is not None else None
        self._old = None
        made = {key: value for key, value in (made or {}).items() if key != VERSION}
        self._take(made)
        return made

    def stamped(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """The values with the version of the code that writes them; 0 is not written down."""
        return {**values, VERSION: self.version} if self.version else values

    def beside_committed(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """The values where both parts are one: what a loop committed beside what others did."""
        if COMMITTED_STATE in values:
            states = {**self.committed.get(COMMITTED_STATE, {}), **values[COMMITTED_STATE]}
            values = {**values, COMMITTED_STATE: states}
            self.committed = MappingProxyType({COMMITTED_STATE: states})
        return values

    def check_reported(self, values: object) -> None:
        """Raises InvalidProgress for a key that the task may not report."""
        check_keys(values)
        if self.committed and isinstance(values, Mapping):
            for key in values:
                if key in self.committed:
                    raise InvalidProgress(
                        f"metadata[{key!r}]",
                        "an earlier attempt wrote this key with checkpoint_in, which goes before "
                        "what is reported: write it there, or under another key",
                    )


def check_keys(values: object) -> None:
    """Raises InvalidProgress for a key that is celery-awa's own."""
    if isinstance(values, Mapping) and not RESERVED.isdisjoint(values):
        key = min(RESERVED & set(values))
        raise InvalidProgress(f"metadata[{key!r}]", "this key is celery-awa's own: choose another")


def _version(values: Mapping[str, Any]) -> int:
    version = values.get(VERSION, 0)
    return version if isinstance(version, int) else -1
