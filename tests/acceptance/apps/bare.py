"""The app of a process that knows the broker, and neither tasks nor this package."""

from __future__ import annotations

from tests.acceptance.apps.configured import configured_app

app = configured_app("bare")
