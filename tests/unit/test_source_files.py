"""Files read by lines: offsets, compression, and files that are not what they were."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import os
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from celery_awa.errors import CheckpointMismatch
from celery_awa.resume.sources import Lines, Unreadable

#: The tests of hypothesis write the file anew in each example.
one_file = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def items(source: Any, cursor: Any = None) -> list[Any]:
    return [item for item, _ in source.read(cursor)]


def after(source: Any, count: int) -> Any:
    """The cursor of so many items."""
    reader = source.read(None)
    for _ in range(count):
        _, cursor = next(reader)
    reader.close()
    return cursor


def lines_of(data: bytes) -> list[str]:
    """What Lines is to give, said in another way."""
    parts = data.decode().split("\n")
    ended = [part[:-1] if part.endswith("\r") else part for part in parts[:-1]]
    return ended + ([parts[-1]] if parts[-1] else [])


@pytest.fixture
def write(tmp_path: Path) -> Callable[[bytes], Path]:
    path = tmp_path / "file.txt"

    def written(data: bytes) -> Path:
        path.write_bytes(data)
        return path

    return written


Write = Callable[[bytes], Path]


# Lines.


def test_lines_come_without_their_ends(write: Write) -> None:
    source = Lines(write(b"one\ntwo\r\n\n\r\nth\rree\r\nlast"))
    assert items(source) == ["one", "two", "", "", "th\rree", "last"]


def test_a_cursor_is_the_offset_after_the_line_and_a_checksum_of_what_is_before(
    write: Write,
) -> None:
    source = Lines(write(b"one\ntwo\n"))
    assert list(source.read(None)) == [
        ("one", {"offset": 4, "head": zlib.crc32(b"one\n")}),
        ("two", {"offset": 8, "head": zlib.crc32(b"one\ntwo\n")}),
    ]


def test_an_empty_file_has_no_lines(write: Write) -> None:
    assert items(Lines(write(b""))) == []


texts = st.text(st.sampled_from('ab\r\n",é€\U0001f600 \x85\u2028'), max_size=60)


@one_file
@given(text=texts, mark=st.booleans(), compress=st.booleans(), padded=st.booleans())
def test_reading_on_from_any_line_gives_what_reading_at_one_go_gives(
    tmp_path: Path, text: str, mark: bool, compress: bool, padded: bool
) -> None:
    # Beyond the bytes that the checksum is of, too.
    data = (("x" * 700 + "\n") * 2 * padded + text).encode()
    marked = codecs.BOM_UTF8 * mark + data
    path = tmp_path / "file"
    path.write_bytes(gzip.compress(marked) if compress else marked)

    whole = list(Lines(path).read(None))

    assert [item for item, _ in whole] == lines_of(data)
    for number, (_, cursor) in enumerate(whole):
        assert list(Lines(path).read(cursor)) == whole[number + 1 :]


def test_other_encodings_are_decoded_line_by_line(write: Write) -> None:
    text = "日本語\n表\n"
    source = Lines(write(text.encode("shift_jis")), encoding="shift_jis")
    assert items(source) == ["日本語", "表"]


def test_a_line_that_cannot_be_decoded_is_an_item_error_and_the_next_one_is_read(
    write: Write,
) -> None:
    source = Lines(write(b"good\nb\xffd\ngood again\n"))
    first, bad, last = items(source)
    assert (first, last) == ("good", "good again")
    assert isinstance(bad, Unreadable)
    assert isinstance(bad.error, UnicodeDecodeError)
    assert items(source, after(source, 2)) == ["good again"]


@pytest.mark.parametrize("encoding", ["utf-8", "UTF8", "utf-8-sig"])
def test_a_mark_at_the_start_is_dropped(write: Write, encoding: str) -> None:
    source = Lines(write(codecs.BOM_UTF8 + b"one\n\xef\xbb\xbftwo\n"), encoding)
    assert items(source) == ["one", "\ufefftwo"]
    assert after(source, 1)["offset"] == 7


@pytest.mark.parametrize(
    "encoding",
    ["utf-16", "utf-16-le", "utf-32", "utf-7", "iso-2022-jp", "hz", "cp037", "unicode_escape"],
)
def test_an_encoding_in_which_lines_cannot_be_found_is_refused(write: Write, encoding: str) -> None:
    with pytest.raises(ValueError, match=f"a file in {encoding} cannot be read on from a line"):
        Lines(write(b""), encoding)


@pytest.mark.parametrize("encoding", ["nope", "hex", "base64"])
def test_what_is_no_encoding_of_text_is_refused(write: Write, encoding: str) -> None:
    with pytest.raises(LookupError, match=encoding):
        Lines(write(b""), encoding)


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_a_file_that_is_in_utf_16_after_all_is_refused(write: Write, encoding: str) -> None:
    with pytest.raises(ValueError, match="is in UTF-16"):
        Lines(write("\ufeffone\n".encode(encoding))).read(None)


# Paths.


def test_a_file_that_is_not_there_is_pythons_own_error(tmp_path: Path) -> None:
    source = Lines(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match="absent"):
        source.read(None)
    with pytest.raises(FileNotFoundError, match="absent"):
        source.total()


def test_a_folder_is_pythons_own_error(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        Lines(tmp_path).read(None)


def test_a_pipe_is_refused_without_waiting_for_its_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="is not a regular file"):
        Lines(tmp_path / "pipe").read(None)


@pytest.mark.parametrize("path", [3, b"bytes", io.StringIO(), None])
def test_what_is_no_path_is_refused(path: Any) -> None:
    with pytest.raises(TypeError, match=f"path must be a str or a path, not {type(path).__name__}"):
        Lines(path)


# Progress, and what is held open.


def test_progress_is_in_bytes(write: Write) -> None:
    source = Lines(write(b"one\ntwo\n"))
    reader = source.read(None)
    assert source.total() == 8
    _, cursor = next(reader)
    assert source.position(cursor, 1) == 4


def test_progress_in_a_compressed_file_is_in_its_own_bytes(write: Write) -> None:
    data = os.urandom(400_000).hex().encode()
    packed = gzip.compress(b"\n".join(data[n : n + 100] for n in range(0, len(data), 100)))
    source = Lines(write(packed))
    assert source.total() == len(packed)

    places = [source.position(cursor, 0) or 0.0 for _, cursor in source.read(None)]

    assert places == sorted(places)
    assert 0 < places[0] < len(packed) / 2
    assert places[len(places) // 2] == pytest.approx(len(packed) / 2, rel=0.5)
    assert places[-1] == pytest.approx(len(packed), abs=8)
    # The file is closed by now.
    assert source.position({"offset": len(data), "head": 0}, 0) == len(packed)


@pytest.mark.parametrize("compress", [False, True])
def test_the_file_is_closed_at_the_end_and_on_the_way(write: Write, compress: bool) -> None:
    path = write(gzip.compress(b"one\ntwo\n") if compress else b"one\ntwo\n")
    descriptors = len(os.listdir("/dev/fd"))
    source = Lines(path)

    list(source.read(None))
    assert len(os.listdir("/dev/fd")) == descriptors

    begun = source.read(None)
    next(begun)
    assert len(os.listdir("/dev/fd")) > descriptors
    source.close()
    source.close()
    assert len(os.listdir("/dev/fd")) == descriptors

    with pytest.raises(CheckpointMismatch):
        source.read({"offset": 4, "head": 0})
    assert len(os.listdir("/dev/fd")) == descriptors


# Compression.


def test_a_gzip_of_several_members_is_one_text(write: Write) -> None:
    source = Lines(write(gzip.compress(b"one\ntw") + gzip.compress(b"o\nthree\n")))
    assert items(source) == ["one", "two", "three"]
    assert items(source, after(source, 1)) == ["two", "three"]


def test_a_gzip_that_is_cut_off_gives_its_lines_and_then_an_error(write: Write) -> None:
    data = b"".join(b"%d\n" % number for number in range(100_000))
    reader = Lines(write(gzip.compress(data)[:-2000])).read(None)
    assert [next(reader)[0] for _ in range(1000)] == [str(number) for number in range(1000)]
    with pytest.raises(EOFError, match="ended before"):
        list(reader)


def _zip(data: bytes) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("file.txt", data)
    return made.getvalue()


@pytest.mark.parametrize(
    ("pack", "name"),
    [
        (bz2.compress, "bzip2"),
        (lzma.compress, "xz"),
        (_zip, "zip"),
        (lambda data: b"\x28\xb5\x2f\xfd" + data, "zstd"),
        (lambda data: b"\x04\x22\x4d\x18" + data, "lz4"),
        (lambda data: b"7z\xbc\xaf\x27\x1c" + data, "7z"),
    ],
)
def test_other_compression_is_refused(
    write: Write, pack: Callable[[bytes], bytes], name: str
) -> None:
    for data in (b"", b"text\n"):
        with pytest.raises(ValueError, match=f"compressed by {name}.*decompress it first"):
            Lines(write(pack(data))).read(None)


@pytest.mark.parametrize("text", ["BZh9 is a text", "PK is one", "7z"])
def test_a_text_that_begins_like_an_archive_is_none(write: Write, text: str) -> None:
    assert items(Lines(write(text.encode()))) == [text]


# Files that are not what they were.


def test_a_file_that_has_grown_is_read_on(write: Write) -> None:
    cursor = after(Lines(write(b"one\ntwo\n")), 2)
    assert items(Lines(write(b"one\ntwo\nthree\n")), cursor) == ["three"]


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_a_last_line_may_get_its_end_later(write: Write, end: bytes) -> None:
    cursor = after(Lines(write(b"one\ntwo")), 2)
    assert items(Lines(write(b"one\ntwo" + end)), cursor) == []
    assert items(Lines(write(b"one\ntwo" + end + b"three\n")), cursor) == ["three"]


def test_a_last_line_that_became_longer_is_a_mismatch(write: Write) -> None:
    cursor = after(Lines(write(b"one\ntwo")), 2)
    with pytest.raises(CheckpointMismatch, match=r"byte 7 of .*file\.txt, but no line ends there"):
        Lines(write(b"one\ntwofold\n")).read(cursor)


def test_a_file_that_grows_while_it_is_read_keeps_its_checksum(write: Write) -> None:
    path = write(b"x" * 300 + b"\n")
    source = Lines(path)
    reader = source.read(None)
    next(reader)
    with path.open("ab") as file:
        file.write((b"y" * 300 + b"\n") * 5)
    *_, (_, cursor) = reader
    assert cursor["head"] == zlib.crc32(path.read_bytes()[:1024])
    assert items(source, cursor) == []


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("lines", [1, 5000])
def test_a_shorter_file_is_a_mismatch(write: Write, compress: bool, lines: int) -> None:
    pack = gzip.compress if compress else bytes
    source = Lines(write(pack(b"line\n" * lines)))
    cursor = after(source, lines)
    write(pack(b"line\n" * (lines - 1)))
    with pytest.raises(CheckpointMismatch, match=rf"byte {lines * 5} of .*file\.txt"):
        source.read(cursor)


@pytest.mark.parametrize("compress", [False, True])
def test_another_file_is_a_mismatch(write: Write, compress: bool) -> None:
    pack = gzip.compress if compress else bytes
    source = Lines(write(pack(b"one\ntwo\n")))
    cursor = after(source, 1)
    write(pack(b"eno\ntwo\n"))
    with pytest.raises(CheckpointMismatch, match=r"byte 4 of .*file\.txt, but the file begins"):
        source.read(cursor)


def test_a_file_may_be_compressed_between_two_attempts(write: Write) -> None:
    source = Lines(write(b"one\ntwo\n"))
    cursor = after(source, 1)
    write(gzip.compress(b"one\ntwo\n"))
    assert items(source, cursor) == ["two"]


@pytest.mark.parametrize(
    "cursor", [7, {}, {"offset": "4", "head": 0}, {"offset": -1, "head": 0}, {"id": 7}]
)
def test_a_cursor_of_something_else_is_a_mismatch(write: Write, cursor: Any) -> None:
    with pytest.raises(CheckpointMismatch, match="is no cursor of a file"):
        Lines(write(b"one\n")).read(cursor)
