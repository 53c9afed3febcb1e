"""Runs on the loop of gevent or eventlet, for the real thread beside it: writes its log records.

The locks of logging are greenlets' locks there, and a real thread that takes one can leave
greenlets waiting for ever, or itself. So its records are handed over, and a greenlet writes them.
Without these libraries nothing here is used.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from typing import Any

from .. import native

#: Seconds between two looks at what was handed over.
SOON = 0.2
#: Records that wait for a loop which is busy for long. The oldest goes first.
LIMIT = 1_000
#: The loggers that are used on our real thread: ours, and the database driver's.
LOGGERS = ("celery_awa", "psycopg", "psycopg.transaction", "psycopg.waiting")
_LEVELS = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)

_records: deque[logging.LogRecord] = deque(maxlen=LIMIT)
#: The process whose greenlet writes them: a fork may copy greenlets.
_served = 0


def serve() -> None:
    """On the loop, before a real thread starts beside it: write what that one will log."""
    global _served
    library = native.green()
    if library is None or _served == os.getpid():
        return
    _served = os.getpid()
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.addFilter(_hand_over)
        for level in _LEVELS:
            logger.isEnabledFor(level)  # takes a lock, but not a second time
    library.spawn(_serve, library.sleep)


def write_records() -> None:
    """On the loop: write what was handed over so far."""
    while _records:
        try:
            record = _records.popleft()
            logging.getLogger(record.name).handle(record)
        except Exception:  # a handler of the user's: there is nobody left to tell
            continue


def _serve(sleep: Any) -> None:
    process = os.getpid()
    while os.getpid() == process:
        sleep(SOON)
        write_records()


def _hand_over(record: logging.LogRecord) -> bool:
    """A filter: not to be written here, if this is the real thread."""
    if not native.beside_greenlets():
        return True
    _records.append(record)
    return False


os.register_at_fork(after_in_child=_records.clear)
