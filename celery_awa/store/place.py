"""Which database a URL leads to, in words that hold no secret."""

from __future__ import annotations

import os

from psycopg import conninfo
from psycopg.pq import Conninfo

from . import embedded
from .connection import check_url

#: What tells one database from another. Not the user: credentials change, the database stays.
_PARTS = ("service", "host", "hostaddr", "port", "dbname")


def place(url: str) -> str:
    """The same for two URLs that name the same database in the same way, whoever they log in.

    What a URL leaves out is taken from where libpq takes it. ``embedded:`` means the private
    server of this process tree, which is started where it does not run. Raises SettingsError for
    a URL that cannot be read, and EmbeddedError.
    """
    check_url(url)
    path = url.removeprefix(embedded.PREFIX)
    if path and path != url:
        # The server's own address changes with every start.
        return embedded.PREFIX + os.path.realpath(os.path.expanduser(path))
    named = conninfo.conninfo_to_dict(embedded.resolve(url))
    known = _defaults() | {name: str(value) for name, value in named.items()}
    known.setdefault("dbname", known.get("user", ""))
    return " ".join(conninfo.make_conninfo("", **{part: known.get(part, "")}) for part in _PARTS)


def _defaults() -> dict[str, str]:
    """From the environment, else as libpq was built."""
    options = Conninfo.get_defaults()
    return {
        option.keyword.decode(): option.val.decode(errors="replace")
        for option in options
        if option.val is not None
    }
