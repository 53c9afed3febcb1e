"""The thread that owns a process's connection: what others hand to it, and its services."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from celery_awa import native
from celery_awa.errors import RowLocked, SchemaError, StoreRefused, StoreUnavailable
from celery_awa.runtime import database_thread, errand
from celery_awa.runtime.database_thread import DatabaseThread
from celery_awa.runtime.service import NEVER
from celery_awa.store.protocol import Store
from tests.fake_store import FakeDatabase, FakeStore
from tests.runtime_parts import (
    SOON,
    MakeThread,
    Pass,
    failing,
    is_done,
    knows,
)
from tests.waiting import eventually

# Errands.


def test_an_errand_is_answered_from_a_thread_of_its_own(make_thread: MakeThread) -> None:
    thread = make_thread(name="of-the-database")
    assert thread.ask(lambda store: threading.current_thread().name, SOON) == "of-the-database"


def test_asking_raises_in_time_while_the_database_hangs_and_works_later(
    thread: DatabaseThread, database: FakeDatabase
) -> None:
    with database.hanging():
        began = time.monotonic()
        with pytest.raises(StoreUnavailable, match=r"within 0\.05 s"):
            thread.ask(knows("hung"), 0.05)
        assert time.monotonic() - began < 1
    assert thread.ask(knows("task"), SOON) is False


def test_what_nobody_waits_for_any_more_is_not_tried(
    thread: DatabaseThread, database: FakeDatabase
) -> None:
    tried: list[str] = []
    with database.hanging():
        thread.post(knows("hung"))
        for _ in range(3):
            with pytest.raises(StoreUnavailable):
                thread.ask(lambda store: tried.append("late"), 0.01)
    thread.ask(knows("task"), SOON)
    assert tried == []


def test_asking_says_why_there_was_no_answer(
    thread: DatabaseThread, database: FakeDatabase
) -> None:
    database.go_away("no route to it")
    with pytest.raises(StoreUnavailable, match="no route to it"):
        thread.ask(knows("task"), 0.1)


def test_any_number_of_seconds_may_be_asked_for(thread: DatabaseThread) -> None:
    assert thread.ask(knows("task"), float("inf")) is False


def test_work_is_kept_until_it_is_confirmed(thread: DatabaseThread, database: FakeDatabase) -> None:
    database.go_away()
    posted = thread.post(knows("task"))
    eventually(lambda: not thread.answering)
    assert not posted.done
    database.come_back()
    eventually(lambda: posted.done)
    assert posted.answer is False
    assert database.statements == ["knows"]


def test_work_whose_answer_was_lost_is_repeated(
    thread: DatabaseThread, database: FakeDatabase
) -> None:
    database.unanswered.append("knows")
    assert thread.ask(knows("task"), SOON) is False
    assert database.statements == ["knows", "knows"]


def test_above_the_limit_the_oldest_is_dropped_told_and_counted(
    thread: DatabaseThread,
    database: FakeDatabase,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(database_thread, "KEPT_LIMIT", 3)
    settled: list[int] = []
    with database.hanging():
        posted = [
            thread.post(knows("task"), settled=lambda n=n: settled.append(n)) for n in range(5)
        ]
        assert thread.dropped == 2
        assert settled == [0, 1]
        assert [isinstance(one.error, StoreUnavailable) for one in posted] == [True] * 2 + [
            False
        ] * 3
    eventually(lambda: all(map(is_done, posted)))
    assert sorted(settled) == [0, 1, 2, 3, 4]
    told = [record for record in caplog.records if "dropped" in record.getMessage()]
    assert len(told) == 1


def test_who_waits_is_never_dropped_for_what_is_kept(
    thread: DatabaseThread, database: FakeDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_thread, "KEPT_LIMIT", 1)
    answers: list[bool] = []
    with database.hanging():
        asker = threading.Thread(target=lambda: answers.append(thread.ask(knows("task"), SOON)))
        asker.start()
        eventually(lambda: len(thread._errands) == 1)
        for _ in range(3):
            thread.post(knows("kept"))
        assert thread.dropped == 2
    asker.join(SOON)
    assert answers == [False]


def test_a_locked_row_is_tried_again_and_is_no_failure_of_the_database(
    thread: DatabaseThread, caplog: pytest.LogCaptureFixture
) -> None:
    tries: list[int] = []

    def work(store: Store) -> int:
        tries.append(1)
        if len(tries) < 3:
            raise RowLocked
        return len(tries)

    assert thread.ask(work, SOON) == 3
    assert thread.answering
    assert caplog.records == []


def test_waiting_for_a_locked_row_in_vain_says_so(thread: DatabaseThread) -> None:
    with pytest.raises(StoreUnavailable, match="somebody holds it"):
        thread.ask(failing(RowLocked("somebody holds it")), 0.05)
    assert thread.answering


def test_what_is_refused_is_told_and_not_tried_again(
    thread: DatabaseThread, database: FakeDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    posted = thread.post(failing(StoreRefused("by a trigger")))
    eventually(lambda: posted.done)
    thread.ask(knows("task"), SOON)
    assert database.count("knows") == 2
    assert thread.answering
    assert "by a trigger" in caplog.text


def test_who_asks_hears_of_a_refusal(thread: DatabaseThread) -> None:
    with pytest.raises(StoreRefused, match="by a trigger"):
        thread.ask(failing(StoreRefused("by a trigger")), SOON)


@pytest.mark.parametrize("error", [ZeroDivisionError("a bug"), SystemExit(3)])
def test_nothing_foreign_is_raised_into_who_asks(
    thread: DatabaseThread, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(StoreUnavailable, match=type(error).__name__):
        thread.ask(failing(error), SOON)
    assert "unexpected" in caplog.text
    assert thread.ask(knows("task"), SOON) is False


def test_work_that_always_fails_holds_up_no_other(
    thread: DatabaseThread, database: FakeDatabase
) -> None:
    poisons = [thread.post(failing(StoreUnavailable("poison"))) for _ in range(5)]
    service = Pass(lambda opened: opened().knows("service"))
    thread.add_service(service)
    for _ in range(3):
        assert thread.ask(knows("task"), SOON) is False
        service.passed.clear()
        service.at = time.monotonic()
        thread.expect(service.at)
        assert service.passed.wait(SOON)
    assert not any(map(is_done, poisons))
    for poison in poisons:
        thread.cancel(poison)


def test_a_locked_row_is_not_tried_without_a_pause(
    thread: DatabaseThread, database: FakeDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errand, "LOCKED_PAUSE", 3600.0)
    posted = thread.post(failing(RowLocked()))
    eventually(lambda: posted.reason)
    for _ in range(20):
        thread.ask(lambda store: None, SOON)
    assert database.count("knows") == 1
    thread.cancel(posted)


def test_what_goes_wrong_when_an_errand_is_settled_is_told(
    thread: DatabaseThread, caplog: pytest.LogCaptureFixture
) -> None:
    posted = thread.post(knows("task"), settled=lambda: 1 / 0)
    eventually(lambda: "unexpected" in caplog.text)
    assert posted.done
    assert thread.ask(knows("task"), SOON) is False


def test_a_store_that_cannot_be_opened_for_any_reason_is_tried_again(
    database: FakeDatabase,
    make_thread: MakeThread,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    opening = database.open
    errors = [OSError("too many files"), ValueError("a user's own code")]

    def open_store() -> FakeStore:
        if errors:
            raise errors.pop()
        return opening()

    monkeypatch.setattr(database, "open", open_store)
    assert make_thread().ask(knows("task"), SOON) is False
    assert errors == []
    assert "cannot use its database" in caplog.text


def test_a_schema_that_is_missing_is_told_and_looked_for_again(
    thread: DatabaseThread, database: FakeDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    database.raising["knows"] = SchemaError("run the migration")
    posted = thread.post(knows("task"))
    eventually(lambda: "run the migration" in caplog.text)
    assert not thread.answering
    database.raising.clear()
    eventually(lambda: posted.done)
    assert thread.answering


# Services and wake-ups.


def test_a_service_runs_when_it_is_due(thread: DatabaseThread) -> None:
    service = Pass()
    thread.add_service(service)
    thread.ask(knows("task"), SOON)
    service.at = due = time.monotonic() + 0.03
    thread.expect(due)
    assert service.passed.wait(SOON)
    assert time.monotonic() >= due


@pytest.mark.parametrize("error", [TypeError("a bug"), StoreUnavailable("poison"), RowLocked()])
def test_a_service_that_fails_holds_up_no_other(thread: DatabaseThread, error: Exception) -> None:
    def fail(opened: Callable[[], Store]) -> None:
        broken.at = 0.0
        opened()
        raise error

    broken, sound = Pass(fail), Pass()
    thread.add_service(broken)
    thread.add_service(sound)
    broken.at = 0.0
    thread.expect(0.0)
    for passes in (1, 2, 3):
        assert broken.passed.wait(SOON)
        sound.at = time.monotonic()
        thread.expect(sound.at)
        eventually(lambda passes=passes: sound.passes == passes)
        assert thread.ask(knows("task"), SOON) is False
    # Nor does it run without a pause.
    assert broken.passes < 100


def test_a_service_that_cannot_say_when_it_is_due_holds_up_nothing(
    thread: DatabaseThread, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    service = Pass()
    monkeypatch.setattr(service, "due", lambda: 1 / 0)
    thread.add_service(service)
    assert thread.ask(knows("task"), SOON) is False
    assert "unexpected" in caplog.text


def test_expecting_wakes_only_a_thread_that_would_sleep_too_long(
    thread: DatabaseThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Pass()
    thread.add_service(service)
    service.at = time.monotonic() + 100
    thread.expect(service.at)
    eventually(lambda: thread._sleeping_until == service.at)
    rung: list[int] = []
    with monkeypatch.context() as patched:
        patched.setattr(thread._bell, "ring", lambda: rung.append(1))
        thread.expect(service.at)
        thread.expect(service.at + 50)
        assert rung == []
        thread.expect(service.at - 50)
        assert rung == [1]


def test_what_is_expected_while_the_thread_makes_up_its_mind_is_not_slept_through(
    thread: DatabaseThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Pass()
    asked: list[int] = []

    def due() -> float | None:
        answer = service.at
        if service.passes == 2 and not asked:
            asked.append(1)
            service.at = 0.0  # what another thread does just after the service was asked
            thread.expect(0.0)
        return answer

    monkeypatch.setattr(service, "due", due)
    thread.add_service(service)
    for passes in (1, 2):
        service.at = 0.0
        thread.expect(0.0)
        eventually(lambda passes=passes: service.passes >= passes)
        # Asleep, and with no ring left that would wake it again.
        eventually(lambda: thread._sleeping_until == NEVER and thread._bell._silence.locked())
    eventually(lambda: service.passes == 3)


def test_no_wake_up_is_lost(thread: DatabaseThread) -> None:
    """What is waited for is due at once, so one lost wake-up would let a thread wait for ever."""

    class Each:
        def __init__(self) -> None:
            self.noted: dict[threading.Lock, None] = {}

        def due(self) -> float | None:
            return 0.0 if self.noted else None

        def run_once(self, open_store: Callable[[], Store]) -> None:
            for lock in list(self.noted.copy()):
                del self.noted[lock]
                lock.release()

    service = Each()
    thread.add_service(service)
    heard: list[bool] = []

    def hammer() -> None:
        for _ in range(2_000):
            lock = threading.Lock()
            lock.acquire()
            service.noted[lock] = None
            thread.expect(0.0)
            if not lock.acquire(timeout=SOON):
                return
        heard.append(True)

    hammers = [threading.Thread(target=hammer) for _ in range(4)]
    for one in hammers:
        one.start()
    for one in hammers:
        one.join(30)
    assert heard == [True] * 4


def test_many_threads_ask_at_once(thread: DatabaseThread, database: FakeDatabase) -> None:
    answers: list[int] = []

    def ask(first: int) -> None:
        answers.extend(thread.ask(lambda store, n=n: n, SOON) for n in range(first, first + 200))

    askers = [threading.Thread(target=ask, args=(1_000 * n,)) for n in range(4)]
    for one in askers:
        one.start()
    for one in askers:
        one.join(SOON)
    assert sorted(answers) == [1_000 * n + m for n in range(4) for m in range(200)]
    assert database.opened == 1
    assert not thread._errands


def test_a_thread_that_cannot_be_started_hurts_nobody_and_is_tried_again(
    thread: DatabaseThread, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(native, "start_thread", refuse)
        posted = thread.post(knows("task"))
        assert "can't start new thread" in caplog.text
    monkeypatch.setattr(database_thread, "SEATED_WITHIN", 0.0)
    thread._start_again_at = 0.0
    thread.expect(0.0)
    eventually(lambda: posted.done)


def test_a_thread_that_died_is_replaced(thread: DatabaseThread, database: FakeDatabase) -> None:
    def leave(opened: Callable[[], Store]) -> None:
        opened()
        raise SystemExit

    service = Pass(leave)
    thread.add_service(service)
    service.at = 0.0
    thread.expect(0.0)
    eventually(lambda: service.passed.is_set() and not thread._seat.locked())
    thread._start_again_at = 0.0
    service.passed.clear()
    service.at = 0.0
    thread.expect(0.0)
    assert service.passed.wait(SOON)
    eventually(lambda: database.closed == 2)


# Stopping.


def test_stopping_finishes_what_was_handed_over_and_closes(
    thread: DatabaseThread, database: FakeDatabase
) -> None:
    posted = [thread.post(knows("task")) for _ in range(50)]
    assert thread.stop(SOON)
    assert all(map(is_done, posted))
    assert (database.opened, database.closed) == (1, 1)


def test_stopping_tries_at_once_what_was_to_wait(
    thread: DatabaseThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errand, "LOCKED_PAUSE", 3600.0)
    tries: list[int] = []

    def work(store: Store) -> None:
        tries.append(1)
        if len(tries) == 1:
            raise RowLocked

    posted = thread.post(work)
    eventually(lambda: posted.start > 0)
    assert thread.stop(SOON)
    assert posted.done


def test_stopping_gives_up_in_time(thread: DatabaseThread, database: FakeDatabase) -> None:
    with database.hanging():
        thread.post(knows("task"))
        began = time.monotonic()
        assert not thread.stop(0.05)
        assert time.monotonic() - began < 1


def test_stopping_gives_up_in_time_while_the_database_is_away(
    thread: DatabaseThread, database: FakeDatabase
) -> None:
    database.go_away()
    thread.post(knows("task"))
    began = time.monotonic()
    assert not thread.stop(0.05)
    assert time.monotonic() - began < 1
    eventually(lambda: not thread._seat.locked())


def test_stopping_what_never_began_takes_no_time(
    thread: DatabaseThread, database: FakeDatabase
) -> None:
    began = time.monotonic()
    assert thread.stop(SOON)
    assert time.monotonic() - began < 0.5
    assert not thread._seat.locked()
    assert database.opened == 0


def test_a_first_look_at_a_database_that_is_away_is_told_and_holds_up_no_stop(
    thread: DatabaseThread, database: FakeDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    database.go_away("refused")
    thread.look()
    eventually(lambda: "refused" in caplog.text, what="a warning")
    begun = time.monotonic()
    assert thread.stop(60.0)
    assert time.monotonic() - begun < SOON


def test_stopping_starts_a_thread_that_could_not_be_started(
    thread: DatabaseThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(native, "start_thread", refuse)
        posted = thread.post(knows("task"))
    assert thread.stop(SOON)
    assert posted.done
