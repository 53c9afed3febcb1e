"""Every error that celery-awa raises: one root, a few leaves, their data as attributes."""

from __future__ import annotations


class AwaError(Exception):
    """Something in celery-awa went wrong."""

    def __init__(self, message: str | None = None) -> None:
        # A leaf's first docstring line is its message unless a better one is known.
        docstring = (type(self).__doc__ or type(self).__name__).strip()
        super().__init__(message or docstring.partition("\n")[0])


class SettingsError(AwaError, ValueError):
    """A celery-awa setting or option has a value that is not allowed."""


class InvalidProgress(AwaError, ValueError):
    """A progress value was refused; nothing was changed.

    ``field`` names what was refused, as a path: ``percent``, ``metadata['a'][3]``.
    """

    def __init__(self, field: str, reason: str) -> None:
        # Celery's backends make exceptions anew from their arguments, so these are kept as such.
        Exception.__init__(self, field, reason)
        self.field = field
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.field}: {self.reason}"


class ProgressTooLarge(InvalidProgress):
    """The snapshot would be larger than ``awa_max_progress_bytes``; nothing was changed.

    ``size`` and ``limit`` are bytes of JSON.
    """

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(
            "progress",
            f"the snapshot would take {size:,} bytes, the limit is {limit:,} "
            "(setting awa_max_progress_bytes)",
        )
        self.args = (size, limit)
        self.size = size
        self.limit = limit


class NotInAttempt(AwaError, RuntimeError):
    """This can only be asked inside a running attempt of the task."""


class CheckpointMismatch(AwaError):
    """The checkpoint does not fit this code or its source: changed steps, or another file."""


class TooManyItemErrors(AwaError):
    """More items of a loop failed than may be skipped."""


class CallbackFailed(AwaError):
    """Whoever was to call back says that it failed."""


class LeaseLost(AwaError):
    """This attempt no longer owns its job: a newer attempt does, or the job has ended."""


class StoreUnavailable(AwaError):
    """The database could not confirm this in time; it may be away, slow or read-only."""


class StoreRefused(AwaError):
    """The database refused the data of one row, for instance by a trigger or a constraint."""


class RowLocked(AwaError):
    """Another transaction holds the lock on a row that this statement needs."""


class SchemaError(AwaError):
    """The database schema is missing, older or newer than this package, or not ours."""


class ForeignBroker(AwaError):
    """A message belongs to another broker than the one at hand."""


class ForeignEnvelope(AwaError):
    """A message was kept by a newer celery-awa, which alone can read it."""


class Unsendable(AwaError):
    """The message of this job can never be sent again."""


class EmbeddedError(AwaError):
    """The embedded PostgreSQL server could not be started."""
