"""What the benchmarks run on: an embedded database, a part of a Redis, and a real worker."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from types import ModuleType
from typing import Any

import redis
from celery.exceptions import TimeoutError as NotYet

import celery_awa
from celery_awa.store import embedded

BENCH = Path(__file__).parent
DEFAULT_REDIS = "redis://127.0.0.1:6379/7"
#: Seconds that the end of a worker may take.
ENDED_WITHIN = 15.0


def parser(description: str | None) -> argparse.ArgumentParser:
    """Arguments that every benchmark has."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument(
        "--redis",
        default=os.environ.get("AWA_TEST_REDIS_URL") or DEFAULT_REDIS,
        help="broker and result backend; default: AWA_TEST_REDIS_URL, else %(default)s",
    )
    return made


@contextmanager
def services(redis_url: str) -> Iterator[None]:
    """A migrated database, and keys of a prefix that are removed at the end."""
    prefix = f"awa-bench-{uuid.uuid4().hex[:12]}:"
    with redis.Redis.from_url(redis_url, socket_timeout=5) as client:
        try:
            client.ping()
        except redis.RedisError as exc:
            sys.exit(f"no Redis at {redis_url}: {exc}; name one with --redis")
        url = embedded.resolve("embedded:")
        celery_awa.migrate(url)
        os.environ |= {
            "AWA_DATABASE_URL": url,
            "AWA_BENCH_REDIS_URL": redis_url,
            "AWA_BENCH_PREFIX": prefix,
        }
        try:
            yield
        finally:
            # Channels of control commands put the prefix behind the number of the database.
            for key in client.scan_iter(match=f"*{prefix}*", count=1000):
                client.delete(key)


@contextmanager
def worker(pool: str, concurrency: int) -> Iterator[ModuleType]:
    """A worker that takes tasks of ``measured``; shows its log if something goes wrong."""
    # Not before services(), whose environment it reads.
    import measured

    with TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "celery", "-A", "measured", "worker"),
                *("--pool", pool, "--concurrency", str(concurrency), "--loglevel", "WARNING"),
                *("--without-mingle", "--without-gossip", "--without-heartbeat"),
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=BENCH,
        )
        try:
            _wait_until_ready(process, measured.clock.delay())
            yield measured
        except Exception:
            log.seek(0)
            print(log.read(), file=sys.stderr)
            raise
        finally:
            process.terminate()
            process.wait(ENDED_WITHIN)


def _wait_until_ready(process: subprocess.Popen[bytes], first: Any) -> None:
    while process.poll() is None:
        try:
            first.get(timeout=0.5)
            return
        except NotYet:
            continue
    raise RuntimeError("the worker ended before it was ready")
