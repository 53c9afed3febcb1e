"""A file that is read by lines and whose cursors are byte offsets, compressed by gzip or not."""

from __future__ import annotations

import codecs
import gzip
import io
import os
import re
import stat
import zlib
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Final, TypeVar, cast

from ...errors import CheckpointMismatch
from .base import SourceBase, Unreadable
from .text_encoding import BOM, line_encoding

T = TypeVar("T")

#: Bytes at the start of a file by which it is known again.
HEAD_BYTES: Final = 1024

_BUFFER_BYTES: Final = 128 * 1024
_GZIP: Final = b"\x1f\x8b"
_REFUSED: Final = (
    (re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)", re.DOTALL), "bzip2"),
    (re.compile(rb"\xfd7zXZ\x00"), "xz"),
    (re.compile(rb"PK(\x03\x04|\x05\x06)"), "zip (.xlsx is zip as well)"),
    (re.compile(rb"\x28\xb5\x2f\xfd"), "zstd"),
    (re.compile(rb"\x04\x22\x4d\x18"), "lz4"),
    (re.compile(rb"7z\xbc\xaf\x27\x1c"), "7z"),
)


class OpenFile:
    """A file open for reading. Offsets are those of the bytes after decompression.

    Raises the OSError of a file that cannot be opened, ValueError for one that cannot be read on
    from an offset.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        #: Where its lines are read from next; whoever reads moves it on.
        self.offset = 0
        if not stat.S_ISREG(os.stat(path).st_mode) and not os.path.isdir(path):
            raise ValueError(f"{path} is not a regular file, so it cannot be read a second time")
        self._raw = open(path, "rb", buffering=_BUFFER_BYTES)  # noqa: SIM115 - closed by close()
        try:
            self.compressed = self._is_gzip()
            self.lines = self._decompressed() if self.compressed else self._raw
            self._head = self.lines.read(HEAD_BYTES)
            self.lines.seek(0)
        except BaseException:
            self._raw.close()
            raise
        self._consumed = 0
        self._whole_head: int | None = None

    def __enter__(self) -> OpenFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        if not self._raw.closed:
            self._consumed = self._raw.tell()
            self.lines.close()
            self._raw.close()

    def consumed(self) -> int:
        """How many bytes of the file itself were read, a buffer of them ahead of the lines."""
        return self._consumed if self._raw.closed else self._raw.tell()

    def skip_mark(self, encoding: str) -> None:
        """Go past the byte order mark at the start, if there is one."""
        if encoding != "utf-8":
            return
        if self._head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise ValueError(
                f"{self.path} is in UTF-16, which cannot be read on from a line. "
                "Convert it to UTF-8 first, for instance with iconv"
            )
        if self._head.startswith(BOM):
            self.offset = self.lines.seek(len(BOM))

    def cursor(self, offset: int) -> dict[str, int]:
        """The cursor of what ends at this offset."""
        if self._whole_head is None or offset < HEAD_BYTES:
            return {"offset": offset, "head": self._head_before(offset)}
        return {"offset": offset, "head": self._whole_head}

    def go_to(self, cursor: Any) -> None:
        """Go on after what has this cursor. CheckpointMismatch if it is of another file.

        What is compressed has to be read up to there.
        """
        offset, head = self._parts_of(cursor)
        if head != self._head_before(offset):
            raise self._mismatch(offset, "the file begins with other bytes than then")
        if offset and not self._ends_a_line(offset):
            raise self._mismatch(
                offset, "no line ends there, so the file was changed, or its last line is longer"
            )
        self.lines.seek(self.offset)

    def _ends_a_line(self, offset: int) -> bool:
        """Whether a line ended there; moves ``offset`` to where the next one begins."""
        if self.lines.seek(offset - 1) < offset - 1:
            raise self._mismatch(offset, "the file is shorter now")
        around = self.lines.read(3)
        if not around:
            raise self._mismatch(offset, "the file is shorter now")
        self.offset = offset
        last, follows = around[:1], around[1:]
        if last == b"\n" or not follows:
            return True
        # It was the last line and had no end then; the file has grown since.
        end = b"\n" if follows.startswith(b"\n") else b"\r\n"
        self.offset += len(end)
        return follows.startswith(end)

    def _parts_of(self, cursor: Any) -> tuple[int, int]:
        if isinstance(cursor, dict):
            offset, head = cursor.get("offset"), cursor.get("head")
            if isinstance(offset, int) and isinstance(head, int) and offset >= 0:
                return offset, head
        raise CheckpointMismatch(f"{self.path}: {cursor!r} is no cursor of a file")

    def _head_before(self, offset: int) -> int:
        """The checksum of the file's first bytes, of those before the offset."""
        size = min(offset, HEAD_BYTES)
        if len(self._head) < size:
            # The file may have grown while it was read.
            here = self.lines.tell()
            self.lines.seek(0)
            self._head = self.lines.read(HEAD_BYTES)
            self.lines.seek(here)
        checksum = zlib.crc32(self._head[:size])
        if size == HEAD_BYTES <= len(self._head):
            self._whole_head = checksum
        return checksum

    def _mismatch(self, offset: int, reason: str) -> CheckpointMismatch:
        return CheckpointMismatch(
            f"the checkpoint lies at byte {offset} of {self.path}, but {reason}"
        )

    def _is_gzip(self) -> bool:
        magic = self._raw.read(16)
        self._raw.seek(0)
        for pattern, name in _REFUSED:
            if pattern.match(magic):
                raise ValueError(
                    f"{self.path} is compressed by {name}: only gzip is read as it is, "
                    "decompress it first"
                )
        return magic.startswith(_GZIP)

    def _decompressed(self) -> io.BufferedReader:
        # A GzipFile's own lines are slow.
        stream = gzip.GzipFile(fileobj=self._raw, mode="rb")
        return io.BufferedReader(cast(Any, stream), _BUFFER_BYTES)


