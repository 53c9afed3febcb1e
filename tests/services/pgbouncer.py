"""PgBouncer in transaction mode before a server of the tests' own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import psycopg

from celery_awa.store.embedded_binaries import account_for
from tests.processes import Process
from tests.services.ports import free_port
from tests.services.postgres import OBSERVER
from tests.services.required import program
from tests.waiting import eventually

_CONFIGURATION = """\
[databases]
* = host=127.0.0.1 port={server_port} user=postgres

[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = {pool_size}
server_tls_sslmode = disable
server_login_retry = 0.2
"""


class PgBouncer:
    """A pooler whose clients share ``pool_size`` connections to each database of one server."""

    def __init__(self, server_port: int, *, pool_size: int = 2) -> None:
        self.port = free_port()
        self.pool_size = pool_size
        self._server_port = server_port
        # Debian puts it where only root looks.
        self._program = program("pgbouncer", also_in="/usr/sbin")
        # It refuses root, and pytest's own folder lies below one that root keeps to itself.
        self._account = account_for()
        self._folder = Path(tempfile.mkdtemp(prefix="awa-test-", dir="/tmp"))
        if self._account:
            os.chown(self._folder, *self._account)
        self.start()

    def through(self, url: str) -> str:
        """The URL with the pooler in place of its server."""
        parts = urlsplit(url)
        user, at, _ = parts.netloc.rpartition("@")
        netloc = f"{user}{at}127.0.0.1:{self.port}"
        return urlunsplit(parts._replace(netloc=netloc, query="sslmode=disable"))

    def start(self) -> None:
        """Start it and wait until a client gets through to the server."""
        self.process = Process(
            [self._program, str(self._configuration())],
            log=self._folder / "log",
            cwd=Path("/"),
            account=self._account,
        )
        try:
            eventually(self._answers, what=f"PgBouncer on port {self.port}")
        except BaseException:
            self.end()
            raise

    def stop(self) -> None:
        """Stop it; connections are closed and new ones refused."""
        self.process.kill(signal.SIGTERM)
        self.process.wait()

    def end(self) -> None:
        """Kill it if it runs, and remove its folder."""
        self.process.end()
        shutil.rmtree(self._folder)

    def log(self) -> str:
        """What it wrote since its first start."""
        return self.process.log()

    def _configuration(self) -> Path:
        path = self._folder / "pgbouncer.ini"
        path.write_text(
            _CONFIGURATION.format(
                server_port=self._server_port, port=self.port, pool_size=self.pool_size
            )
        )
        path.chmod(0o644)
        return path

    def _answers(self) -> bool:
        assert self.process.running, f"PgBouncer ended: {self.log()[-2000:]}"
        with contextlib.suppress(psycopg.OperationalError):
            with psycopg.connect(
                self.through("postgresql://postgres@/postgres"), application_name=OBSERVER
            ) as connection:
                connection.execute("SELECT 1")
            return True
        return False
