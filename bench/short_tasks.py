"""What AwaTask costs a task that is short and reports nothing: no-op tasks a second.

One prefork worker on Redis. In turns, with messages that wait in a queue before the worker is
told to take them, so that the time to send them does not count.
"""

from __future__ import annotations

import sys
from statistics import median
from types import ModuleType
from typing import Any

from workers import parser, services, worker

ROUNDS, TASKS, CONCURRENCY = 10, 1_000, 2
#: Seconds within which the messages of a round must have been taken.
PATIENCE = 60.0


def main() -> int:
    arguments = parser(__doc__).parse_args()
    with services(arguments.redis), worker("prefork", CONCURRENCY) as measured:
        rates = _measure(measured)
    print(f"no-op tasks a second, prefork with {CONCURRENCY} processes on Redis")
    for name, found in rates.items():
        print(f"  {name:<8}{median(found):8.0f}  (median of {ROUNDS} rounds of {TASKS:,})")
    ratios = [ours / plain for ours, plain in zip(rates["AwaTask"], rates["Task"], strict=True)]
    lowest, highest = min(ratios), max(ratios)
    print(f"AwaTask / Task: {median(ratios):.3f} (of the rounds {lowest:.2f} to {highest:.2f})")
    return 0


def _measure(measured: ModuleType) -> dict[str, list[float]]:
    kinds = {"Task": measured.plain, "AwaTask": measured.ours}
    rates: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(-1, ROUNDS):
        # The first one warms up; then each goes first every other time.
        for name in sorted(kinds, reverse=bool(number % 2)):
            rate = _tasks_a_second(measured, kinds[name], f"{name}-{number}")
            if number >= 0:
                rates[name].append(rate)
    return rates


def _tasks_a_second(measured: ModuleType, task: Any, queue: str) -> float:
    app = measured.app
    first = measured.clock.apply_async(queue=queue)
    with app.producer_or_acquire() as producer:
        for _ in range(TASKS):
            task.apply_async(queue=queue, producer=producer)
    last = measured.clock.apply_async(queue=queue)
    app.control.add_consumer(queue)
    seconds = last.get(timeout=PATIENCE) - first.get(timeout=PATIENCE)
    app.control.cancel_consumer(queue)
    return TASKS / seconds


if __name__ == "__main__":
    sys.exit(main())