class FileSource(SourceBase[T]):
    """What is read from a file by lines. A cursor is ``{"offset": bytes, "head": checksum}``.

    ``head`` is of the first bytes of the file, up to 1,024: in another attempt a file that begins
    otherwise or is shorter is refused with CheckpointMismatch. A file that has grown is read on.
    """

    def __init__(self, path: str | os.PathLike[str], encoding: str = "utf-8") -> None:
        if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str):
            raise TypeError(
                f"path must be a str or a path, not {type(path).__name__}: the file is opened, "
                "and opened again, by its name"
            )
        self.path = os.fspath(path)
        self._encoding = line_encoding(encoding)
        self._opened: OpenFile | None = None

    def total(self) -> int:
        """Its size in bytes; of a compressed file, as it is."""
        return os.stat(self.path).st_size

    def read(self, cursor: Any | None) -> Iterator[tuple[T | Unreadable, Any]]:
        """Opens the file at the call; raises the OSError of one that cannot be opened."""
        self.close()
        self._opened = opened = OpenFile(self.path)
        try:
            opened.skip_mark(self._encoding)
            return self._begin(opened, cursor)
        except BaseException:
            opened.close()
            raise

    def position(self, cursor: Any, done: int) -> float | None:
        """The offset; in a compressed file how much of it has been read, None before that."""
        if self._opened is not None and self._opened.compressed:
            return self._opened.consumed()
        return None if self._opened is None else int(cursor["offset"])

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()

    def _begin(self, opened: OpenFile, cursor: Any) -> Iterator[tuple[T | Unreadable, Any]]:
        """Go to the cursor and read from there; closes the file at the end."""
        if cursor is not None:
            opened.go_to(cursor)
        return self._items(opened)

    def _items(self, opened: OpenFile) -> Iterator[tuple[T | Unreadable, Any]]:
        raise NotImplementedError
