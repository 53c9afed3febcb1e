"""The settings: every name, default and rule in one place, parsed and checked once."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

from .errors import SettingsError

PREFIX = "awa_"


@dataclass(frozen=True, slots=True)
class Settings:
    """One worker's settings. Each is the Celery setting ``awa_<name>``; times are seconds.

    ``heartbeat_interval`` and ``stale_after`` must be the same in all workers of a database.
    """

    #: libpq URL or key=value string, ``embedded:`` or ``embedded:PATH``.
    database_url: str | None = None
    #: The Postgres schema of the tables.
    schema: str = "celery_awa"
    #: How often pending progress is written.
    write_interval: float = 2.0
    #: How often a running attempt proves that it lives.
    heartbeat_interval: float = 10.0
    #: How long without a heartbeat until an attempt counts as stale.
    stale_after: float = 30.0
    #: How long an attempt runs before it takes its row; 0 takes it at the start.
    claim_after: float = 1.0
    #: How long an unused connection of a pool child stays open.
    connection_idle: float = 10.0
    #: How often lost and unsent jobs are looked for.
    rescue_interval: float = 10.0
    #: Whether workers do that; if not, ``python -m celery_awa rescue`` must run somewhere.
    rescue_in_workers: bool = True
    #: How long a published message may not come until it is sent again.
    resend_after: float = 3600.0
    #: Bytes of JSON that one snapshot may take.
    max_progress_bytes: int = 65_536
    #: Bytes that an envelope may take; of a larger one the arguments are not kept.
    max_envelope_bytes: int = 262_144
    #: Folder of the slate; None: shared memory, else the temporary folder.
    slate_dir: str | None = None


#: Less would hold no message of a useful length.
_LEAST = {"max_progress_bytes": 256}
_MAY_BE_ZERO = frozenset({"claim_after"})
_NAMES = frozenset(PREFIX + f.name for f in fields(Settings))


def read_settings(get: Callable[[str], Any]) -> tuple[Settings, list[str]]:
    """Settings from Celery's configuration, asked by ``get(name)``, which answers None if unset.

    A value that is not allowed is left at its default; the list has a line for each such, which
    says what is allowed.
    """
    found, problems = {}, []
    for field in fields(Settings):
        value = get(PREFIX + field.name)
        if value is not None:
            try:
                found[field.name] = _checked(field.name, str(field.type), value)
            except SettingsError as exc:
                problems.append(f"{exc}; the default {field.default!r} is used")
    settings = Settings(**found)
    if settings.stale_after < 2 * settings.heartbeat_interval:
        least = 2 * settings.heartbeat_interval
        problems.append(
            f"awa_stale_after is {settings.stale_after:g} s; it must be at least twice "
            f"awa_heartbeat_interval ({settings.heartbeat_interval:g} s); {least:g} s is used"
        )
        settings = replace(settings, stale_after=least)
    return settings, problems


def unknown_settings(names: Iterable[str]) -> list[str]:
    """One line for each ``awa_`` name that no setting has, with the likeliest one meant."""
    lines = []
    for name in sorted({name.lower() for name in names}):
        if name.startswith(PREFIX) and name not in _NAMES:
            near = difflib.get_close_matches(name, _NAMES, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            lines.append(f"unknown setting {name}{hint}")
    return lines


def _checked(name: str, kind: str, value: Any) -> Any:
    if kind.startswith("str"):
        return _text(name, value)
    if kind == "bool":
        return _flag(name, value)
    number = _number(name, value, whole=kind == "int")
    if number < 0 and name in _MAY_BE_ZERO:
        raise SettingsError(f"{PREFIX}{name} is {value!r}; it must not be less than 0")
    if number <= 0 and name not in _MAY_BE_ZERO:
        raise SettingsError(f"{PREFIX}{name} is {value!r}; it must be greater than 0")
    if number < _LEAST.get(name, 0):
        raise SettingsError(f"{PREFIX}{name} is {value!r}; it must be at least {_LEAST[name]}")
    return number


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        # The value itself is not shown: a URL given as bytes would tell its password.
        shown = "empty" if isinstance(value, str) else f"of type {type(value).__name__}"
        raise SettingsError(f"{PREFIX}{name} is {shown}; it must be a text that is not empty")
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise SettingsError(f"{PREFIX}{name} is {value!r}; it must be True or False")
    return value


def _number(name: str, value: Any, *, whole: bool) -> float:
    kinds = (int,) if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not abs(value) < 1e9:
        wanted = "a whole number of bytes" if whole else "a number of seconds"
        raise SettingsError(f"{PREFIX}{name} is {value!r}; it must be {wanted}")
    return value if whole else float(value)
