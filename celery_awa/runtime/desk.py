"""What an attempt asks of the process that it runs in, and what its task says of its attempts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from .checkpoint import Migrate

if TYPE_CHECKING:
    from .attempt import Attempt


class Desk(Protocol):
    """What an attempt asks of its process."""

    def learn(self, attempt: Attempt, timeout: float) -> None:
        """Claim now; StoreUnavailable if there is no answer in time."""
        ...

    def flush(self, attempt: Attempt, timeout: float) -> bool:
        """Write the snapshot and wait; False if the lease is lost."""
        ...

    def commit(self, attempt: Attempt, connection: Any, values: Mapping[str, Any]) -> bool:
        """Write values through the task's own connection; False if the lease is lost."""
        ...

    def expect_callback(
        self, attempt: Attempt, callback_id: str, name: str, timeout: float
    ) -> bool:
        """Note what a callback will be known by; False if the lease is lost."""
        ...

    @property
    def stopping(self) -> bool:
        """Whether the worker is stopping, as far as this process knows."""
        ...


@dataclass(frozen=True, slots=True)
class Terms:
    """What the task says of its attempts. Seconds; None: as long as it takes.

    ``deadline`` and ``max_runtime``: how long one may run until it is asked to stop; the first
    is a failure of it, the second is not. ``version``: of its checkpoints.
    """

    deadline: float | None = None
    max_runtime: float | None = None
    version: int = 0
    migrate: Migrate | None = None


NO_TERMS = Terms()
