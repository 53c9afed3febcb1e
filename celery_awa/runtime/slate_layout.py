"""Runs in the worker and its pool children, any thread: where everything lies in a slate's file.

    file     header, filled up to 4,096 bytes; then the pages
    header   what the file is and whose, with a checksum (:class:`Header`); at byte 256 one byte,
             not 0 once the worker is stopping
    page     the headers of all records, 48 bytes each (two halves of 24); then, record by
             record in the same order, two payloads of the record's capacity

The records of a page are the attributes of :class:`PageRecords`, in their order. VERSION rises with
every change here. With records of 66,560 bytes (64 KiB of progress and some room) a page takes
287 kB of memory, all of it from the start.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from mmap import mmap
from typing import NamedTuple
from zlib import crc32

from .slate_record import HEADERS_BYTES, Record

MAGIC = b"AWASLATE"
VERSION = 2

#: Bytes in front of the first page.
FILE_HEADER_BYTES = 4_096
#: Where the byte lies that says that the worker is stopping.
STOPPING_AT = 256

#: Bytes that stand for a database, and those that stand for none.
DATABASE_BYTES = 16
NOBODYS = bytes(DATABASE_BYTES)

# magic, version, pages, record_bytes, owner's id, owner's start, database; then a checksum over
# these. Magic and version lie where they lie in every version.
_HEADER = struct.Struct("@8sIIIxxxxQQ16s")
_CHECKSUM = struct.Struct("@I")
_MAGIC_AND_VERSION = struct.Struct("@8sI")

#: Bytes that an end may take.
END_BYTES = 8_192
#: Bytes that a task's id may take: 512 characters of four.
TASK_ID_BYTES = 2_048

#: A process: its id and its start.
PROCESS = struct.Struct("@QQ")
#: Id and start of the process, the attempt's token; the task's id follows as UTF-8.
IDENTITY = struct.Struct("@QQ32s")
#: The job's id and its run_lease.
LEASE = struct.Struct("@qq")
#: Monotonic seconds of the confirmed heartbeat, lost, cancel. What the database acknowledged is
#: the record's generation.
ANSWER = struct.Struct("@d??")


class Unfit(ValueError):
    """What is in a file is not a slate that this version can use."""


class PageRecords:
    """The records of one page.

    ``owner`` and ``identity`` are read under the seed 0, all others under the seed of the
    attempt's token.
    """

    __slots__ = ("answer", "brief", "closed", "end", "identity", "lease", "metadata", "owner")

    def __init__(self, memory: mmap, page: int, record_bytes: int) -> None:
        records = iter(_records(memory, page, record_bytes))
        #: PROCESS that took the page, or nothing. Written by that process.
        self.owner = next(records)
        #: IDENTITY of the attempt that the page carries unless it is closed.
        self.identity = next(records)
        #: Its being there says that this attempt is over. Written by the process, and by the
        #: worker once the process is dead.
        self.closed = next(records)
        #: LEASE, or nothing.
        self.lease = next(records)
        #: ANSWER. The only record that the worker writes beside a living process.
        self.answer = next(records)
        self.brief = next(records)
        self.metadata = next(records)
        self.end = next(records)

    def wipe(self) -> None:
        """Take away all that belongs to one attempt; nobody may look for it by now."""
        for record in (self.lease, self.answer, self.brief, self.metadata, self.end):
            record.forget()


@dataclass(frozen=True, slots=True)
class Layout:
    """A slate of so many pages, with brief and metadata of so many bytes at most."""

    pages: int
    record_bytes: int

    @property
    def page_bytes(self) -> int:
        return -(-(_ALL_HEADERS_BYTES + 2 * sum(_capacities(self.record_bytes))) // 64) * 64

    @property
    def file_bytes(self) -> int:
        return FILE_HEADER_BYTES + self.pages * self.page_bytes

    def page(self, memory: mmap, index: int) -> PageRecords:
        """The page with this index, from 0."""
        return PageRecords(memory, FILE_HEADER_BYTES + index * self.page_bytes, self.record_bytes)


def _capacities(record_bytes: int) -> tuple[int, ...]:
    """Of the records of a page, in their order."""
    identity = IDENTITY.size + TASK_ID_BYTES
    progress = (record_bytes, record_bytes)
    return (PROCESS.size, identity, 0, LEASE.size, ANSWER.size, *progress, END_BYTES)


_ALL_HEADERS_BYTES = HEADERS_BYTES * len(_capacities(0))


def _records(memory: mmap, page: int, record_bytes: int) -> Iterator[Record]:
    payloads = page + _ALL_HEADERS_BYTES
    for index, capacity in enumerate(_capacities(record_bytes)):
        yield Record(memory, page + index * HEADERS_BYTES, payloads, capacity)
        payloads += 2 * capacity


class Header(NamedTuple):
    """What a slate's file says of itself."""

    layout: Layout
    #: Id and start of the worker that made it.
    owner: int
    start: int
    #: Stands for the database whose jobs are on its pages; tells nothing else of it.
    database: bytes = NOBODYS

    def packed(self) -> bytes:
        """The first bytes of the file."""
        sizes = (self.layout.pages, self.layout.record_bytes)
        header = _HEADER.pack(MAGIC, VERSION, *sizes, self.owner, self.start, self.database)
        return header + _CHECKSUM.pack(crc32(header))

    @classmethod
    def unpacked(cls, data: bytes, file_bytes: int) -> Header:
        """From the first bytes of a file of that size; raises Unfit."""
        if len(data) < _HEADER.size + _CHECKSUM.size or not data.startswith(MAGIC):
            raise Unfit("this is no slate")
        _, version = _MAGIC_AND_VERSION.unpack_from(data)
        if version != VERSION:
            raise Unfit(f"it has version {version}, this is version {VERSION}")
        header = data[: _HEADER.size]
        if _CHECKSUM.unpack_from(data, _HEADER.size) != (crc32(header),):
            raise Unfit("its header is damaged")
        _, _, pages, record_bytes, owner, start, database = _HEADER.unpack(header)
        layout = Layout(pages, record_bytes)
        if layout.file_bytes != file_bytes:
            raise Unfit(f"it has {file_bytes:,} bytes instead of {layout.file_bytes:,}")
        return cls(layout, owner, start, database)
