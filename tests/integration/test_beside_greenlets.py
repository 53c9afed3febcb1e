"""gevent and eventlet: what greenlets and the real thread beside them share."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.beside_greenlets import SCENES, WATCHDOG

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("library", ["gevent", "eventlet"])
@pytest.mark.parametrize("scene", [scene.__name__ for scene in SCENES])
def test_between_greenlets_and_a_real_thread(scene: str, library: str) -> None:
    if not importlib.util.find_spec(library):
        pytest.skip(f"needs {library}")
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.beside_greenlets", library, scene],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=WATCHDOG * 2,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
