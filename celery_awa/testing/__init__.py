"""Crash, interrupt and resume a task in a test, without broker, worker or database."""

from .faults import NotReached
from .memory_process import crash
from .task_run import TaskRun, run_task
from .transaction import FakeTransaction

__all__ = ["FakeTransaction", "NotReached", "TaskRun", "crash", "run_task"]
