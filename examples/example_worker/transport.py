"""kombu's ``filesystem://`` transport, with messages that appear whole.

kombu makes the file of a message where readers look for one, and writes it then. A worker that
looks in between takes an empty message and ends; a returned message is written by one of its
threads and read by another, so on a busy machine this happens.

All of it lies in the folder that the environment names when a message is sent or looked for.
"""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path
from typing import Any

from kombu.transport import filesystem
from kombu.utils.json import dumps

from .keeper import FOLDER_VARIABLE


class Channel(filesystem.Channel):
    """Writes under a name that nobody looks for, and renames."""

    store_processed = True
    data_folder_in = data_folder_out = property(lambda self: _folder("waiting"))
    # Otherwise every message would pass through the system's temporary folder.
    processed_folder = property(lambda self: _folder("taken"))
    control_folder = property(lambda self: Path(_folder("control")))

    def _put(self, queue: str, payload: Any, **kwargs: Any) -> None:
        name = f"{time.monotonic_ns()}_{uuid.uuid4()}.{queue}.msg"
        path = Path(self.data_folder_out, name)
        unfinished = path.with_suffix(".new")
        unfinished.write_text(dumps(payload))
        os.rename(unfinished, path)


def _folder(name: str) -> str:
    return os.path.join(os.environ[FOLDER_VARIABLE], name)


class Transport(filesystem.Transport):
    Channel = Channel
