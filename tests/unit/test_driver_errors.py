"""What each kind of the driver's errors becomes at the store's border."""

from __future__ import annotations

import psycopg
import pytest
from psycopg import errors

from celery_awa.errors import (
    AwaError,
    RowLocked,
    SchemaError,
    SettingsError,
    StoreRefused,
    StoreUnavailable,
)
from celery_awa.store.connection import check_url, translate, translated

NEITHER = "(it is neither postgresql://… nor key=value pairs);"
MEANINGS: dict[type[psycopg.Error], type[AwaError]] = {
    errors.LockNotAvailable: RowLocked,
    errors.DeadlockDetected: RowLocked,
    errors.SerializationFailure: RowLocked,
    errors.CheckViolation: StoreRefused,
    errors.UniqueViolation: StoreRefused,
    errors.RaiseException: StoreRefused,
    errors.UntranslatableCharacter: StoreRefused,
    errors.NumericValueOutOfRange: StoreRefused,
    errors.UndefinedTable: SchemaError,
    errors.UndefinedColumn: SchemaError,
    errors.UndefinedFunction: SchemaError,
    errors.InvalidSchemaName: SchemaError,
    errors.InsufficientPrivilege: SchemaError,
    errors.AdminShutdown: StoreUnavailable,
    errors.QueryCanceled: StoreUnavailable,
    errors.ReadOnlySqlTransaction: StoreUnavailable,
    errors.TooManyConnections: StoreUnavailable,
    errors.DiskFull: StoreUnavailable,
    errors.IdleInTransactionSessionTimeout: StoreUnavailable,
    errors.InvalidPassword: StoreUnavailable,
    errors.ConnectionFailure: StoreUnavailable,
    errors.DivisionByZero: StoreRefused,
    errors.FeatureNotSupported: StoreRefused,
    errors.NoDataFound: StoreRefused,
    errors.StatementTooComplex: StoreRefused,
    psycopg.InterfaceError: StoreUnavailable,
    psycopg.OperationalError: StoreUnavailable,
}


@pytest.mark.parametrize("kind", MEANINGS, ids=lambda kind: kind.__name__)
def test_a_drivers_error_becomes_ours_with_its_cause_and_first_line(
    kind: type[psycopg.Error],
) -> None:
    cause = kind("what happened\nDETAIL: more of it")

    with pytest.raises(AwaError) as caught, translated():
        raise cause

    assert type(caught.value) is MEANINGS[kind]
    assert str(caught.value).startswith("what happened")
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is cause


def test_a_code_of_a_triggers_own_is_of_its_row() -> None:
    class Own(psycopg.DatabaseError):
        sqlstate = "AW001"

    assert type(translate(Own("not this row"))) is StoreRefused


def test_an_error_without_words_is_told_by_its_name() -> None:
    assert str(translate(errors.AdminShutdown())) == "AdminShutdown"


def test_a_lacking_right_says_where_the_rights_are_listed() -> None:
    error = translate(errors.InsufficientPrivilege("permission denied for table jobs_hot"))

    assert str(error).startswith("permission denied for table jobs_hot: docs/deploy.md lists")


def test_text_that_is_no_unicode_is_refused() -> None:
    with pytest.raises(StoreRefused, match="no Unicode"), translated():
        "\ud800".encode()


def test_what_is_not_the_drivers_passes_untouched() -> None:
    with pytest.raises(ZeroDivisionError), translated():
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("mysql://user:secret@host/database", NEITHER),
        ("postgresql//user:secret@host/database", NEITHER),
        ("postgresql://user:%zzsecret@host/database", "invalid percent-encoded token"),
        ("postgresql://user:sec ret@host/database", "unexpected spaces found"),
        ('postgresql://user:"secret%zz"@host/database', "invalid percent-encoded token"),
        ("postgresql://user:secret@[::1/database", "end of string reached"),
        ("mysql://user:secret@host/database?a=1", NEITHER),
        ("host=host password=secret secret", NEITHER),
        ("secret=1", "(invalid connection option);"),
        ("postgresql://host/database?secret=1", "(invalid URI query parameter);"),
    ],
)
def test_a_url_that_cannot_be_read_is_told_without_its_password(url: str, reason: str) -> None:
    with pytest.raises(SettingsError) as caught:
        check_url(url)

    text = str(caught.value)
    assert reason in text
    assert "postgresql://user:password@host:5432/database" in text
    assert "secret" not in text
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
