"""Tasks for the tests of celery_awa.testing, of an app whose broker and results cannot be had."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery import Celery
from celery.exceptions import Ignore, Reject

from celery_awa import AwaTask, current_attempt
from celery_awa.resume import SkipItems
from celery_awa.testing import FakeTransaction

app = Celery(
    "tested",
    broker="amqp://nowhere.invalid//",
    backend="redis://nowhere.invalid/",
    set_as_current=False,
)
app.conf.update(broker_connection_timeout=0.1, awa_max_progress_bytes=4_096)


class Diary:
    """What the tasks did, told to the test."""

    def __init__(self) -> None:
        self.lines: list[Any] = []
        self.call: Callable[[Any], Any] = lambda line: None

    def note(self, line: Any) -> None:
        """Note it, and do what the test does at it."""
        self.lines.append(line)
        self.call(line)

    def do_at(self, line: Any, what: Callable[[], Any]) -> None:
        """Have this done when a task notes that line, the first time."""

        def call(noted: Any) -> None:
            if noted == line:
                self.call = lambda line: None
                what()

        self.call = call

    def empty(self) -> None:
        """As it was at first."""
        self.lines, self.call = [], lambda line: None


diary = Diary()


@app.task(shared=False, base=AwaTask, bind=True)
def loop(self: Any, count: int, every: int = 100) -> int:
    """Do each item, and keep a cursor after every so many."""
    for number in self.iterate(range(count), checkpoint_every=every, checkpoint_interval=1e6):
        diary.note(number)
    return count


@app.task(shared=False, base=AwaTask, bind=True)
def two_loops(self: Any) -> str:
    for name in ("rows", "files"):
        for number in self.iterate(range(3), name=name, checkpoint_every=1):
            diary.note((name, number))
    return "done"


@app.task(shared=False, base=AwaTask, bind=True)
def batches(self: Any) -> None:
    for batch in self.iterate(range(10), batch_size=4):
        diary.note(batch)


@app.task(shared=False, base=AwaTask, bind=True)
def skipping(self: Any) -> int:
    rows = self.iterate(range(5), on_item_error=SkipItems(), checkpoint_every=1)
    for number in rows:
        with rows.item():
            diary.note(number)
            if number == 1:
                raise ValueError(number)
    return int(rows.skipped)


@app.task(shared=False, base=AwaTask, bind=True)
def poisoned(self: Any) -> int:
    """Do items, one of which may kill the worker."""
    rows = self.iterate(range(3), kill_limit=2)
    for number in rows:
        diary.note(number)
    return int(rows.skipped)


@app.task(shared=False, base=AwaTask, bind=True)
def in_steps(self: Any) -> str:
    for name in ("fetch", "load", "tell"):
        with self.step(name) as step:
            if step.todo:
                diary.note(name)
    return "done"


@app.task(shared=False, base=AwaTask, bind=True)
def unlooking(self: Any) -> str:
    """Finish a step, and go on without a look at whether to stop."""
    with self.step("only") as step:
        diary.note(("todo", step.todo))
    self.update_metadata({"late": 1})
    diary.note((str(self.stop_reason), self.flush_progress()))
    return "done"


@app.task(shared=False, base=AwaTask, bind=True)
def by_hand(self: Any, count: int) -> int:
    """Keep a row's number with update_metadata, and flush after each second."""
    for number in range(self.checkpoint.get("last", 0) + 1, count + 1):
        diary.note(number)
        self.set_progress(number * 100 / count, f"row {number}")
        self.update_metadata({"last": number})
        if number % 2 == 0:
            diary.note(("flushed", self.flush_progress()))
    return count


@app.task(shared=False, base=AwaTask, bind=True)
def tidying(self: Any) -> None:
    """Report in a ``finally``, and catch whatever comes."""
    try:
        self.update_metadata({"a": 1})
        diary.note("work")
    except BaseException:
        diary.note("caught")
    finally:
        self.update_metadata({"late": 1})
        self.flush_progress()
        diary.note("flushed")


@app.task(shared=False, base=AwaTask, bind=True, max_retries=2, default_retry_delay=7)
def retried(self: Any, fails: int) -> dict[str, Any]:
    """Fail so often."""
    diary.note(self.request.retries)
    self.update_metadata({f"try {self.request.retries}": self.attempt.number})
    if self.request.retries < fails:
        raise self.retry(exc=OSError("away"))
    return dict(self.checkpoint)


@app.task(
    shared=False,
    base=AwaTask,
    bind=True,
    autoretry_for=(OSError,),
    retry_backoff=4,
    retry_jitter=False,
)
def retried_by_celery(self: Any) -> int:
    if self.request.retries < 2:
        raise OSError("away")
    return int(self.request.retries)


