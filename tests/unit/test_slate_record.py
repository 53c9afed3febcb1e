"""Records whose writer is killed, struck or interrupted at any point of a write."""

from __future__ import annotations

import random
from collections.abc import Iterator
from mmap import mmap
from zlib import crc32

import pytest

from celery_awa.runtime.slate_record import HEADERS_BYTES, NOTHING, Record, Torn
from tests.strikes import interrupted, struck_at_every_step

SEED, OTHER_SEED = crc32(b"a" * 32), crc32(b"b" * 32)
CAPACITY = 64
SIZE = HEADERS_BYTES + 2 * CAPACITY


def value(generation: int) -> bytes:
    """A value that tells its generation, of a length of its own."""
    return str(generation).encode() * (1 + generation * 7 % 20)


def write(record: Record, generation: int, seed: int = SEED) -> None:
    record.write(seed, generation, value(generation))


def generation_of(record: Record, seed: int = SEED) -> int:
    """The generation that is read, 0 for none; the value must be whole."""
    half = record.read(seed)
    assert half.data == (value(half.generation) if half.sequence else None)
    return half.generation


@pytest.fixture
def memory() -> Iterator[mmap]:
    with mmap(-1, SIZE) as memory:
        yield memory


@pytest.fixture
def record(memory: mmap) -> Record:
    return Record(memory, 0, HEADERS_BYTES, CAPACITY)


def test_the_last_of_many_writes_is_read(record: Record) -> None:
    assert record.read(SEED) == NOTHING
    for generation in range(1, 20):
        write(record, generation)
        assert generation_of(record) == generation


def test_another_object_over_the_same_memory_goes_on_in_turn(memory: mmap, record: Record) -> None:
    write(record, 1)
    write(Record(memory, 0, HEADERS_BYTES, CAPACITY), 2)
    write(record, 3)
    assert generation_of(record) == 3


def test_empty_and_full_values_are_values(record: Record) -> None:
    record.write(SEED, 1, b"")
    assert record.read(SEED).data == b""
    record.write(SEED, 2, b"x" * CAPACITY)
    assert record.read(SEED).data == b"x" * CAPACITY


def test_a_value_that_does_not_fit_is_refused_and_changes_nothing(record: Record) -> None:
    write(record, 1)
    with pytest.raises(ValueError, match="65 bytes do not fit into a record of 64"):
        record.write(SEED, 2, b"x" * 65)
    assert generation_of(record) == 1


def test_what_was_written_under_another_seed_is_never_read(record: Record) -> None:
    write(record, 1, OTHER_SEED)
    assert record.read(SEED) == NOTHING
    write(record, 2, OTHER_SEED)
    with pytest.raises(Torn):
        record.read(SEED)
    assert record.find(SEED) == NOTHING
    write(record, 3)
    assert generation_of(record) == 3
    assert generation_of(record, OTHER_SEED) == 2


def test_nothing_is_left_of_a_forgotten_record(record: Record) -> None:
    write(record, 1)
    write(record, 2)
    record.forget()
    assert record.read(SEED) == NOTHING
    write(record, 3)
    assert generation_of(record) == 3


def torn(before: bytes, after: bytes, rng: random.Random) -> Iterator[bytes]:
    """Memory that a kill may leave between the two: the payload copied in part, then the header.

    And some in which the bytes arrived in any order.
    """
    changed = [index for index in range(SIZE) if before[index] != after[index]]
    in_order = sorted(changed, key=lambda index: (index < HEADERS_BYTES, index))
    orders = [in_order, *(rng.sample(changed, len(changed)) for _ in range(20))]
    for order in orders:
        image = bytearray(before)
        for index in order:
            yield bytes(image)
            image[index] = after[index]


def test_a_write_torn_at_any_byte_leaves_the_value_before(memory: mmap, record: Record) -> None:
    rng = random.Random(1)
    for generation in range(1, 12):
        before = memory[:]
        write(record, generation)
        after = memory[:]
        for image in torn(before, after, rng):
            memory[:] = image
            assert generation_of(record) == generation - 1
        memory[:] = after


@pytest.mark.parametrize("field", range(0, 24, 4))
def test_every_field_of_a_header_is_under_the_checksum(
    memory: mmap, record: Record, field: int
) -> None:
    write(record, 1)  # in the second half
    memory[24 + field] ^= 1
    assert record.read(SEED) == NOTHING


def test_an_exception_that_strikes_anywhere_loses_no_value_that_could_be_read(
    memory: mmap, record: Record
) -> None:
    write(record, 1)
    write(record, 2)
    image = memory[:]

    def write_next() -> None:
        memory[:] = image
        write(record, 3)

    for _ in struck_at_every_step(write_next):
        readable = generation_of(record)
        assert readable in (2, 3)
        left = memory[:]
        # However the next write ends, killed or struck as well, the page does not go back.
        for _ in struck_at_every_step(lambda left=left: _write_over(memory, left, record)):
            assert generation_of(record) in (readable, 4)
        assert generation_of(record) == 4


def _write_over(memory: mmap, image: bytes, record: Record) -> None:
    memory[:] = image
    write(record, 4)


def test_a_write_by_a_signals_handler_in_the_midst_of_a_write_stands(record: Record) -> None:
    write(record, 1)
    read = []

    def newer() -> None:
        write(record, 2 * len(read) + 3)
        assert generation_of(record) == 2 * len(read) + 3

    while interrupted(lambda: write(record, 2 * len(read) + 2), len(read), newer):
        read.append(generation_of(record) - 2 * len(read))
    # Where the handler ran before the write began in earnest, it is the handler's that is older.
    assert read == sorted(read)
    assert read.count(3) >= 5


class OvertakenMemory(bytearray):
    """Memory whose writer puts down another value each time a reader copies a payload."""

    record: Record
    generation = 2
    overtakings = 0

    def __getitem__(self, key):  # type: ignore[no-untyped-def]  # as bytearray's
        if self.overtakings:
            self.overtakings -= 1
            for _ in range(2):
                self.generation += 1
                write(self.record, self.generation)
        return super().__getitem__(key)


def test_a_reader_that_a_writer_overtakes_looks_again() -> None:
    memory = OvertakenMemory(SIZE)
    memory.record = record = Record(memory, 0, HEADERS_BYTES, CAPACITY)  # type: ignore[arg-type]  # behaves as mmap
    write(record, 1)
    write(record, 2)
    memory.overtakings = 5
    assert generation_of(record) == memory.generation == 12
    memory.overtakings = 1_000
    with pytest.raises(Torn):
        record.read(SEED)
