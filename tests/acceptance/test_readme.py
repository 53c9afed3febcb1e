"""The README's quick start, taken from the page and run as it stands there."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import Process

ROOT = Path(__file__).parents[2]

#: Where the page has everything lie, and what it has installed first.
FOLDER = "/tmp/awa-try"
INSTALL = "pip install '.[binary,embedded]'"

LOOK_UNTIL_COMPLETED = """
until python look.py | tee looked | grep completed; do sleep 0.2; done
python -c 'import shop, celery_awa; print(celery_awa.Client(shop.app).list_jobs()[0].errors)'
kill $!
wait $!
"""


def quick_start() -> tuple[list[str], list[str]]:
    """The shell commands and the Python files, in the page's order."""
    text = (ROOT / "README.md").read_text().split("\n## Quick start\n")[1].split("\n## ")[0]
    assert FOLDER in text
    assert INSTALL in text
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    shell = [code for language, code in blocks if language == "sh"]
    return shell, [code for language, code in blocks if language == "python"]


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that the embedded server's user may enter, also where root runs the tests."""
    made = Path(tempfile.mkdtemp(prefix="awa-test-", dir="/tmp"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def started(folder: Path, tmp_path: Path) -> Iterator[Process]:
    """The commands as one script, which then looks until the job has completed."""
    (first, *then), (shop, look) = quick_start()
    inside = str(folder / "try")
    script = "\n".join(["set -e", first.replace(INSTALL, "true"), "mv ../*.py .", *then])
    (folder / "shop.py").write_text(shop.replace(FOLDER, inside))
    (folder / "look.py").write_text(look)
    process = Process(
        ["bash", "-c", script.replace(FOLDER, inside) + LOOK_UNTIL_COMPLETED],
        log=tmp_path / "log",
        env={
            **{name: value for name, value in os.environ.items() if "AWA_" not in name},
            "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}",
            "PYTHONPATH": str(ROOT),
        },
        cwd=folder,
    )
    yield process
    process.end(timeout=30)


def test_the_quick_start_works_when_copied(started: Process) -> None:
    assert started.wait(timeout=90) == 0, started.log()
    log = started.log()
    assert re.search(r"^shop\.import_rows (running|retryable|completed) \d", log, re.MULTILINE)
    # The second attempt began where the first one failed, or it would not have passed row 30.
    assert "shop.import_rows completed 2 None None" in log
    assert "the disk is away" in log
    assert "celery-awa: " not in log, log