@app.task(shared=False, base=AwaTask, bind=True)
def retried_with_others(self: Any, word: str) -> str:
    if word == "first":
        raise self.retry(args=("second",), countdown=0)
    return word


@app.task(shared=False, base=AwaTask, bind=True)
def snoozing(self: Any) -> str:
    if "slept" not in self.checkpoint:
        self.update_metadata({"slept": True})
        self.snooze(60)
    return "awake"


@app.task(shared=False, base=AwaTask, bind=True)
def asking(self: Any) -> list[Any]:
    """Wait for two callbacks, one after the other."""
    answers = []
    for name in ("callback", "carrier"):
        if name not in self.callbacks:
            diary.note(self.callback_token(name=name))
        answers.append(self.wait_for_callback(60, name=name))
    return answers


@app.task(shared=False, base=AwaTask, bind=True)
def asking_again(self: Any) -> Any:
    """Ask in each attempt, whatever was answered, and leave off in the first."""
    diary.note(self.callback_payload)
    self.callback_token()
    diary.note("asked")
    if self.callback_payload is None and not self.checkpoint:
        self.update_metadata({"asked": 1})
        self.interrupt()
    return self.wait_for_callback()


@app.task(shared=False, base=AwaTask, bind=True)
def retried_after_a_crash(self: Any) -> int:
    """Catch whatever comes, and try again."""
    try:
        diary.note("work")
    except BaseException:
        raise self.retry() from None
    return int(self.request.retries)


@app.task(shared=False, base=AwaTask, bind=True)
def changing_what_it_found(self: Any) -> None:
    found = self.checkpoint["list"]
    found.append(len(found))
    diary.note(found)
    raise OSError("away")


@app.task(shared=False, base=AwaTask, bind=True)
def ending(self: Any, how: str) -> None:
    """End in a way of Celery's."""
    self.update_metadata({"kept": 1})
    if how == "ignore":
        raise Ignore
    raise Reject("no", requeue=how == "requeue")


@app.task(shared=False, base=AwaTask, bind=True)
def replaced(self: Any) -> Any:
    raise self.replace(loop.si(3))


class Versioned(AwaTask):
    """Of the second version; the first counted lines from 1."""

    checkpoint_version = 2

    def migrate_checkpoint(self, metadata: dict[str, Any], version: int) -> Any:
        return {"row": metadata["line"] - 1} if version == 1 else None


class Unmigratable(AwaTask):
    """Whose next version has a bug."""

    checkpoint_version = 1

    def migrate_checkpoint(self, metadata: dict[str, Any], version: int) -> Any:
        raise KeyError("line")


@app.task(shared=False, base=Unmigratable, bind=True)
def unmigratable(self: Any) -> None:
    """Never called."""


@app.task(shared=False, base=Versioned, bind=True)
def versioned(self: Any) -> dict[str, Any]:
    found = dict(self.checkpoint)
    diary.note(found)
    self.update_metadata({"seen": True})
    self.interrupt()


#: What tasks write through, by name; the test's to fill.
connections: dict[str, Callable[[], Any]] = {}


@app.task(shared=False, base=AwaTask, bind=True)
def committing(self: Any, connection_name: str = "orders") -> int:
    """Insert each item, and commit the cursor with it."""
    rows = self.iterate(range(5))
    for number in rows:
        with connections[connection_name]() as connection:
            if isinstance(connection, FakeTransaction):
                connection.insert(number)
            rows.checkpoint_in(connection)
            diary.note(number)
        diary.note(f"after {number}")
    return int(rows.done)


@app.task(shared=False, base=AwaTask, bind=True)
def committing_around_a_step(self: Any) -> None:
    with FakeTransaction() as connection, self.step("only") as step:
        assert step.todo
        self.checkpoint_in(connection, {"paid": 1})


@app.task(shared=False, base=AwaTask, bind=True)
def committing_values(self: Any, values: Any) -> None:
    self.checkpoint_in(object(), {"a": {1}} if values == "a set" else values)


@app.task(shared=False, base=AwaTask, bind=True)
def committing_both(self: Any) -> None:
    self.update_metadata({"paid": 0, "told": 1})
    self.checkpoint_in(object(), {"paid": 1})
    self.interrupt()


@app.task(shared=False, base=AwaTask)
def unbound(word: str) -> str:
    attempt = current_attempt()
    assert attempt is not None
    attempt.update_metadata({"word": word})
    return word.upper()
