"""What a round does, drawn from a seed: the same seed draws the same script."""

from __future__ import annotations

import random
from dataclasses import dataclass

BROKERS = ("redis", "amqp")
#: Policies of the tasks in a round; the names are those of the tasks.
TASKS = ("late", "late", "late", "early", "early", "once")
#: What can be broken, and how often in proportion; the names are those of functions in faults.py.
FAULTS = {
    "child_killed": 4,
    "child_frozen": 1,
    "worker_killed": 5,
    "worker_frozen": 2,
    "worker_stopped_warm": 2,
    "worker_stopped_cold": 2,
    "broker_cut": 2,
    "broker_away": 1,
    "broker_silent": 1,
    "database_cut": 2,
    "database_away": 2,
    "database_silent": 1,
    "database_restarted": 1,
    "backends_ended": 1,
}
#: Seconds within which a round's faults strike.
MOMENTS = (0.1, 2.5)


@dataclass(frozen=True)
class Fault:
    """One thing that is broken ``at`` seconds into the round; ``which`` picks its victim."""

    name: str
    at: float
    which: float

    def __str__(self) -> str:
        return f"{self.name.replace('_', ' ')} at {self.at:.1f} s"


@dataclass(frozen=True)
class Job:
    """One task that is sent."""

    name: str
    steps: int
    pause: float
    retry_at: int | None


@dataclass(frozen=True)
class Round:
    """One round's script."""

    number: int
    broker: str
    jobs: tuple[Job, ...]
    faults: tuple[Fault, ...]

    @property
    def breaks_database(self) -> bool:
        """Whether an attempt may be unable to ask at its end whether it still has its lease."""
        return any(fault.name.startswith(("database", "backends")) for fault in self.faults)

    def __str__(self) -> str:
        return f"round {self.number}, {self.broker}: {', '.join(map(str, self.faults))}"


def draw(seed: int, number: int) -> Round:
    """The script of one round; rounds do not depend on one another."""
    # Text, since the random module takes the hash of anything else but numbers.
    chance = random.Random(f"{seed}/{number}")
    faults = [_fault(chance) for _ in range(chance.choice((1, 1, 2, 3)))]
    return Round(
        number=number,
        broker=BROKERS[number % len(BROKERS)],
        jobs=tuple(_job(chance, name) for name in TASKS),
        faults=tuple(sorted(faults, key=lambda fault: fault.at)),
    )


def _fault(chance: random.Random) -> Fault:
    (name,) = chance.choices(list(FAULTS), weights=list(FAULTS.values()))
    return Fault(name, at=round(chance.uniform(*MOMENTS), 2), which=chance.random())


def _job(chance: random.Random, name: str) -> Job:
    steps = chance.randint(4, 10)
    retry_at = chance.randint(2, steps - 1) if chance.random() < 0.3 else None
    return Job(name, steps, pause=round(chance.uniform(0.05, 0.25), 3), retry_at=retry_at)
