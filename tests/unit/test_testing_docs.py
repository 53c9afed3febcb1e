"""docs/testing.md: its examples, taken from the page and run as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def examples() -> dict[str, str]:
    """The page's Python files by name, which is their first line."""
    text = (ROOT / "docs" / "testing.md").read_text("utf-8")
    blocks = re.findall(r"^```python\n# (\S+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert len(blocks) == text.count("```python\n")
    assert len(dict(blocks)) == len(blocks)
    return dict(blocks)


def test_the_examples_pass_as_they_stand(tmp_path: Path) -> None:
    for name, code in examples().items():
        (tmp_path / name).write_text(code)
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", "."],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.search(r"^16 passed", ran.stdout, re.MULTILINE), ran.stdout
