"""What can be broken. Each fault is one function of the site and its broker; it mends itself.

Those that take their time (an outage, a restart) return a function that ends them.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from tests.acceptance.workers import Worker
from tests.chaos.script import Fault
from tests.chaos.site import STALE_AFTER, Broker, Site

#: Seconds of an outage, and of a freeze that outlasts staleness.
OUTAGE, FREEZE = 1.2, 2 * STALE_AFTER
STOPPED_WITHIN = 30.0


@dataclass(frozen=True)
class Mending:
    """What ends a fault, and after how many seconds."""

    after: float
    do: Callable[[], None]


def strike(fault: Fault, site: Site, broker: Broker) -> Mending | None:
    """Break what the script says."""
    running = [worker for worker in broker.workers if worker.running]
    worker = running[int(fault.which * len(running))] if running else None
    on_worker = _ON_WORKERS.get(fault.name)
    if on_worker is not None:
        # An earlier fault of the round may have left none.
        return on_worker(worker, fault) if worker is not None else None
    return _ON_NETWORK[fault.name](site, broker)


def _child_killed(worker: Worker, fault: Fault) -> Mending | None:
    _signal_child(worker, fault, signal.SIGKILL)
    return None


def _child_frozen(worker: Worker, fault: Fault) -> Mending | None:
    pid = _signal_child(worker, fault, signal.SIGSTOP)
    return Mending(FREEZE, lambda: _signal(pid, signal.SIGCONT)) if pid else None


def _worker_killed(worker: Worker, fault: Fault) -> Mending:
    worker.kill()
    return Mending(0.3, worker.start)


def _worker_frozen(worker: Worker, fault: Fault) -> Mending:
    # Its children work on, and nobody says that they live.
    worker.kill(signal.SIGSTOP)
    return Mending(FREEZE, lambda: worker.kill(signal.SIGCONT))


def _worker_stopped_warm(worker: Worker, fault: Fault) -> Mending:
    worker.kill(signal.SIGTERM)
    return Mending(0.1, lambda: _start_when_stopped(worker))


def _worker_stopped_cold(worker: Worker, fault: Fault) -> Mending:
    worker.kill(signal.SIGQUIT)
    return Mending(0.1, lambda: _start_when_stopped(worker))


def _broker_cut(site: Site, broker: Broker) -> None:
    broker.proxy.reset()


def _broker_away(site: Site, broker: Broker) -> Mending:
    broker.proxy.refuse()
    return Mending(OUTAGE, broker.proxy.accept)


def _broker_silent(site: Site, broker: Broker) -> Mending:
    broker.proxy.swallow()
    return Mending(OUTAGE, broker.proxy.deliver)


def _database_cut(site: Site, broker: Broker) -> None:
    site.database_proxy.reset()


def _database_away(site: Site, broker: Broker) -> Mending:
    site.database_proxy.refuse()
    return Mending(OUTAGE, site.database_proxy.accept)


def _database_silent(site: Site, broker: Broker) -> Mending:
    site.database_proxy.swallow()
    return Mending(OUTAGE, site.database_proxy.deliver)


def _database_restarted(site: Site, broker: Broker) -> Mending:
    site.postgres.stop(immediate=True)
    return Mending(0.2, site.postgres.start)


def _backends_ended(site: Site, broker: Broker) -> None:
    site.postgres.terminate_backends()


_ON_WORKERS: dict[str, Callable[[Worker, Fault], Mending | None]] = {
    "child_killed": _child_killed,
    "child_frozen": _child_frozen,
    "worker_killed": _worker_killed,
    "worker_frozen": _worker_frozen,
    "worker_stopped_warm": _worker_stopped_warm,
    "worker_stopped_cold": _worker_stopped_cold,
}
_ON_NETWORK: dict[str, Callable[[Site, Broker], Mending | None]] = {
    "broker_cut": _broker_cut,
    "broker_away": _broker_away,
    "broker_silent": _broker_silent,
    "database_cut": _database_cut,
    "database_away": _database_away,
    "database_silent": _database_silent,
    "database_restarted": _database_restarted,
    "backends_ended": _backends_ended,
}


def _start_when_stopped(worker: Worker) -> None:
    # An earlier fault of the round may have frozen it.
    worker.kill(signal.SIGCONT)
    worker.process.wait(STOPPED_WITHIN)
    worker.start()


def _signal_child(worker: Worker, fault: Fault, sig: int) -> int | None:
    children = worker.children()
    if not children:
        return None
    pid = children[int(fault.which * 97) % len(children)]
    _signal(pid, sig)
    return pid


def _signal(pid: int, sig: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, sig)
