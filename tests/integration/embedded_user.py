"""A process that uses an embedded server: it prints the URL, then does what its test asks for.

Run by its file, also where only a part of the package is to be had.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

from celery_awa.errors import EmbeddedError
from celery_awa.store.embedded import resolve


def main(url: str, then: str) -> None:
    try:
        tell("url", resolve(url))
    except EmbeddedError as exc:
        tell("error", exc)
        return
    ACTIONS[then](url)


def tell(name: str, value: object) -> None:
    print(f"{name}: {value}", flush=True)


def wait(url: str) -> None:
    while True:
        signal.pause()


def leave(url: str) -> None:
    return


def fail(url: str) -> None:
    raise RuntimeError("on purpose")


def fork(url: str) -> None:
    if os.fork() == 0:
        tell("fork", os.getpid())
        tell("fork's url", resolve(url))
    wait(url)


def start_descendant(url: str) -> None:
    subprocess.run([sys.executable, __file__, url, "leave"], check=True)
    tell("descendant", "ended")
    wait(url)


def ask_in_threads(url: str) -> None:
    barrier = threading.Barrier(4)

    def ask() -> None:
        barrier.wait()
        found.add(resolve("embedded:"))

    found: set[str] = set()
    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tell("threads", len(found))


def become_another(url: str) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    tell("waits for", "SIGUSR1")
    signal.sigwait([signal.SIGUSR1])
    os.execv(sys.executable, [sys.executable, __file__, url, "wait"])


ACTIONS = {
    action.__name__: action
    for action in (wait, leave, fail, fork, start_descendant, ask_in_threads, become_another)
}

if __name__ == "__main__":
    main(*sys.argv[1:])
