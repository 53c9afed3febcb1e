"""CSV records, the exact byte where each ends, and those that csv refuses."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from celery_awa.errors import CheckpointMismatch
from celery_awa.resume.sources import CsvRows, Unreadable
from celery_awa.resume.sources.csv_ends import RecordEnds

#: The tests of hypothesis write the file anew in each example.
one_file = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)

Write = Callable[[bytes], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    path = tmp_path / "file.csv"

    def written(data: bytes) -> Path:
        path.write_bytes(data)
        return path

    return written


def items(source: Any, cursor: Any = None) -> list[Any]:
    return [item for item, _ in source.read(cursor)]


def after(source: Any, count: int) -> Any:
    """The cursor of so many items."""
    reader = source.read(None)
    for _ in range(count):
        _, cursor = next(reader)
    reader.close()
    return cursor


def errors(found: list[Any]) -> list[Any]:
    """The items with the texts of their errors."""
    return [str(item.error) if isinstance(item, Unreadable) else item for item in found]


# Rows.


def test_rows_are_dicts_by_the_header(write: Write) -> None:
    source = CsvRows(write(b'id,name\r\n1,"Ann, B"\r\n2,Bo\n'))
    assert items(source) == [{"id": "1", "name": "Ann, B"}, {"id": "2", "name": "Bo"}]


def test_a_cursor_is_the_offset_after_the_record(write: Write) -> None:
    source = CsvRows(write(b'a,b\n1,"x\ny"\r\n2,z\n'))
    assert [cursor["offset"] for _, cursor in source.read(None)] == [13, 17]


def test_without_a_header_rows_are_lists(write: Write) -> None:
    assert items(CsvRows(write(b"1,2\n3\n"), header=False)) == [["1", "2"], ["3"]]


def test_with_names_the_first_record_is_a_row_as_csv_has_it(write: Write) -> None:
    source = CsvRows(write(b"1,2\n3,4\n"), fieldnames=("a", "b"))
    assert items(source) == [{"a": "1", "b": "2"}, {"a": "3", "b": "4"}]
    assert items(source, after(source, 1)) == [{"a": "3", "b": "4"}]


def test_names_may_stand_for_those_of_the_header(write: Write) -> None:
    source = CsvRows(write(b"x,y\n1,2\n"), header=True, fieldnames=["a", "b"])
    assert items(source) == [{"a": "1", "b": "2"}]


def test_rows_of_another_length_are_as_csv_has_them(write: Write) -> None:
    data = b"a,b\n1\n1,2,3,4\n"
    expected = list(csv.DictReader(io.StringIO(data.decode())))
    assert items(CsvRows(write(data))) == expected
    assert expected == [{"a": "1", "b": None}, {"a": "1", "b": "2", None: ["3", "4"]}]


def test_options_are_those_of_csv(write: Write) -> None:
    source = CsvRows(
        write("ä;b\n'1;2';3.5\n".encode("cp1252")),
        encoding="cp1252",
        delimiter=";",
        quotechar="'",
        quoting=csv.QUOTE_MINIMAL,
    )
    assert items(source) == [{"ä": "1;2", "b": "3.5"}]
    assert items(CsvRows(write(b"a\tb\n1\t2\n"), dialect="excel-tab")) == [{"a": "1", "b": "2"}]


def test_wrong_options_are_refused_at_the_call(write: Write) -> None:
    with pytest.raises(TypeError, match="delimiters"):
        CsvRows("file.csv", delimiters=";")
    with pytest.raises(TypeError, match="delimiter"):
        CsvRows("file.csv", delimiter=";;")
    with pytest.raises(csv.Error, match="unknown dialect"):
        CsvRows("file.csv", dialect="nope")
    with pytest.raises(TypeError, match="fieldnames must be a list of names"):
        CsvRows("file.csv", fieldnames="ab")
    with pytest.raises(ValueError, match="utf-16"):
        CsvRows("file.csv", "utf-16")


@pytest.mark.parametrize("data", [b"", b"\xef\xbb\xbf", b"\n\r\n", b"a,b", b"a,b\n\n"])
def test_a_file_without_records_has_none(write: Write, data: bytes) -> None:
    assert items(CsvRows(write(data))) == []


def test_a_mark_is_no_part_of_the_first_name(write: Write) -> None:
    source = CsvRows(write(b'\xef\xbb\xbf"a",b\n1,2\n3,4\n'))
    assert items(source, after(source, 1)) == [{"a": "3", "b": "4"}]


def test_a_header_may_follow_blank_lines_and_hold_line_ends(write: Write) -> None:
    source = CsvRows(write(b'\n"a\nb",c\n\n1,2\n'))
    assert items(source) == [{"a\nb": "1", "c": "2"}]


pieces = st.sampled_from(["a", ",", '"', "\n", "\r\n", " ", "é€", "\U0001f600"])
fields = st.lists(pieces, max_size=5).map("".join)
records = st.lists(st.lists(fields, min_size=2, max_size=4), max_size=6)


@one_file
@given(
    records=records,
    end=st.sampled_from(["\n", "\r\n"]),
    quoting=st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_MINIMAL]),
    cut=st.booleans(),
    compress=st.booleans(),
    blank=st.booleans(),
    header=st.booleans(),
)
def test_reading_on_from_any_record_gives_what_reading_at_one_go_gives(
    tmp_path: Path,
    records: list[list[str]],
    end: str,
    quoting: Any,
    cut: bool,
    compress: bool,
    blank: bool,
    header: bool,
) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator=end * (1 + blank), quoting=quoting)
    writer.writerow(["head", "two\nlines"])
    writer.writerows(records)
    data = text.getvalue().encode()
    data = data[: -len(end) * (1 + blank)] if cut else data
    path = tmp_path / "file"
    path.write_bytes(gzip.compress(data) if compress else data)

    whole = list(CsvRows(path, header=header).read(None))

    plain = csv.DictReader if header else csv.reader
    decoded = io.StringIO(data.decode(), newline="")
    assert [item for item, _ in whole] == [row for row in plain(decoded) if row]
    for number, (_, cursor) in enumerate(whole):
        assert list(CsvRows(path, header=header).read(cursor)) == whole[number + 1 :]


@one_file
@given(data=st.binary(max_size=60) | st.text('a",\\\n\r', max_size=60).map(str.encode))
def test_whatever_is_in_a_file_reading_on_gives_what_reading_at_one_go_gives(
    tmp_path: Path, data: bytes
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"line\n" + data)
    source = CsvRows(path, header=False, strict=True, escapechar="\\")

    whole = list(source.read(None))

    assert whole[0][0] == ["line"]
    for number, (_, cursor) in enumerate(whole):
        rest = list(source.read(cursor))
        assert errors([item for item, _ in rest]) == errors([i for i, _ in whole[number + 1 :]])
        assert [cursor for _, cursor in rest] == [cursor for _, cursor in whole[number + 1 :]]


def test_a_lone_carriage_return_in_quotes_is_text(write: Write) -> None:
    source = CsvRows(write(b'a,b\n1,"x\ry"\n2,z\n'))
    assert items(source) == [{"a": "1", "b": "x\ry"}, {"a": "2", "b": "z"}]


# Records that cannot be read.


def test_a_record_that_cannot_be_decoded_is_left_out_whole(write: Write) -> None:
    source = CsvRows(write(b'a,b\n1,"x\n\xff\n,y"\n2,z\n'))
    (bad, _), (good, _) = source.read(None)
    assert isinstance(bad, Unreadable)
    assert isinstance(bad.error, UnicodeDecodeError)
    assert good == {"a": "2", "b": "z"}
    assert items(source, after(source, 1)) == [good]


def test_a_refused_record_is_left_out_whole_though_csv_stopped_within_it(write: Write) -> None:
    path = write(b'a,b,c\n1,"x"y,"in\nit"\n2,3,4\n')
    found = items(CsvRows(path, strict=True))
    assert errors(found) == [
        f"{path}, record at byte 6: ',' expected after '\"'",
        {"a": "2", "b": "3", "c": "4"},
    ]


def test_a_field_that_is_too_long_leaves_out_its_record_and_no_other(write: Write) -> None:
    long = b'"' + b'text, and ""more""\n' * 20_000 + b'"'
    assert len(long) > 2 * csv.field_size_limit()
    path = write(b"a,b\n1," + long + b"\n2,x\n" + b"3," + b"y" * 200_000 + b'\n4,"z"\n')
    reason = "field larger than field limit (131072)"
    assert errors(items(CsvRows(path))) == [
        f"{path}, record at byte 4: {reason}",
        {"a": "2", "b": "x"},
        f"{path}, record at byte {4 + 2 + len(long) + 1 + 4}: {reason}",
        {"a": "4", "b": "z"},
    ]


@pytest.mark.parametrize("strict", [False, True])
def test_a_quote_that_is_never_closed_makes_no_row_of_what_follows(
    write: Write, strict: bool
) -> None:
    path = write(b'a,b\n1,"x"\n2,"y\n3,z\n')
    source = CsvRows(path, strict=strict)
    first, second = source.read(None)
    assert first[0] == {"a": "1", "b": "x"}
    assert errors([second[0]])[0].startswith(f"{path}, record at byte 10: ")
    assert second[1]["offset"] == 19
    assert items(source, second[1]) == []
    assert errors([item for item, _ in source.read(first[1])]) == errors([second[0]])


def test_what_is_no_number_where_numbers_are_wanted_is_an_item_error(write: Write) -> None:
    source = CsvRows(write(b'"a"\n1\nx\n3\n'), quoting=csv.QUOTE_NONNUMERIC)
    first, second, third = items(source)
    assert (first, third) == ({"a": 1.0}, {"a": 3.0})
    assert isinstance(second.error, ValueError)


def test_a_lone_carriage_return_is_an_item_error_that_says_so(write: Write) -> None:
    path = write(b"a,b\n1,x\ry\n2,z\n")
    assert errors(items(CsvRows(path))) == [
        f"{path}, record at byte 4: a lone \\r outside of quotes",
        {"a": "2", "b": "z"},
    ]


@pytest.mark.parametrize("compress", [False, True])
def test_a_file_whose_lines_end_with_a_lone_carriage_return_is_refused(
    write: Write, compress: bool
) -> None:
    data = b"a,b\r1,x\r2,z\r"
    source = CsvRows(write(gzip.compress(data) if compress else data))
    with pytest.raises(ValueError, match=r"end with a lone \\r"):
        source.read(None)


@pytest.mark.parametrize(
    ("data", "options", "kind"),
    [
        (b"a,\xff\n1,2\n", {}, UnicodeDecodeError),
        (b'"a"b,c\n1,2\n', {"strict": True}, csv.Error),
        (b'a,"b\n1,2\n', {}, csv.Error),
    ],
)
def test_a_header_that_cannot_be_read_is_an_error_of_the_file(
    write: Write, data: bytes, options: dict[str, Any], kind: type[Exception]
) -> None:
    with pytest.raises(kind):
        CsvRows(write(data), **options).read(None)


def test_a_cursor_within_the_header_is_a_mismatch(write: Write) -> None:
    path = write(b'"a\nb",c\n1,2\n')
    cursor = {"offset": 3, "head": zlib.crc32(b'"a\n')}
    with pytest.raises(CheckpointMismatch, match=r"byte 3 of .*file\.csv, within its header"):
        CsvRows(path).read(cursor)


def test_a_shorter_file_is_a_mismatch(write: Write) -> None:
    source = CsvRows(write(b"a,b\n1,2\n3,4\n"))
    cursor = after(source, 2)
    write(b"a,b\n1,2\n")
    with pytest.raises(CheckpointMismatch, match="byte 12"):
        source.read(cursor)


# Where refused records end.


def _ends_by_csv(text: str, options: dict[str, Any]) -> list[int]:
    """The numbers of the lines with which records end."""
    reader = csv.reader(_lines(text), **options)
    return [reader.line_num for _ in reader]


def _lines(text: str) -> Iterator[str]:
    return iter(io.StringIO(text, newline="\n"))


def _ends_by_us(text: str, options: dict[str, Any]) -> list[int]:
    ends = RecordEnds(csv.reader((), **options).dialect)
    place = None
    found = []
    number = 0
    for number, line in enumerate(_lines(text), 1):
        place = ends.goes_on(line, place)
        if place is None:
            found.append(number)
    return found if place is None else [*found, number]


dialects = st.fixed_dictionaries(
    {
        "doublequote": st.booleans(),
        "escapechar": st.sampled_from([None, "\\"]),
        "skipinitialspace": st.booleans(),
        "quoting": st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_NONE]),
        "quotechar": st.sampled_from(['"', "]"]),
        "delimiter": st.sampled_from([",", "^", "\t"]),
    }
)


@example(
    text="]]\\\n\\",
    options={
        "doublequote": True,
        "escapechar": "\\",
        "skipinitialspace": False,
        "quoting": csv.QUOTE_MINIMAL,
        "quotechar": "]",
        "delimiter": ",",
    },
)
@settings(max_examples=500, deadline=None)
@given(text=st.text('a"],^\t\\\n ', max_size=20), options=dialects)
def test_records_end_where_csv_has_them_end(text: str, options: dict[str, Any]) -> None:
    assert _ends_by_us(text, options) == _ends_by_csv(text, options)
