"""What may be reported, what becomes of it, and what is refused at the call."""

from __future__ import annotations

import enum
import json
import math
import pickle
import re
from collections import OrderedDict, namedtuple
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from types import MappingProxyType
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_awa.errors import InvalidProgress, ProgressTooLarge
from celery_awa.progress import ProgressBuffer

NAN, INFINITY = float("nan"), float("inf")


def stored(value: Any) -> Any:
    """What a metadata value becomes."""
    buffer = ProgressBuffer()
    buffer.update_metadata({"v": value})
    return json.loads(buffer.snapshot().json or "")["metadata"]["v"]


def reported(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """What one set_progress becomes."""
    buffer = ProgressBuffer()
    buffer.set_progress(*args, **kwargs)
    return buffer.value() or {}


def refusal(value: Any) -> InvalidProgress:
    """The error that a metadata value meets."""
    buffer = ProgressBuffer()
    with pytest.raises(InvalidProgress) as caught:
        buffer.update_metadata({"v": value})
    assert buffer.generation == 0
    return caught.value


def without_address(value: Any) -> str:
    """An id that is the same in each process, as pytest-xdist has it."""
    return re.sub(r" object at 0x\w+| at 0x\w+", "", ascii(value))[:40]


# Types as numpy and pandas have them, without either.
class Float64(float):
    """A float that says something else of itself."""

    def __repr__(self) -> str:
        return "np.float64(...)"

    __str__ = __repr__


class Int64:
    def __index__(self) -> int:
        return 7


class Array:
    def __index__(self) -> int:
        raise TypeError("only integer scalar arrays can be converted to a scalar index")


class NotATime(datetime):
    def __eq__(self, other: object) -> bool:
        return False

    def __ne__(self, other: object) -> bool:
        return True

    __hash__ = datetime.__hash__


class Word(str):
    __slots__ = ()

    def __str__(self) -> str:
        return "something else"


class Apart(str):
    """A string that a dict keeps beside its equal."""

    __slots__ = ()

    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        return self is other


class Colour(enum.Enum):
    RED = "red"
    WHEN = date(2024, 1, 2)
    BAD = frozenset({1})


class Size(str, enum.Enum):
    SMALL = "s"


class Level(enum.IntEnum):
    HIGH = 3


@dataclass
class Row:
    id: int
    when: date
    more: Any = None


Point = namedtuple("Point", "x y")


# --- percent ---


@pytest.mark.parametrize(
    ("given_percent", "percent"),
    [
        (0, 0), (50, 50), (100, 100), (101, 100), (-1, 0), (10**40, 100),
        (99.9, 99), (0.1, 0), (1e9, 100), (-0.5, 0), (1e300, 100), (50.0, 50),
        (Float64(12.7), 12), (Int64(), 7), (Level.HIGH, 3), (None, None),
    ],
)  # fmt: skip
def test_percent_is_clamped_and_rounded_down(given_percent: Any, percent: int | None) -> None:
    assert reported(given_percent) == {"percent": percent}


@pytest.mark.parametrize(
    "percent",
    [True, False, "50", b"5", NAN, INFINITY, -INFINITY, Float64("nan"), Decimal(5), [5], Array()],
)
def test_a_percent_that_is_no_finite_number_is_refused(percent: Any) -> None:
    buffer = ProgressBuffer()
    with pytest.raises(InvalidProgress) as caught:
        buffer.set_progress(percent, "x")

    assert caught.value.field == "percent"
    assert buffer.value() is None


# --- current and total ---


@pytest.mark.parametrize(
    ("current", "total", "percent"),
    [
        (5, 10, 50), (0, 10, 0), (10, 10, 100), (11, 10, 100), (2, 3, 66), (999, 1000, 99),
        (29.0, 100.0, 29), (1.5, 3, 50), (5, 0, None), (0, 0, None), (5, None, None),
        (None, 10, None), (2**64 - 2, 2**64 - 1, 99), (math.nextafter(0.3, 0), 0.3, 99),
        (1e308, 1.5e308, 66), (1, 1.5e308, 0), (5e-324, 1e-323, 50), (1.7e308, 5e-324, 100),
        (2**63 - 1, 2.0**63, 99), (2.0**63, 2**63 + 1, 99),
    ],
)  # fmt: skip
def test_percent_is_worked_out_from_current_and_total(
    current: Any, total: Any, percent: int | None
) -> None:
    report = reported(current=current, total=total)

    assert report.pop("percent") == percent
    assert report == {
        name: value for name, value in (("current", current), ("total", total)) if value is not None
    }


@given(st.integers(0, 2**64 - 1), st.integers(1, 2**64 - 1))
def test_the_share_of_integers_is_exact(current: int, total: int) -> None:
    assert reported(current=current, total=total)["percent"] == min(100, 100 * current // total)


def test_a_percent_that_is_given_wins_over_current_and_total() -> None:
    assert reported(7, current=5, total=10) == {"percent": 7, "current": 5, "total": 10}
    assert reported(None, current=5, total=10) == {"percent": None, "current": 5, "total": 10}


@pytest.mark.parametrize("name", ["current", "total"])
@pytest.mark.parametrize("value", [-1, -0.5, NAN, INFINITY, True, "5", Decimal(5), 2**64, [1]])
def test_a_count_that_is_no_finite_number_from_zero_is_refused(name: str, value: Any) -> None:
    buffer = ProgressBuffer()
    with pytest.raises(InvalidProgress) as caught:
        buffer.set_progress(**{"current": 1, "total": 2, name: value})

    assert caught.value.field == name
    assert buffer.value() is None


def test_a_report_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidProgress, match="nothing given"):
        ProgressBuffer().set_progress()


# --- text ---


@pytest.mark.parametrize(
    "message", ["a\x00b", "\x00", "é\x00", "\ud800", "x\udfff", 5, b"x", ["x"]]
)
def test_a_message_that_is_no_storable_text_is_refused(message: Any) -> None:
    buffer = ProgressBuffer()
    with pytest.raises(InvalidProgress) as caught:
        buffer.set_progress(5, message)

    assert caught.value.field == "message"
    assert buffer.value() is None


TEXTS = [
    "", "x", 'quote " backslash \\ tab \t line \n', "\x01\x1f\x7f", "\\u0000", "\\ud800",
    "🎉", "👩‍👩‍👧", "שלום‏", "\u2028", "\uffff", "</script>",
]  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_exactly(text: str) -> None:
    assert reported(5, text)["message"] == text
    assert stored(text) == text
    assert stored({text: text}) == {text: text}


def test_a_message_of_a_str_subclass_becomes_plain() -> None:
    assert reported(5, Word("word"))["message"] == "word"
    assert reported(5, Size.SMALL)["message"] == "s"


# --- values with a documented form ---


@pytest.mark.parametrize(
    ("value", "form"),
    [
        (datetime(2024, 1, 2, 3, 4, 5), "2024-01-02T03:04:05"),
        (datetime(2024, 1, 2, 3, 4, 5, 678), "2024-01-02T03:04:05.000678"),
        (datetime(2024, 1, 2, tzinfo=timezone.utc), "2024-01-02T00:00:00+00:00"),
        (
            datetime(2024, 1, 2, tzinfo=timezone(timedelta(hours=-5, minutes=-30))),
            "2024-01-02T00:00:00-05:30",
        ),
        (date(2024, 1, 2), "2024-01-02"),
        (time(3, 4, 5), "03:04:05"),
        (UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (Decimal("1.10"), "1.10"),
        (Decimal("1E+5"), "1E+5"),
        (Colour.RED, "red"),
        (Colour.WHEN, "2024-01-02"),
        (Size.SMALL, "s"),
        (Level.HIGH, 3),
        (Row(1, date(2024, 1, 2), [Colour.RED]), {"id": 1, "when": "2024-01-02", "more": ["red"]}),
        (Point(1, 2), [1, 2]),
        ((1, (2,)), [1, [2]]),
        (OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
        (MappingProxyType({"a": 1}), {"a": 1}),
        (Word("word"), "word"),
        ({Word("word"): 1}, {"word": 1}),
        ({Size.SMALL: 1}, {"s": 1}),
        (Float64(1.5), 1.5),
        (Int64(), 7),
        (-(2**63), -(2**63)),
        (2**64 - 1, 2**64 - 1),
        (None, None),
    ],
    ids=without_address,
)
def test_a_value_has_one_documented_form(value: Any, form: Any) -> None:
    assert stored(value) == form
    assert type(stored(value)) is type(form)


@pytest.mark.parametrize("value", [1e16, -1e16, 1e22, 1e23, 1.7976931348623157e308, 2.0**64])
def test_a_large_float_is_written_so_that_jsonb_leaves_it_a_float(value: float) -> None:
    buffer = ProgressBuffer()
    buffer.update_metadata({"v": value})
    text = (buffer.snapshot().json or "").partition('"v":')[2].rstrip("}")

    assert text.endswith(".0")
    assert "e" not in text
    assert float(text) == value


# --- values that are refused ---


@pytest.mark.parametrize(
    "value",
    [
        {1, 2}, frozenset(), b"bytes", bytearray(b"x"), object(), 1j, range(3), Row, Colour,
        timedelta(1), iter([]), len, Array(), memoryview(b"x"), NotATime(2024, 1, 1), Colour.BAD,
        Decimal("NaN"), Decimal("sNaN"), Decimal("-Infinity"), NAN, INFINITY, -INFINITY,
        Float64("nan"), Float64("inf"), "a\x00b", "\ud800", Word("\x00"), "é\udc00",
        10**40, 2**64, -(2**63) - 1, {1: "a"}, {None: 1}, {True: 1}, {("a",): 1}, {b"a": 1},
        {Colour.RED: 1}, {"a\x00": 1}, {"\ud800": 1},
    ],
    ids=without_address,
)  # fmt: skip
def test_what_has_no_form_is_refused_at_every_depth(value: Any) -> None:
    assert refusal(value).field.startswith("metadata['v']")
    assert refusal([{"k": value}]).field.startswith("metadata['v'][0]['k']")
    assert refusal(Row(1, date(2024, 1, 2), value)).field.startswith("metadata['v']['more']")
    assert refusal((1, value)).field.startswith("metadata['v'][1]")


def test_a_refusal_names_the_path_and_what_is_allowed() -> None:
    error = refusal({"a": [0, 1, 2, {"b": {3}}]})

    assert str(error).startswith("metadata['v']['a'][3]['b']: type set cannot be stored; allowed")
    assert "mappings with string keys" in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_keys_that_become_equal_are_refused() -> None:
    value = {Apart("s"): 1, "s": 2}
    assert len(value) == 2

    assert "another key" in refusal(value).reason


@pytest.mark.parametrize("values", [None, [], [("a", 1)], "a", 5, Row(1, date(2024, 1, 2))])
def test_metadata_that_is_no_mapping_is_refused(values: Any) -> None:
    with pytest.raises(InvalidProgress, match="must be a mapping with string keys"):
        ProgressBuffer().update_metadata(values)


def nested(levels: int) -> Any:
    value: Any = 1
    for level in range(levels):
        value = [value] if level % 2 else {"k": value}
    return value


def test_depth_is_counted_from_the_metadata_object() -> None:
    assert stored(nested(63)) == nested(63)
    assert "deeper than 64" in refusal(nested(64)).reason


def test_a_list_two_thousand_deep_is_refused() -> None:
    error = refusal(nested(2000))

    assert "deeper than 64" in error.reason
    assert len(error.field) < 200


def test_a_value_that_contains_itself_is_refused() -> None:
    mapping: dict[str, Any] = {}
    mapping["self"] = mapping
    sequence: list[Any] = []
    sequence.extend([sequence, sequence])

    assert "contains itself" in refusal(mapping).reason
    assert "contains itself" in refusal(sequence).reason
    assert "contains itself" in refusal(Row(1, date(2024, 1, 2), mapping)).reason


def test_the_same_list_many_times_over_is_refused_before_it_is_written_out() -> None:
    value: Any = ["x"]
    for _ in range(60):
        value = [value, value]

    with pytest.raises(ProgressTooLarge):
        ProgressBuffer().update_metadata({"v": value})


def test_a_mapping_without_end_is_refused() -> None:
    class Endless(Mapping[str, int]):
        def __getitem__(self, key: str) -> int:
            return 0

        def __iter__(self) -> Iterator[str]:
            return (str(number) for number in iter(int, 1))

        def __len__(self) -> int:
            return 0

    class Counting(Endless):
        def __iter__(self) -> Iterator[str]:
            number = 0
            while True:
                yield str(number)
                number += 1

    with pytest.raises(ProgressTooLarge):
        ProgressBuffer(limit=1000).update_metadata(Counting())
    with pytest.raises(InvalidProgress, match="another key"):
        ProgressBuffer(limit=1000).update_metadata(Endless())


def test_an_object_that_pretends_to_be_a_string_is_refused() -> None:
    class Proxy:
        @property  # type: ignore[misc]  # as object proxies do
        def __class__(self) -> type:
            return str

    assert "Proxy" in refusal(Proxy()).reason
    with pytest.raises(InvalidProgress):
        ProgressBuffer().set_progress(5, Proxy())  # type: ignore[arg-type]  # the point


# --- any accepted value ---

texts = st.text().filter(lambda text: "\x00" not in text)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(texts, inner, max_size=5),
    max_leaves=20,
)


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} in the JSON")


def same(left: Any, right: Any) -> bool:
    return repr(left) == repr(right)


@given(st.dictionaries(texts, values, min_size=1, max_size=5))
def test_any_accepted_metadata_comes_back_exactly(metadata: dict[str, Any]) -> None:
    buffer = ProgressBuffer()
    buffer.update_metadata(metadata)
    text = buffer.snapshot().json or ""

    assert same(json.loads(text, parse_constant=refuse_constant), {"metadata": metadata})
    assert same(buffer.value(), {"metadata": metadata})
    assert "\x00" not in text
    # The text of a lone backslash before u0000 would be a NUL to jsonb.
    assert "\\u0000" not in text.replace("\\\\", "")


@given(st.integers(0, 100) | st.none(), texts | st.none())
def test_any_accepted_report_comes_back_exactly(percent: int | None, message: str | None) -> None:
    report = reported(percent, message)

    assert report.pop("percent") == percent
    assert report == ({} if message is None else {"message": message})


@given(st.dictionaries(st.text(st.characters(), max_size=5), st.text(st.characters(), max_size=5)))
def test_text_with_nul_characters_or_lone_surrogates_is_never_stored(
    metadata: dict[str, str],
) -> None:
    bad = any("\x00" in text or not encodable(text) for pair in metadata.items() for text in pair)
    buffer = ProgressBuffer()
    try:
        buffer.update_metadata(metadata)
    except InvalidProgress:
        assert bad
        assert buffer.generation == 0
    else:
        assert not bad


def encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
