"""The errors: their words, their data, and their way through Celery's pickle."""

from __future__ import annotations

import copy
import pickle

import pytest

from celery_awa import errors
from celery_awa.errors import (
    AwaError,
    InvalidProgress,
    LeaseLost,
    ProgressTooLarge,
    SettingsError,
    StoreUnavailable,
)

LEAVES = [
    kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, AwaError)
]
EXAMPLES = [
    *(kind() for kind in LEAVES if not issubclass(kind, InvalidProgress)),
    StoreUnavailable("the database did not confirm within 5 s"),
    InvalidProgress("metadata['a'][3]", "sets are not allowed"),
    ProgressTooLarge(70_000, 65_536),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_an_error_survives_pickle_with_its_data(error: AwaError, protocol: int) -> None:
    for again in (pickle.loads(pickle.dumps(error, protocol)), copy.copy(error)):
        assert type(again) is type(error)
        assert (str(again), again.args, vars(again)) == (str(error), error.args, vars(error))


def test_the_docstrings_first_line_is_the_message_where_none_is_given() -> None:
    assert str(LeaseLost()) == (
        "This attempt no longer owns its job: a newer attempt does, or the job has ended."
    )
    assert str(StoreUnavailable("no route to host")) == "no route to host"
    for kind in LEAVES:
        assert kind.__doc__


def test_without_docstrings_the_name_is_the_message() -> None:
    # As under python -OO.
    bare = type("BareError", (AwaError,), {})

    assert str(bare()) == "BareError"


def test_refused_progress_names_the_field_and_the_reason() -> None:
    error = InvalidProgress("metadata['a']", "sets are not allowed")

    assert (error.field, error.reason) == ("metadata['a']", "sets are not allowed")
    assert str(error) == "metadata['a']: sets are not allowed"


def test_too_large_progress_names_size_limit_and_setting() -> None:
    error = ProgressTooLarge(70_000, 65_536)

    assert (error.size, error.limit, error.field) == (70_000, 65_536, "progress")
    for word in ("70,000", "65,536", "awa_max_progress_bytes"):
        assert word in str(error)


def test_one_root_catches_all_and_bad_values_are_value_errors() -> None:
    assert all(issubclass(kind, AwaError) for kind in LEAVES)
    for kind in (SettingsError, InvalidProgress, ProgressTooLarge):
        assert issubclass(kind, ValueError)
