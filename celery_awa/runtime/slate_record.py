"""Runs in the worker and its pool children, any thread: one record of a page, never read torn.

A record has two halves, written in turn. The payload of a half is written first, then its
header: sequence, generation, length and a checksum over all of these, the payload, and the token
of the attempt. A writer that is killed anywhere leaves the other half whole, and what an earlier
attempt left does not pass the checksum of the next.
"""

from __future__ import annotations

import struct
from mmap import mmap
from typing import NamedTuple
from zlib import crc32

#: Bytes of the headers of both halves of one record.
HEADERS_BYTES = 48

# Of the machine's own order: a slate never leaves its machine. 24 bytes, no padding.
_HEADER = struct.Struct("@QQII")
_BOTH_HEADERS = struct.Struct("@QQIIQQII")
_COVERED = struct.Struct("@QQI")
_SEQUENCES = struct.Struct("@Q16xQ")

_write_header = _HEADER.pack_into
_read_headers = _BOTH_HEADERS.unpack_from
_read_sequences = _SEQUENCES.unpack_from
_pack_covered = _COVERED.pack

# A running writer overtakes a reader now and then; each try is a few microseconds.
_TRIES = 16


class Torn(Exception):
    """Both halves were being written, again and again; there is a value, but not for now."""


class Half(NamedTuple):
    """A whole value: its place in the order of writing, and what was written."""

    sequence: int
    generation: int
    data: bytes | None


#: What a record holds to which this attempt wrote nothing.
NOTHING = Half(0, 0, None)


class Record:
    """One record of one page, for its writer and its readers.

    ``seed`` is the checksum of the attempt's token; a value is found only under the seed it was
    written with. One writer at a time; readers need no lock.
    """

    __slots__ = ("_first", "_headers", "_memory", "_second", "_turn", "capacity")

    def __init__(self, memory: mmap, headers: int, payloads: int, capacity: int) -> None:
        self.capacity = capacity
        self._memory = memory
        self._headers = headers
        self._first = payloads
        self._second = payloads + capacity
        self._turn = 0

    def write(self, seed: int, generation: int, data: bytes) -> None:
        """Put ``data`` in the place of what was written before; ValueError if it does not fit.

        Which half is next is read from the memory itself, where one call changes it: so an
        exception that strikes between any two steps leaves the newest value alone, and so does
        a write by a signal's handler in the midst of this one, which this one then gives way to.
        """
        size = len(data)
        if size > self.capacity:
            raise ValueError(f"{size} bytes do not fit into a record of {self.capacity}")
        self._turn = turn = self._turn + 1
        memory = self._memory
        header = self._headers
        first, second = _read_sequences(memory, header)
        if first < second:
            sequence = second + 1
            start = self._first
        else:
            sequence = first + 1
            start = self._second
            header += 24
        checksum = crc32(data, crc32(_pack_covered(sequence, generation, size), seed))
        # A signal's handler runs after a call, never between these questions and what follows.
        if self._turn == turn:
            memory[start : start + size] = data
        if self._turn == turn:
            _write_header(memory, header, sequence, generation, size, checksum)

    def forget(self) -> None:
        """Take both halves away. Not one step for a reader: what they say must not count by now."""
        headers = slice(self._headers, self._headers + HEADERS_BYTES)
        self._memory[headers] = bytes(HEADERS_BYTES)

    def find(self, seed: int) -> Half:
        """As ``read``, for a record that is written so rarely that what is torn is another's."""
        try:
            return self.read(seed)
        except Torn:
            return NOTHING

    def read(self, seed: int) -> Half:
        """The newest whole value; NOTHING if none was ever complete. Raises Torn."""
        two_begun = False
        for _ in range(_TRIES):
            headers = _read_headers(self._memory, self._headers)
            first, second = (headers[:4], self._first), (headers[4:], self._second)
            older, newer = (first, second) if headers[0] < headers[4] else (second, first)
            half = self._half(seed, *newer) or self._half(seed, *older)
            if half is not None:
                return half
            if not newer[0][0]:
                return NOTHING
            # A header that is being written is all zeros for a moment, so once is enough.
            two_begun = two_begun or bool(older[0][0])
        if two_begun:
            raise Torn
        # The first value of all was begun, and its writer did not live to end it.
        return NOTHING

    def _half(self, seed: int, header: tuple[int, ...], start: int) -> Half | None:
        sequence, generation, size, checksum = header
        if not sequence or size > self.capacity:
            return None
        # A copy, since the writer may be at this half again.
        data = self._memory[start : start + size]
        covered = crc32(_pack_covered(sequence, generation, size), seed)
        return Half(sequence, generation, data) if crc32(data, covered) == checksum else None
