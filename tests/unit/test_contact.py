"""Whether silent attempts are lost, or a database was away that would have heard them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from celery_awa.errors import StoreUnavailable
from celery_awa.model import Envelope, Thresholds
from celery_awa.runtime import contact
from celery_awa.runtime.breaker import LONGEST_PAUSE
from celery_awa.runtime.contact import RETURN_WITHIN, SHORT_GAP, Contact
from celery_awa.runtime.periodic_thread import SOON
from celery_awa.runtime.rescuer import RescueCounts, Rescuer
from celery_awa.runtime.trouble import Trouble
from celery_awa.settings import Settings
from celery_awa.store.connection import ANSWER_WITHIN
from tests.fake_courier import FakeCourier
from tests.fake_store import FakeDatabase, Row
from tests.runtime_parts import Clock, MakeThread, described, new_token, settings

STALE_AFTER, HEARTBEAT = 30.0, 10.0
DEFAULTS = Thresholds(STALE_AFTER, 2 * HEARTBEAT)
REQUEUE = {"lost_policy": "requeue", "envelope": Envelope(b"message", whole=True)}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch, contact)


def passes(one: Contact, clock: Clock, interval: float, seconds: float) -> list[bool]:
    """What a rescuer is told that asks so often for so long."""
    told = []
    for _ in range(math.ceil(seconds / interval)):
        clock.pass_by(interval)
        one.answered()
        told.append(one.silence_counts)
    return told


def test_silence_counts_once_everybody_had_the_time_to_come_back(clock: Clock) -> None:
    one = Contact(DEFAULTS)
    one.answered()
    assert not one.silence_counts
    assert passes(one, clock, 1.0, RETURN_WITHIN) == [False] * 11 + [True]
    assert all(passes(one, clock, 10.0, 300.0))  # as awa_rescue_interval has it


@pytest.mark.parametrize("gap", [15.1, 300.0])
def test_after_a_gap_that_may_hide_an_outage_it_begins_anew(clock: Clock, gap: float) -> None:
    one = Contact(DEFAULTS)
    assert passes(one, clock, 10.0, 30.0)[-1]
    clock.pass_by(gap)
    one.answered()
    assert not one.silence_counts
    assert passes(one, clock, 1.0, 11.0) == [False] * 11
    assert passes(one, clock, 1.0, 1.0) == [True]


def test_after_a_failure_it_begins_anew(clock: Clock) -> None:
    one = Contact(DEFAULTS)
    assert passes(one, clock, 10.0, 30.0)[-1]
    one.broke()
    assert passes(one, clock, 1.0, 12.0) == [False] * 12
    assert passes(one, clock, 1.0, 1.0) == [True]


def test_where_heartbeats_come_quickly_less_is_waited_for(clock: Clock) -> None:
    one = Contact(Thresholds(1.0, 0.5))
    one.answered()
    # As the passes come that are in doubt.
    assert passes(one, clock, SOON, 3.0) == [True] * 3


def test_the_times_fit_those_of_who_comes_back() -> None:
    # On a silent connection, or while a new one is opened (5 s), and after the pause then.
    assert RETURN_WITHIN > ANSWER_WITHIN
    assert RETURN_WITHIN > 5 + 1.5 * LONGEST_PAUSE
    # The passes that are in doubt leave no gap.
    assert SOON < SHORT_GAP
    # By default the passes leave no gap, and a gap hides no outage that counts.
    defaults = Settings()
    assert defaults.rescue_interval < defaults.stale_after / 2
    longest = defaults.heartbeat_interval + defaults.stale_after / 2 + 1.5 * LONGEST_PAUSE
    assert longest < defaults.stale_after


# The rescuer.


@pytest.fixture
def rescuer(make_thread: MakeThread, clock: Clock) -> Rescuer:
    changed = settings(stale_after=STALE_AFTER, heartbeat_interval=HEARTBEAT)
    return Rescuer(make_thread(), FakeCourier(), changed, Trouble())


@pytest.fixture
def pass_by(clock: Clock, database: FakeDatabase) -> Callable[[float], None]:
    """Time that passes here and there."""

    def pass_by(seconds: float) -> None:
        clock.pass_by(seconds)
        database.pass_by(seconds)

    return pass_by


def claimed(database: FakeDatabase, task_id: str) -> Row:
    database.open().claim(described(new_token(), task_id, **REQUEUE))
    return database.rows[task_id]


def test_who_comes_back_from_an_outage_in_time_is_not_taken_and_who_does_not_is(
    rescuer: Rescuer, database: FakeDatabase, pass_by: Callable[[float], None]
) -> None:
    lives, died = claimed(database, "lives"), claimed(database, "died")
    assert rescuer.run_once() == RescueCounts()
    assert not rescuer.in_doubt
    database.go_away()
    pass_by(60.0)
    with pytest.raises(StoreUnavailable):
        rescuer.run_once()
    database.come_back()
    rescuer._means.database._breaker.retry_at = 0.0
    assert rescuer.run_once() == RescueCounts()
    assert rescuer.in_doubt
    pass_by(4.0)
    database.open().heartbeat([lives.lease])
    assert rescuer.run_once() == RescueCounts()
    assert rescuer.in_doubt
    pass_by(9.0)
    assert rescuer.run_once() == RescueCounts(requeued=1, sent=1)
    assert not rescuer.in_doubt
    assert (lives.rescues, died.rescues) == (0, 1)


def test_who_is_known_to_be_dead_is_taken_at_once(
    rescuer: Rescuer, database: FakeDatabase, pass_by: Callable[[float], None]
) -> None:
    """By a rescuer that has just begun, too, and whatever else is in doubt."""
    silent, dead = claimed(database, "silent"), claimed(database, "dead")
    pass_by(60.0)
    database.open().forsake([dead.lease])
    assert rescuer.run_once() == RescueCounts(requeued=1, sent=1)
    assert (silent.rescues, dead.rescues) == (0, 1)
    assert rescuer.in_doubt


def test_in_an_undisturbed_site_nothing_is_waited_for(
    rescuer: Rescuer, database: FakeDatabase, pass_by: Callable[[float], None]
) -> None:
    row = claimed(database, "died")
    passed = 0
    while not row.rescues:
        rescuer.run_once()
        assert not rescuer.in_doubt
        pass_by(10.0)
        passed += 10
    assert passed - 10 == STALE_AFTER
