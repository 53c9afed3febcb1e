"""A sink in memory, read back as the worker reads a page."""

from __future__ import annotations

import json
from typing import Any

from celery_awa.progress import compose


class Page:
    """Remembers every call; the last record of each kind is what a reader finds."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, bytes]] = []

    def write_brief(self, generation: int, data: bytes) -> None:
        self._keep("brief", generation, data)

    def write_metadata(self, generation: int, data: bytes) -> None:
        self._keep("metadata", generation, data)

    def _keep(self, kind: str, generation: int, data: bytes) -> None:
        assert isinstance(json.loads(data), dict)
        self.calls.append((kind, generation, data))

    def last(self, kind: str) -> tuple[int, bytes]:
        return next(
            ((generation, data) for name, generation, data in reversed(self.calls) if name == kind),
            (0, b""),
        )

    @property
    def generation(self) -> int:
        return max(self.last("brief")[0], self.last("metadata")[0])

    def whole(self) -> Any:
        text = compose(self.last("brief")[1], self.last("metadata")[1])
        return None if text is None else json.loads(text)


class TearingPage(Page):
    """A page that is torn while it is written, and has calls inside at which to strike."""

    def write_brief(self, generation: int, data: bytes) -> None:
        self.calls.append(("brief", -1, b"torn"))
        super().write_brief(generation, data)

    def write_metadata(self, generation: int, data: bytes) -> None:
        self.calls.append(("metadata", -1, b"torn"))
        super().write_metadata(generation, data)
