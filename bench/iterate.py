"""What a loop over iterate() costs an item, beside the plain loop and one set_progress an item.

Real workers, one with a pool of processes and one of threads. All ways are timed in the same task,
in turns. Exits with 1 if iterate costs an item more than two calls of set_progress.
"""

from __future__ import annotations

import sys
from statistics import median

from workers import parser, services, worker

#: How many calls of set_progress an item of iterate may cost.
PROMISED = 2.0
ROUNDS, ITEMS = 40, 10_000
#: Seconds within which a pool must have measured.
PATIENCE = 120.0


def main() -> int:
    arguments = parser(__doc__).parse_args()
    with services(arguments.redis):
        ratios = [_measure(pool) for pool in ("prefork", "threads")]
    if max(ratios) > PROMISED:
        print(f"iterate costs an item more than {PROMISED:g} set_progress", file=sys.stderr)
        return 1
    return 0


def _measure(pool: str) -> float:
    """Print the medians of one pool; answers what iterate costs in calls of set_progress."""
    with worker(pool, concurrency=2) as measured:
        measured.loop.delay(2, ITEMS).get(timeout=PATIENCE)  # to warm up
        found = measured.loop.delay(ROUNDS, ITEMS).get(timeout=PATIENCE)
    costs = {name: median(seconds) * 1e6 for name, seconds in found.items()}
    plain = costs.pop("plain")
    call = costs["set_progress"] - plain
    print(f"{pool}: median of {ROUNDS} rounds, over a plain loop of {plain:.3f} µs an item")
    for name, cost in costs.items():
        print(f"  {name:<14}{cost - plain:8.2f} µs an item  {(cost - plain) / call:6.2f} calls")
    return (costs["iterate"] - plain) / call


if __name__ == "__main__":
    sys.exit(main())
