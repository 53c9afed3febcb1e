"""Exceptions that strike between two steps of our code, as those of a signal's handler do."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterator
from itertools import count
from types import CodeType, FrameType
from typing import Any

# After these the interpreter looks whether a signal's handler is to run.
_CALLS = ("CALL", "RESUME", "JUMP_BACKWARD")


class Strike(BaseException):
    """What strikes: no handler for ordinary exceptions may catch it."""


def struck_at_every_step(call: Callable[[], object]) -> Iterator[int]:
    """Call it again and again, each time struck one bytecode later, until it ends unharmed.

    Yields after each strike, and not after the last call.
    """
    for step in count():
        if not _struck(call, step):
            assert step, "nothing could be struck"
            return
        yield step


def interrupted(call: Callable[[], object], after_call: int, work: Callable[[], None]) -> bool:
    """Call it and run ``work`` in its midst, where a signal's handler could run.

    ``after_call`` counts these places from 0. False if there are not so many.
    """
    left = after_call

    def handle(frame: FrameType) -> None:
        nonlocal left
        if _follows_a_call(frame.f_code, frame.f_lasti):
            if left == 0:
                work()
            left -= 1

    _traced(call, handle)
    return left < 0


def _struck(call: Callable[[], object], step: int) -> bool:
    left = step

    def strike(_: FrameType) -> None:
        nonlocal left
        if left == 0:
            raise Strike
        left -= 1

    try:
        _traced(call, strike)
    except Strike:
        return True
    return False


def _traced(call: Callable[[], object], at_opcode: Callable[[FrameType], None]) -> None:
    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if "celery_awa" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            at_opcode(frame)
        return trace

    before = sys.gettrace()
    # Python 3.12 traces opcodes only if some frame asked for it before.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)


def _follows_a_call(code: CodeType, offset: int) -> bool:
    previous = ""
    for instruction in dis.get_instructions(code):
        if instruction.offset == offset:
            return previous.startswith(_CALLS)
        previous = instruction.opname
    return False
