"""What reporting costs in a running task: set_progress beside Task.update_state on Redis.

Real workers, one with a pool of processes and one of threads. All ways to report are timed in
the same task, in turns. Exits with 1 if set_progress is not at least 100 times cheaper.
"""

from __future__ import annotations

import sys
from statistics import median

from workers import parser, services, worker

#: How many times cheaper set_progress is promised to be.
PROMISED = 100
ROUNDS, CALLS, SLOW_CALLS = 60, 2_000, 20
#: Seconds within which a pool must have measured.
PATIENCE = 120.0


def main() -> int:
    arguments = parser(__doc__).parse_args()
    with services(arguments.redis):
        ratios = [_measure(pool) for pool in ("prefork", "threads")]
    if min(ratios) < PROMISED:
        print(f"set_progress is less than {PROMISED} times cheaper", file=sys.stderr)
        return 1
    return 0


def _measure(pool: str) -> float:
    """Print the medians of one pool; answers how many times cheaper set_progress is."""
    with worker(pool, concurrency=2) as measured:
        # To warm up: the first calls of everything.
        measured.report.delay(2, CALLS, SLOW_CALLS).get(timeout=PATIENCE)
        found = measured.report.delay(ROUNDS, CALLS, SLOW_CALLS).get(timeout=PATIENCE)
    costs = {name: median(seconds) * 1e6 for name, seconds in found.items()}
    slow = costs["update_state"]
    print(f"{pool}: median of {ROUNDS} rounds")
    for name, cost in costs.items():
        cheaper = f"{slow / cost:6.0f} times cheaper" if cost < slow else ""
        print(f"  {name:<16}{cost:10.2f} µs a call{cheaper}")
    return slow / costs["set_progress"]


if __name__ == "__main__":
    sys.exit(main())
