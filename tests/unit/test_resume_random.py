"""Random runs of a loop, with crashes, errors and stops: nothing is lost, little is repeated."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from celery_awa.resume import SkipItems
from celery_awa.resume.stops import Interrupt

from .resume_attempt import FakeAttempt, Killed, Run

#: What happens in an attempt, and after how many pieces of work.
CHAOS = st.lists(
    st.tuples(st.sampled_from(["killed", "raises", "stops", "breaks"]), st.integers(1, 12)),
    max_size=8,
)
COUNT = st.integers(0, 25)
EVERY = st.integers(1, 7)
BATCH = st.none() | st.integers(1, 5)


class Raised(Exception):
    """The body of a task failed."""


def _strike(attempt: FakeAttempt, event: str) -> None:
    if event == "killed":
        raise Killed
    if event == "raises":
        raise Raised


def _settled(attempt: FakeAttempt, event: str) -> None:
    if event != "killed":
        attempt.resumption.settle()


@given(chaos=CHAOS, count=COUNT, every=EVERY, batch=BATCH)
def test_each_item_is_done_in_order_and_repeated_only_where_it_may_be(
    chaos: list[tuple[str, int]], count: int, every: int, batch: int | None
) -> None:
    run, done = Run(), 0
    for event, after in [*chaos, ("", 0)]:
        attempt = run.attempt()
        if event == "stops":
            attempt.stop_after(after)
        began: list[int] = []
        pieces = last = 0
        try:
            for value in attempt.resumption.iterate(
                range(count), batch_size=batch, checkpoint_every=every, checkpoint_interval=1e6
            ):
                items = value if batch else [value]
                began.extend(items)
                pieces, last = pieces + 1, len(items)
                if pieces == after and event:
                    if event == "breaks":
                        break
                    _strike(attempt, event)
        except (Killed, Raised, Interrupt):
            pass
        _settled(attempt, event)
        # It goes on without a gap, and repeats at most what was not kept yet.
        first = began[0] if began else count
        assert began == list(range(first, first + len(began)))
        assert first <= done
        assert done - first <= (0 if batch else every - 1)
        unfinished = event in ("killed", "raises", "breaks") and pieces == after
        done = max(done, first + len(began) - (last if unfinished else 0))
    assert done == count
    assert run.loop() == {"finished": True, "done": count}


@given(chaos=CHAOS, count=COUNT, every=EVERY, batch=BATCH, commits=st.booleans())
def test_what_is_committed_with_its_work_is_done_exactly_once(
    chaos: list[tuple[str, int]], count: int, every: int, batch: int | None, commits: bool
) -> None:
    """A strike comes before the commit of its piece, or right after it."""
    run, table = Run(), list[int]()
    for event, after in [*chaos, ("", 0)]:
        attempt = run.attempt()
        if event == "stops":
            attempt.stop_after(after)
        rows = attempt.resumption.iterate(
            range(count), batch_size=batch, checkpoint_every=every, checkpoint_interval=1e6
        )
        pieces = 0
        try:
            for value in rows:
                pieces += 1
                struck = pieces == after and event
                with run.transaction() as connection:
                    rows.checkpoint_in(connection)
                    if struck and not commits:
                        _strike(attempt, event)
                # The transaction's other half: what the task wrote in it.
                table.extend(value if batch else [value])
                if struck:
                    _strike(attempt, event)
                    if event == "breaks":
                        break
        except (Killed, Raised, Interrupt):
            pass
        _settled(attempt, event)
    assert table == list(range(count))


@given(
    count=st.integers(1, 15),
    poison=st.sets(st.integers(0, 14), max_size=4),
    limit=st.integers(1, 3),
    batch=BATCH,
    commits=st.booleans(),
    skips=st.booleans(),
)
def test_what_kills_its_worker_is_skipped_after_so_many_tries_and_all_others_are_done(
    count: int, poison: set[int], limit: int, batch: int | None, commits: bool, skips: bool
) -> None:
    run = Run()
    tries: dict[int, int] = {}
    done: list[int] = []
    for _ in range(100):
        rows = run.attempt().resumption.iterate(
            range(count),
            batch_size=batch,
            kill_limit=limit,
            on_item_error=SkipItems() if skips else "raise",
        )
        try:
            for value in rows:
                items = value if batch else [value]
                with rows.item(), run.transaction() as connection:
                    for item in poison.intersection(items):
                        tries[item] = tries.get(item, 0) + 1
                    if poison.intersection(items):
                        raise Killed
                    if commits:
                        rows.checkpoint_in(connection)
                    done.extend(items)
        except Killed:
            continue
        break
    else:
        raise AssertionError("it never ended")
    assert set(tries.values()) <= {limit}
    size = batch or 1
    spoiled = {item // size for item in poison if item < count}
    assert rows.skipped == len(spoiled)
    assert done == [item for item in range(count) if item // size not in spoiled]
