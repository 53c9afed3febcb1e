"""kombu's ``filesystem://`` transport, with messages that appear whole.

kombu makes a message's file where workers look for one and writes it then; a worker that looks
in between ends. With hundreds of messages on a busy machine that happens.
"""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path
from typing import Any

from kombu.transport import filesystem
from kombu.utils.json import dumps


class Channel(filesystem.Channel):
    """Writes under a name that nobody looks for, and renames."""

    def _put(self, queue: str, payload: Any, **kwargs: Any) -> None:
        name = f"{time.monotonic_ns():020}_{uuid.uuid4()}.{queue}.msg"
        path = Path(self.data_folder_out, name)
        unfinished = path.with_suffix(".new")
        unfinished.write_text(dumps(payload))
        os.rename(unfinished, path)


class Transport(filesystem.Transport):
    """The transport to name in ``broker_transport``."""

    Channel = Channel
