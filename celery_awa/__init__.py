"""celery-awa: structured progress and checkpoints for long Celery tasks, kept in Postgres."""

from .client import Client
from .errors import (
    AwaError,
    EmbeddedError,
    InvalidProgress,
    LeaseLost,
    ProgressTooLarge,
    SchemaError,
    SettingsError,
    StoreUnavailable,
)
from .model import Cancel, Resend, StopReason
from .plugin.bootstep import HeartbeatStep
from .plugin.current import current_attempt
from .plugin.install import install
from .plugin.task import AwaMixin, AwaTask
from .store.migrations import migrate

__all__ = [
    "AwaError",
    "AwaMixin",
    "AwaTask",
    "Cancel",
    "Client",
    "EmbeddedError",
    "HeartbeatStep",
    "InvalidProgress",
    "LeaseLost",
    "ProgressTooLarge",
    "Resend",
    "SchemaError",
    "SettingsError",
    "StopReason",
    "StoreUnavailable",
    "current_attempt",
    "install",
    "migrate",
]
