"""Fixtures of the integration tests: processes that use an embedded server."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.embedded_servers import USER, Start, part_of_the_package
from tests.processes import Process


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everybody may enter; temporary files of the processes go there too.

    pytest's own lies below one that root keeps to itself, and the server does not run as root.
    """
    made = Path(tempfile.mkdtemp(prefix="awa-test-", dir="/tmp"))
    made.chmod(0o755)
    (made / "tmp").mkdir()
    (made / "tmp").chmod(0o777)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def start_user(open_folder: Path, tmp_path: Path) -> Iterator[Start]:
    """Start ``embedded_user.py`` with a URL and what to do then."""
    part = part_of_the_package(open_folder)
    started: list[Process] = []

    def start(
        url: str,
        then: str,
        *,
        python: str = sys.executable,
        account: tuple[int, int] | None = None,
        **env: str,
    ) -> Process:
        # Not the server of the session that runs these tests.
        inherited = {k: v for k, v in os.environ.items() if k != "CELERY_AWA_EMBEDDED"}
        defaults = {"TMPDIR": str(open_folder / "tmp"), "PYTHONPATH": str(part)}
        process = Process(
            [python, str(part / USER.name), url, then],
            log=tmp_path / f"{len(started)}.log",
            env=inherited | defaults | env,
            cwd=Path("/"),
            account=account,
        )
        started.append(process)
        return process

    yield start
    # All of them first: a shared server, of the first one's family, ends with the last one.
    for process in started:
        process.kill(signal.SIGKILL)
    with ExitStack() as ends:
        for process in started:
            ends.callback(process.end, timeout=30)
