"""Runs on the rescue thread: takes jobs whose attempt died, or may run no longer."""

from __future__ import annotations

from ..errors import StoreUnavailable
from ..model import LostJob, Thresholds
from .rescue_part import PAGE, Part

#: Under these nobody is stale by silence: only who is known to be dead, or past his time, is lost.
SILENCE_DOES_NOT_COUNT = Thresholds(1e9, 1e9)


class LostJobs:
    """Where the look at them goes on: after the last one that was looked at.

    ``in_doubt``: some may be silent only because of an outage, and get the time to come back.
    """

    def __init__(self, thresholds: Thresholds) -> None:
        self.in_doubt = False
        self._thresholds = thresholds
        self._after_id = 0

    def rescue(self, part: Part) -> None:
        """Page through them all. A part that must leave off goes on there in the next pass."""
        self.in_doubt = False
        found = part.ask(lambda store: store.lost(self._thresholds, limit=1))
        if found:
            self.in_doubt = not part.silence_counts
            self._rescue(part, SILENCE_DOES_NOT_COUNT if self.in_doubt else self._thresholds)

    def _rescue(self, part: Part, thresholds: Thresholds) -> None:
        while not part.over and not part.gave_up("result"):
            after_id = self._after_id
            page = part.ask(
                lambda store, after_id=after_id: store.lost(  # type: ignore[misc]  # inferred
                    thresholds, after_id=after_id, limit=PAGE
                )
            )
            self._take(self._without_result(page, part), part, thresholds)
            if not page or (len(page) < PAGE and self._after_id == page[-1].lease.job_id):
                self._after_id = 0
                return

    def _without_result(self, page: list[LostJob], part: Part) -> list[LostJob]:
        """Those whose run is not over by the word of the result backend; the others are ended."""
        left = []
        for job in page:
            if part.over or part.gave_up("result"):
                break
            with part.alone(job):
                found = part.result(job)
                if found is None:
                    left.append(job)
                else:
                    part.counts["settled"] += part.settle(job, found)
            self._after_id = job.lease.job_id
        return left

    def _take(self, jobs: list[LostJob], part: Part, thresholds: Thresholds) -> None:
        """Requeue or fail them in one statement; one that is refused is found by halves."""
        if len(jobs) == 1:
            with part.alone(jobs[0]):
                self._take_all(jobs, part, thresholds)
        elif jobs:
            try:
                self._take_all(jobs, part, thresholds)
            except StoreUnavailable:
                raise
            except Exception:
                half = len(jobs) // 2
                self._take(jobs[:half], part, thresholds)
                self._take(jobs[half:], part, thresholds)

    def _take_all(self, jobs: list[LostJob], part: Part, thresholds: Thresholds) -> None:
        leases = [job.lease for job in jobs]
        taken = part.ask(lambda store: store.rescue(leases, thresholds))
        part.counts.update(rescue.value for rescue in taken.values())
