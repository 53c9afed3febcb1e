"""A transaction that a task under test passes to ``checkpoint_in``."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

Self = TypeVar("Self", bound="FakeTransaction")

#: Whose connections commit or roll back where nobody here hears of it.
_REAL = frozenset({"django", "psycopg", "psycopg2", "sqlalchemy", "sqlite3"})


class FakeTransaction:
    """Stands for a connection with an open transaction, in a task that ``run_task`` runs.

    What ``checkpoint_in`` writes through it is kept once it commits, and dropped if it rolls back.
    Leaving the ``with`` block commits, and an exception rolls back. It can be used again after
    either. Have it carry the task's own effects by :meth:`on_commit`.
    """

    def __init__(self) -> None:
        self._effects: list[Callable[[], object]] = []

    def on_commit(self, effect: Callable[[], object]) -> None:
        """Call ``effect`` when the transaction commits, in the order in which they were given."""
        self._effects.append(effect)

    def commit(self) -> None:
        """Make everything since the last commit or rollback count."""
        effects, self._effects = self._effects, []
        for effect in effects:
            effect()

    def rollback(self) -> None:
        """Drop everything since the last commit or rollback."""
        self._effects = []

    def transaction(self: Self) -> Self:
        """This very object, for code that opens ``with connection.transaction():``."""
        return self

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.commit()
        else:
            self.rollback()


def write_in(connection: Any, write: Callable[[], object]) -> None:
    """Write when the connection's transaction commits; at once if it is no FakeTransaction.

    Raises TypeError for a real connection, which might roll back without a word.
    """
    if isinstance(connection, FakeTransaction):
        connection.on_commit(write)
    elif _is_real(connection):
        kind = type(connection)
        raise TypeError(
            f"run_task keeps checkpoints in memory, and cannot tell whether the transaction of a "
            f"{kind.__module__}.{kind.__qualname__} commits: have the task use a "
            "celery_awa.testing.FakeTransaction, or test it with a worker and a database"
        )
    else:
        write()


def _is_real(connection: Any) -> bool:
    packages = {base.__module__.partition(".")[0] for base in type(connection).__mro__}
    return not packages.isdisjoint(_REAL)
