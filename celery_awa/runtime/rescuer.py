"""Runs on the rescue thread of a worker, or in the command ``rescue``: lost and unsent jobs.

Only this thread talks to the broker and to the result backend, so that they never hold up a
heartbeat; what it wants of the database it asks the database thread. A pass takes first and
publishes then: whoever dies in between leaves the job unsent, and another pass publishes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass

from ..errors import AwaError, StoreUnavailable
from ..model import Thresholds
from ..settings import Settings
from .contact import Contact
from .courier import Courier
from .database_thread import DatabaseThread
from .ending import error_text
from .lost_jobs import LostJobs
from .periodic_thread import PeriodicThread
from .rescue_part import Means, Part
from .trouble import Trouble, logger
from .unsent_jobs import UnsentJobs


@dataclass(frozen=True, slots=True)
class RescueCounts:
    """How many jobs one pass dealt with, and how.

    ``requeued``, ``failed`` and ``cancelled`` were lost, ``failed`` also those that cannot be
    sent; ``settled`` turned out to be over; of ``sent`` the message was published, of ``told``
    the end. ``postponed`` are left to a later pass, since database, broker or backend could do
    nothing for them.
    """

    requeued: int = 0
    failed: int = 0
    cancelled: int = 0
    settled: int = 0
    sent: int = 0
    told: int = 0
    postponed: int = 0


class Rescuer:
    """Takes lost jobs and publishes what is unsent, in one pass after the other."""

    def __init__(
        self, database: DatabaseThread, courier: Courier, settings: Settings, trouble: Trouble
    ) -> None:
        self._trouble = trouble
        self._thread = PeriodicThread(
            self.run_once,
            settings.rescue_interval,
            trouble,
            name="celery-awa-rescue",
            soon=lambda: self.in_doubt,
        )
        thresholds = Thresholds(settings.stale_after, 2 * settings.heartbeat_interval)
        self._means = Means(
            database, courier, trouble, lambda: self._thread.over, Contact(thresholds)
        )
        self._lost = LostJobs(thresholds)
        self._unsent = UnsentJobs(database, settings.resend_after)
        self._totals: Counter[str] = Counter()

    def start(self) -> None:
        """Pass from time to time, on a thread of its own."""
        self._thread.start()

    def wake(self) -> None:
        """Pass now. Does not wait; any thread, a signal's handler too."""
        self._thread.wake()

    def stop(self, timeout: float) -> bool:
        """Leave off after the job at hand; whether that was within ``timeout`` seconds.

        While the database is away it is not waited for: nothing that it still does can be noted.
        """
        return self._thread.stop(timeout if self._means.database.answering else 0.0)

    @property
    def in_doubt(self) -> bool:
        """Whether the last pass left silent attempts the time to come back from an outage."""
        return self._lost.in_doubt

    def totals(self) -> RescueCounts:
        """What its passes did in all; any thread."""
        return RescueCounts(**self._totals.copy())

    def run_once(self) -> RescueCounts:
        """One pass, on this thread. Raises StoreUnavailable where the database is away."""
        counts: Counter[str] = Counter()
        try:
            for carry_out in (self._lost.rescue, self._unsent.publish):
                self._carry_out(carry_out, Part(self._means, counts))
        finally:
            # What was done before the database went away, too.
            self._totals += counts
            _log(RescueCounts(**counts))
        return RescueCounts(**counts)

    def _carry_out(self, carry_out: Callable[[Part], None], part: Part) -> None:
        """One part. What goes wrong with it keeps the other from nothing."""
        try:
            carry_out(part)
        except StoreUnavailable:
            raise
        except Exception as exc:
            self._trouble.warn(
                "rescue",
                "celery-awa: the rescuer leaves a part of its pass to the next: %s",
                error_text(exc),
                exc_info=None if isinstance(exc, AwaError) else exc,
            )


def _log(counts: RescueCounts) -> None:
    """One line where anything was done. What is postponed has had its warning."""
    done = {name: count for name, count in asdict(counts).items() if count}
    if done.keys() - {"postponed"}:
        told = ", ".join(f"{count} {name}" for name, count in done.items())
        logger.info("celery-awa: jobs rescued or sent: %s", told)
