"""Settings: every name, default and rule."""

from __future__ import annotations

import re
from dataclasses import fields
from decimal import Decimal
from typing import Any

import pytest

from celery_awa.settings import Settings, read_settings, unknown_settings

TIMES = (
    "write_interval",
    "heartbeat_interval",
    "stale_after",
    "claim_after",
    "connection_idle",
    "rescue_interval",
    "resend_after",
)
SIZES = ("max_progress_bytes", "max_envelope_bytes")
TEXTS = ("database_url", "schema", "slate_dir")
FLAGS = ("rescue_in_workers",)


def read(**values: Any) -> Settings:
    """Settings from a configuration in which only these are set, all of them allowed."""
    settings, problems = problems_of(**values)
    assert problems == []
    return settings


def problems_of(**values: Any) -> tuple[Settings, list[str]]:
    """Settings and problems of a configuration in which only these are set."""
    return read_settings({f"awa_{name}": value for name, value in values.items()}.get)


def assert_refused(name: str, value: Any, reason: str) -> None:
    """One line says why, and the default is used."""
    settings, problems = problems_of(**{name: value})
    default = getattr(Settings(), name)
    assert problems == [f"awa_{name} is {reason}; the default {default!r} is used"]
    assert settings == Settings()


def test_an_empty_configuration_gives_the_defaults() -> None:
    assert read() == Settings(
        database_url=None,
        schema="celery_awa",
        write_interval=2.0,
        heartbeat_interval=10.0,
        stale_after=30.0,
        claim_after=1.0,
        connection_idle=10.0,
        rescue_interval=10.0,
        rescue_in_workers=True,
        resend_after=3600.0,
        max_progress_bytes=65_536,
        max_envelope_bytes=262_144,
        slate_dir=None,
    )


def test_every_setting_is_held_to_a_rule() -> None:
    assert {field.name for field in fields(Settings)} == {*TIMES, *SIZES, *TEXTS, *FLAGS}


def test_what_is_set_is_read() -> None:
    wanted = {
        "database_url": "postgresql://db/app",
        "schema": "awa",
        "write_interval": 0.05,
        "heartbeat_interval": 1,
        "stale_after": 2,
        "claim_after": 0,
        "connection_idle": 0.5,
        "rescue_interval": 0.3,
        "rescue_in_workers": False,
        "resend_after": 600,
        "max_progress_bytes": 256,
        "max_envelope_bytes": 2,
        "slate_dir": "/dev/shm",
    }

    settings = read(**wanted)

    assert {name: getattr(settings, name) for name in wanted} == wanted
    assert all(isinstance(getattr(settings, name), float) for name in TIMES)


def test_none_is_unset() -> None:
    assert read(**dict.fromkeys([*TIMES, *SIZES, *TEXTS, *FLAGS])) == Settings()


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize(
    "value", ["10", True, float("nan"), float("inf"), -float("inf"), 1e9, [1], Decimal(1), 1j]
)
def test_a_time_is_a_number_of_seconds(name: str, value: Any) -> None:
    assert_refused(name, value, f"{value!r}; it must be a number of seconds")


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", ["10", True, 1.5, float("nan"), 10**9])
def test_a_size_is_a_whole_number_of_bytes(name: str, value: Any) -> None:
    assert_refused(name, value, f"{value!r}; it must be a whole number of bytes")


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", [0, 1, "False", "", [True]])
def test_a_flag_is_true_or_false(name: str, value: Any) -> None:
    assert_refused(name, value, f"{value!r}; it must be True or False")


@pytest.mark.parametrize("name", sorted({*TIMES, *SIZES} - {"claim_after"}))
@pytest.mark.parametrize("value", [0, -1])
def test_no_time_and_no_size_may_be_zero(name: str, value: int) -> None:
    shown = float(value) if name in TIMES else value
    settings, problems = problems_of(**{name: value})

    assert settings == Settings()
    assert len(problems) == 1
    assert re.match(
        rf"awa_{name} is ({value}|{shown}); it must be greater than 0; the default", problems[0]
    )


def test_progress_has_room_for_a_message() -> None:
    assert_refused("max_progress_bytes", 255, "255; it must be at least 256")


def test_the_claim_may_come_at_once_and_no_earlier() -> None:
    assert read(claim_after=0).claim_after == 0.0
    assert_refused("claim_after", -0.1, "-0.1; it must not be less than 0")


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("", "empty"),
        (" \n", "empty"),
        (b"postgresql://user:secret@host", "of type bytes"),
        (5, "of type int"),
    ],
)
def test_a_text_is_a_text_that_is_not_empty(name: str, value: Any, shown: str) -> None:
    assert_refused(name, value, f"{shown}; it must be a text that is not empty")


def test_every_wrong_value_is_told_and_the_others_are_used() -> None:
    settings, problems = problems_of(schema="", write_interval=-1, claim_after=0.5)

    assert [line.split()[0] for line in problems] == ["awa_schema", "awa_write_interval"]
    assert settings.claim_after == 0.5


@pytest.mark.parametrize(
    ("heartbeat_interval", "stale_after"), [(10, 19.9), (20, None), (None, 19), (0.2, 0.3)]
)
def test_an_attempt_may_miss_a_heartbeat_before_it_is_stale(
    heartbeat_interval: float | None, stale_after: float | None
) -> None:
    settings, problems = problems_of(heartbeat_interval=heartbeat_interval, stale_after=stale_after)

    assert settings.stale_after == 2 * settings.heartbeat_interval
    assert len(problems) == 1
    assert "at least twice awa_heartbeat_interval" in problems[0]
    assert f"{settings.stale_after:g} s is used" in problems[0]


def test_intervals_below_a_second_work() -> None:
    settings = read(heartbeat_interval=0.1, stale_after=0.2, write_interval=0.01)

    assert settings.stale_after == 0.2


def test_a_misspelt_name_is_told_with_the_likeliest_one_meant() -> None:
    names = ["awa_heartbeat_intervall", "awa_databse_url", "AWA_SHEMA", "awa_zzz"]

    assert unknown_settings(names) == [
        "unknown setting awa_databse_url; did you mean awa_database_url?",
        "unknown setting awa_heartbeat_intervall; did you mean awa_heartbeat_interval?",
        "unknown setting awa_shema; did you mean awa_schema?",
        "unknown setting awa_zzz",
    ]


def test_known_names_and_those_of_others_are_not_told() -> None:
    names = ["awa_schema", "AWA_STALE_AFTER", "broker_url", "awareness", "awa", "task_awa_x"]

    assert unknown_settings(names) == []
