"""Index the source files of the Python standard library, past three interruptions.

An exception, a killed pool child, and the whole worker killed while the broker forgets its message.

Needs no service: PostgreSQL is embedded, the messages are files, the worker is started here. The
task is in ``file_index/app.py``. However it ends, it leaves nothing running and no file.
"""

from __future__ import annotations

import os
import signal
import sys

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> int:
    for number in SIGNALS:
        signal.signal(number, _leave)
    from file_index import demo  # takes a second, in which a signal may come already

    return demo.main(__doc__)


def _leave(number: int, frame: object) -> None:
    # Once: what follows takes a second or two, and others do it if this process is killed.
    for further in SIGNALS:
        signal.signal(further, signal.SIG_IGN)
    # Not print: the signal may have come in the middle of one.
    start = "\n" if os.isatty(2) else ""
    os.write(2, f"{start}interrupted: ending what was started\n".encode())
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
