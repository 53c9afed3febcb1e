"""Runs in the worker and its pool children, any thread: what the small records of a page say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple
from zlib import crc32

from ..model import Lease
from .slate_layout import ANSWER, IDENTITY, LEASE, PROCESS, TASK_ID_BYTES, PageRecords

#: The seed of what belongs to the page and not to one attempt.
PAGE_SEED = 0


@dataclass(frozen=True, slots=True)
class Process:
    """A process, by its id and the time it started."""

    pid: int
    start: int

    def packed(self) -> bytes:
        return PROCESS.pack(self.pid, self.start)

    @classmethod
    def owning(cls, records: PageRecords) -> Process | None:
        """The process that took the page, dead or alive."""
        data = records.owner.find(PAGE_SEED).data
        return cls(*PROCESS.unpack(data)) if data else None


@dataclass(frozen=True, slots=True)
class Identity:
    """Which attempt a page carries, and in which process."""

    process: Process
    token: str
    task_id: str

    @property
    def seed(self) -> int:
        return crc32(self.token.encode())

    def packed(self) -> bytes:
        """Raises ValueError where token or task id are not what they may be."""
        token, task_id = self.token.encode(), self.task_id.encode("utf-8", "surrogatepass")
        if len(token) != 32:
            raise ValueError(f"an attempt's token has 32 characters, not {self.token!r}")
        if len(task_id) > TASK_ID_BYTES:
            raise ValueError(f"a task's id may take {TASK_ID_BYTES:,} bytes, not {len(task_id):,}")
        return IDENTITY.pack(self.process.pid, self.process.start, token) + task_id

    @classmethod
    def carried(cls, records: PageRecords) -> Identity | None:
        """The attempt that the page carries, None if it is idle. Raises Torn."""
        data = records.identity.read(PAGE_SEED).data
        if data is None:
            return None
        pid, start, token = IDENTITY.unpack_from(data)
        task_id = data[IDENTITY.size :].decode("utf-8", "surrogatepass")
        identity = cls(Process(pid, start), token.decode(), task_id)
        closed = records.closed.find(identity.seed).sequence
        return None if closed else identity


class Answer(NamedTuple):
    """What the worker wrote back to an attempt, the last of it."""

    acknowledged: int = 0
    confirmed_at: float = 0.0
    lost: bool = False
    #: Somebody asked for the job's cancellation.
    cancel: bool = False

    def write(self, records: PageRecords, seed: int) -> None:
        packed = ANSWER.pack(self.confirmed_at, self.lost, self.cancel)
        records.answer.write(seed, self.acknowledged, packed)

    @classmethod
    def read(cls, records: PageRecords, seed: int) -> Answer:
        half = records.answer.find(seed)
        return cls(half.generation, *ANSWER.unpack(half.data)) if half.data else cls()


def write_lease(records: PageRecords, seed: int, lease: Lease | None) -> None:
    packed = LEASE.pack(lease.job_id, lease.run_lease) if lease is not None else b""
    records.lease.write(seed, 0, packed)


def read_lease(records: PageRecords, seed: int) -> Lease | None:
    data = records.lease.find(seed).data
    return Lease(*LEASE.unpack(data)) if data else None
