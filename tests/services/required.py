"""Whether a test may be skipped because a service is not there."""

from __future__ import annotations

import os
import shutil
from typing import NoReturn

import pytest


def service_url(variable: str, name: str) -> str:
    """The URL of a running server from the environment; without one the test does not run."""
    url = os.environ.get(variable)
    return url or unavailable(f"{variable} names no {name} server")


def program(name: str, *, also_in: str | None = None) -> str:
    """The path of an installed program; without it the test does not run.

    ``also_in`` is a folder that may not be in the PATH.
    """
    found = shutil.which(name) or (also_in and shutil.which(name, path=also_in))
    return found or unavailable(f"{name} is not installed")


def unavailable(reason: str) -> NoReturn:
    """Skip the test, or fail it where AWA_TEST_REQUIRE_SERVICES=1 says that nothing may lack."""
    if os.environ.get("AWA_TEST_REQUIRE_SERVICES") == "1":
        pytest.fail(f"{reason}, and AWA_TEST_REQUIRE_SERVICES=1 requires it", pytrace=False)
    pytest.skip(reason)
