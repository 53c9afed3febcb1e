"""celery-awa: structured progress and checkpoints for long Celery tasks, kept in Postgres."""

from .client import Client
from .errors import (
    AwaError,
    CallbackFailed,
    CheckpointMismatch,
    EmbeddedError,
    InvalidProgress,
    LeaseLost,
    NotInAttempt,
    ProgressTooLarge,
    SchemaError,
    SettingsError,
    StoreUnavailable,
    TooManyItemErrors,
)
from .model import Callback, Cancel, Resend, StopReason
from .plugin.bootstep import HeartbeatStep
from .plugin.current import current_attempt
from .plugin.install import install
from .plugin.task import AwaMixin, AwaTask
from .store.migrations import migrate

__all__ = [
    "AwaError",
    "AwaMixin",
    "AwaTask",
    "Callback",
    "CallbackFailed",
    "Cancel",
    "CheckpointMismatch",
    "Client",
    "EmbeddedError",
    "HeartbeatStep",
    "InvalidProgress",
    "LeaseLost",
    "NotInAttempt",
    "ProgressTooLarge",
    "Resend",
    "SchemaError",
    "SettingsError",
    "StopReason",
    "StoreUnavailable",
    "TooManyItemErrors",
    "current_attempt",
    "install",
    "migrate",
]
