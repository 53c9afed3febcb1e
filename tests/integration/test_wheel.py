"""What is shipped: the files of the wheel, and that it finds its SQL where it is installed."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from celery_awa.store import sql_files

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from an sdist as an index would have it, without the network."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT))
    (built,) = folder.glob("celery_awa-*.whl")
    assert list(folder.glob("celery_awa-*.tar.gz"))
    return built


def test_ships_the_sql_files_and_the_mark_of_types_and_no_tests(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    expected = {
        f"celery_awa/sql/{path.relative_to(ROOT / 'sql')}" for path in (ROOT / "sql").rglob("*.sql")
    }
    assert {name for name in names if name.endswith(".sql")} == expected
    assert "celery_awa/py.typed" in names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"celery_awa"}


def test_finds_its_sql_files_where_it_is_installed(wheel: Path, tmp_path: Path) -> None:
    run(
        *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"),
        *("--target", str(tmp_path), str(wheel)),
    )
    found = run(
        sys.executable,
        "-c",
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from celery_awa.store import sql_files\n"
        "print(sql_files.sql_root(), *(name for _, name, _ in sql_files.migrations()))\n"
        "print(sql_files.query('get_job', 'celery_awa'))\n",
        cwd=tmp_path,
    )
    head, _, statement = found.partition("\n")
    ours = [name for _, name, _ in sql_files.migrations()]
    assert head.split() == [str(tmp_path / "celery_awa" / "sql"), *ours]
    assert statement.strip() == sql_files.query("get_job", "celery_awa")


def run(*command: str, cwd: Path = ROOT) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
