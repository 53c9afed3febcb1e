"""An outage longer than ``awa_stale_after``: who lives through it is not taken for lost."""

from __future__ import annotations

import time
from contextlib import closing

import pytest

from celery_awa.errors import StoreUnavailable
from celery_awa.model import Envelope
from celery_awa.runtime.rescuer import RescueCounts, Rescuer
from celery_awa.runtime.trouble import Trouble
from tests.fake_courier import FakeCourier
from tests.faults import Proxy
from tests.runtime_parts import StartProcess, claimed, settings
from tests.waiting import eventually

from .jobs import Database

pytest_plugins = ["tests.integration.stores", "tests.integration.runtime"]

Proxied = tuple[Proxy, str]

BEATING = {"write_interval": 0.1, "heartbeat_interval": 0.2, "stale_after": 20.0}
REQUEUE = {"lost_policy": "requeue", "envelope": Envelope(b"message", whole=True)}


@pytest.mark.parametrize("policy", ["requeue", "fail"])
def test_attempts_that_lived_through_a_long_outage_keep_their_jobs(
    proxied: Proxied, start_process: StartProcess, private_url: str, policy: str
) -> None:
    proxy, url = proxied
    working, rescuing = (start_process(url, **BEATING) for _ in range(2))
    one = claimed(working, **(REQUEUE | {"lost_policy": policy}))
    rescuer = Rescuer(rescuing.database, FakeCourier(), settings(**BEATING), Trouble())
    assert rescuer.run_once() == RescueCounts()
    proxy.turn_away()
    with pytest.raises(StoreUnavailable):
        rescuer.run_once()
    eventually(lambda: not working.database.answering)
    with closing(Database(private_url)) as look:
        look.execute("UPDATE {schema}.jobs_hot SET heartbeat_at = now() - interval '1 minute'")
        # The rescuer is the first who comes back.
        working.database._breaker.retry_at = time.monotonic() + 4.0
        proxy.accept()
        rescuing.database._breaker.retry_at = 0.0
        assert rescuer.run_once() == RescueCounts()
        assert rescuer.in_doubt
        one.set_progress(60)
        eventually(lambda: not one.pending)
        assert rescuer.run_once() == RescueCounts()
        assert not rescuer.in_doubt
        assert look.row()["state"] == "running"
    assert not one.lost
