"""Setting up: install, the worker step, settings, the client, and what is told when it is wrong."""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from celery import Celery, Task

import celery_awa
from celery_awa import AwaMixin, AwaTask, Client, HeartbeatStep, SchemaError, SettingsError
from celery_awa.django import AwaTask as DjangoAwaTask
from tests import processes
from tests.acceptance.diary import Diary, Gate
from tests.acceptance.jobs import Jobs
from tests.acceptance.workers import CAN_SPAWN, Worker
from tests.waiting import eventually

Start = Callable[..., Worker]
Load = Callable[..., ModuleType]
APPS = "tests.acceptance.apps"
#: With as many children as the test has at work: one that is still being spawned when its worker
#: is killed does not notice.
METHODS = ["fork", *(["spawn"] * CAN_SPAWN)]
AWAY = "celery-awa cannot use its database, tasks go on without it:"
NOBODY_ANSWERS = "postgresql://nobody@127.0.0.1:1/nothing?connect_timeout=1"


@pytest.fixture
def new_app() -> Iterator[Callable[[], Celery]]:
    """Apps that no worker runs."""
    apps: list[Celery] = []

    def make() -> Celery:
        apps.append(Celery("new", set_as_current=False))
        return apps[-1]

    yield make
    for app in apps:
        app.close()


def told(worker: Worker) -> list[str]:
    """What the worker's log says of us, each line from our name on."""
    return re.findall(r"celery-awa.*", worker.log())


def stats(client: ModuleType, worker: Worker) -> dict[str, Any]:
    """What ``celery inspect stats`` shows."""

    def asked() -> Any:
        inspect = client.app.control.inspect(destination=[worker.name], timeout=3, limit=1)
        return inspect.stats()

    return eventually(asked, timeout=20)[worker.name]


# Names.


def test_the_package_has_the_documented_names_and_no_others() -> None:
    assert celery_awa.__all__ == [
        "AwaError",
        "AwaMixin",
        "AwaTask",
        "Callback",
        "CallbackFailed",
        "Cancel",
        "CheckpointMismatch",
        "Client",
        "EmbeddedError",
        "HeartbeatStep",
        "InvalidProgress",
        "LeaseLost",
        "NotInAttempt",
        "ProgressTooLarge",
        "Resend",
        "SchemaError",
        "SettingsError",
        "StopReason",
        "StoreUnavailable",
        "TooManyItemErrors",
        "current_attempt",
        "install",
        "migrate",
    ]
    for name in celery_awa.__all__:
        assert not isinstance(getattr(celery_awa, name), ModuleType)
    others = {name for name in vars(celery_awa) if not name.startswith("_")}
    modules = {name for name in others if isinstance(getattr(celery_awa, name), ModuleType)}
    assert others - modules == set(celery_awa.__all__)


@pytest.mark.parametrize("base", [AwaTask, DjangoAwaTask])
def test_a_task_class_gets_the_documented_attributes_and_no_others(base: type) -> None:
    added = {
        *("awa_task", "lost_policy", "max_rescues", "deadline", "max_runtime"),
        *("stall_after", "stall_policy", "checkpoint_version", "migrate_checkpoint"),
        *("iterate", "step", "track", "interrupt", "snooze", "checkpoint_in"),
        *("callback_token", "wait_for_callback", "callbacks", "callback_payload"),
        *("attempt", "progress", "checkpoint", "should_stop", "stop_reason"),
        *("set_progress", "update_metadata", "flush_progress"),
    }
    overridden = {"__call__", "on_bound", "on_replace", "retry", "signature_from_request"}
    python = {"__module__", "__doc__", "__dict__", "__weakref__", "__annotations__"}
    ours = (vars(part) for part in AwaMixin.__mro__ if part is not object)
    found = {name for names in ours for name in names if not name.startswith("_awa_")}
    assert found - python - {"__static_attributes__", "__firstlineno__"} == added | overridden
    (plain,) = base.__bases__[1:]
    public = {name for name in dir(base) if not name.startswith("_")}
    assert public - set(dir(plain)) == added


# install.


def test_install_returns_its_app_and_may_be_repeated(new_app: Callable[[], Celery]) -> None:
    app = new_app()
    assert celery_awa.install(app, "postgresql://host/database") is app
    assert celery_awa.install(app, default_base=True) is app
    assert celery_awa.install(app) is app
    assert app.steps["worker"] == {HeartbeatStep}
    assert app.Task.__mro__.count(AwaMixin) == 1
    assert len([fixup for fixup in app.fixups if not isinstance(fixup, str)]) == 1


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "the database URL is empty; it must be a text: postgresql://…, key=value pairs"),
        (" ", "the database URL is empty; it must be a text"),
        (b"postgresql://u:secret@h", "the database URL is of type bytes; it must be a text: "),
        (
            "postgres//user:secret@host/shop",
            "the database URL cannot be read (it is neither postgresql://… nor key=value pairs); "
            "it looks like postgresql://user:password@host:5432/database",
        ),
        (
            "postgresql://user:secret@host/shop?secret=1",
            "the database URL cannot be read (invalid URI query parameter); it looks like "
            "postgresql://user:password@host:5432/database",
        ),
    ],
)
def test_a_url_that_cannot_be_read_is_refused_without_showing_it(
    new_app: Callable[[], Celery], url: Any, message: str
) -> None:
    with pytest.raises(SettingsError) as refused:
        celery_awa.install(new_app(), url)
    assert message in str(refused.value)
    assert "secret" not in str(refused.value)
    assert refused.value.__cause__ is None


@pytest.mark.parametrize("app", [None, "proj.celery", Celery, Task])
def test_only_a_celery_app_can_be_set_up(app: Any) -> None:
    with pytest.raises(SettingsError, match=rf"takes a Celery app, not {type(app).__name__}$"):
        celery_awa.install(app)


def test_the_default_base_is_asked_for_or_not(new_app: Callable[[], Celery]) -> None:
    with pytest.raises(SettingsError, match=r"must be True or False, not of type int$"):
        celery_awa.install(new_app(), default_base=5)  # type: ignore[arg-type]


def test_the_default_base_goes_over_the_apps_own_task_class(
    new_app: Callable[[], Celery],
) -> None:
    class Own(Task):
        abstract = True

    app = new_app()
    app.task_cls = Own
    assert not issubclass(app.Task, AwaMixin)
    celery_awa.install(app, default_base=True)

    @app.task(shared=False)
    def some_task() -> None:
        """A task without a base of its own."""

    app.finalize()
    mro = type(app.tasks[some_task.name]).__mro__
    assert mro.index(AwaMixin) < mro.index(Own)


@pytest.mark.parametrize("start_method", METHODS)
def test_the_url_of_install_goes_before_setting_and_environment(
    start_worker: Start,
    client: ModuleType,
    jobs: Jobs,
    gate: Gate,
    database_url: str,
    start_method: str,
) -> None:
    worker = start_worker(
        app=f"{APPS}.installed",
        start_method=start_method,
        concurrency=1,
        config={"test_install_url": database_url, "awa_database_url": NOBODY_ANSWERS},
        env={"AWA_DATABASE_URL": NOBODY_ANSWERS},
    )
    sent = client.app.send_task(f"{APPS}.installed.look", (gate.path,))
    eventually(lambda: (job := jobs.get(sent.id)) and job.percent == 30)
    gate.open()
    assert sent.get(timeout=20) == {"flushed": True, "progress": {"percent": 30, "message": "x"}}
    jobs.wait_for(sent.id, "completed")
    assert told(worker) == []


def test_the_urls_of_setting_and_environment_count_in_this_order(
    start_worker: Start, client: ModuleType, jobs: Jobs, database_url: str
) -> None:
    for number, (setting, environment) in enumerate(
        [(database_url, NOBODY_ANSWERS), (None, database_url)]
    ):
        worker = start_worker(
            app=f"{APPS}.installed",
            config={"test_install_url": None, "awa_database_url": setting},
            env={"AWA_DATABASE_URL": environment},
            pool="solo",
            concurrency=1,
        )
        sent = client.app.send_task(f"{APPS}.installed.look", task_id=f"task {number}")
        assert sent.get(timeout=20)["flushed"] is True
        jobs.wait_for(sent.id, "completed")
        worker.end()


# The embedded server.


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every account may enter: the server does not run as root."""
    made = Path(tempfile.mkdtemp(prefix="awa-test-", dir="/tmp"))
    made.chmod(0o755)
    (made / "tmp").mkdir()
    (made / "tmp").chmod(0o777)
    yield made
    shutil.rmtree(made)


@pytest.mark.parametrize(
    ("shared", "start_method"),
    [*((False, method) for method in METHODS), (True, METHODS[-1])],
    ids=[*(f"private {method}" for method in METHODS), "shared"],
)
def test_an_embedded_server_serves_the_worker_and_its_children_and_goes_with_them(
    start_worker: Start,
    client: ModuleType,
    open_folder: Path,
    gate: Gate,
    diary: Diary,
    start_method: str,
    shared: bool,
) -> None:
    url = f"embedded:{open_folder / 'postgres'}" if shared else "embedded:"
    worker = start_worker(
        app=f"{APPS}.installed",
        start_method=start_method,
        config={"test_install_url": url, "awa_database_url": None},
        # Not the server of the session that runs these tests.
        env={"CELERY_AWA_EMBEDDED": "", "TMPDIR": str(open_folder / "tmp")},
    )
    sent = [client.app.send_task(f"{APPS}.installed.look", (gate.path,)) for _ in range(2)]
    children = {diary.wait_for("began", one.id)["pid"] for one in sent}
    gate.open()
    for one in sent:
        assert one.get(timeout=20)["flushed"] is True
    assert children == set(worker.children())
    family = map(processes.command_line, worker.process.family())
    assert len([line for line in family if "embedded_guard" in line]) == 1
    assert worker.stop(timeout=20) == 0
    eventually(lambda: worker.process.family() == [], what="end of the server")
    eventually(lambda: os.listdir(open_folder / "tmp") == [], what="removal of its folder")
    assert (open_folder / "postgres" / "data").exists() == shared
    assert told(worker) == []


# The worker step.


@pytest.mark.parametrize(
    "pool",
    [
        *({"pool": "prefork", "start_method": method} for method in METHODS),
        {"pool": "threads", "config": {"test_step": "celery_awa:HeartbeatStep"}},
    ],
    ids=[*METHODS, "threads, by its path"],
)
def test_a_step_added_by_hand_does_all_and_goes_on_until_the_last_task_has_ended(
    start_worker: Start,
    client: ModuleType,
    jobs: Jobs,
    diary: Diary,
    gate: Gate,
    pool: dict[str, Any],
) -> None:
    worker = start_worker(app=f"{APPS}.by_hand", concurrency=1, **pool)
    sent = client.app.send_task(f"{APPS}.by_hand.report_until", (gate.path,))
    diary.wait_for("began", sent.id)
    eventually(lambda: jobs.get(sent.id))
    shown = stats(client, worker)["awa"]
    worker.kill(signal.SIGTERM)
    worker.wait_for_log("Warm shutdown")
    before = eventually(lambda: (job := jobs.get(sent.id)) and job.metadata and job)
    eventually(lambda: jobs.get(sent.id).heartbeat_at > before.heartbeat_at)
    eventually(lambda: jobs.get(sent.id).progress != before.progress)
    gate.open()
    assert worker.stop(timeout=20) == 0
    job = jobs.wait_for(sent.id, "failed")
    assert (job.attempt, job.message, job.metadata) == (1, "the last", {"last_id": 7})
    assert set(shown.pop("rescues").values()) == {0}
    assert shown == {"database": "answering", "attempts": 1, "dropped": 0}
    assert told(worker) == []


def test_an_app_that_did_not_ask_for_the_step_does_not_get_it(
    start_worker: Start, client: ModuleType, settings: dict[str, Any]
) -> None:
    worker = start_worker(app=f"{APPS}.untouched", config={"awa_database_url": NOBODY_ANSWERS})
    sent = client.app.send_task(f"{APPS}.untouched.plain")
    assert sent.get(timeout=20) == "plain"
    assert "awa" not in stats(client, worker)
    assert os.listdir(settings["awa_slate_dir"]) == []
    assert told(worker) == []


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_worker_that_was_not_set_up_says_so_once_and_runs_its_tasks(
    start_worker: Start, client: ModuleType, jobs: Jobs, pool: str
) -> None:
    worker = start_worker(app=f"{APPS}.uninstalled", pool=pool)
    sent = client.app.send_task(f"{APPS}.uninstalled.report")
    assert sent.get(timeout=20) == {
        "checkpoint": {},
        "progress": {"percent": 30, "message": "x", "metadata": {"last_id": 7}},
        "flushed": True,
        "number": 2,
    }
    assert jobs.all() == []
    name = f"{APPS}.uninstalled"
    assert told(worker) == [
        f"celery-awa is not installed in this worker, so reports of {name}.other, {name}.report "
        "are in vain: call celery_awa.install(app) where the app is made"
    ]


def test_classes_that_cut_us_off_are_told_and_no_others(
    start_worker: Start, load_client: Load
) -> None:
    client = load_client(f"{APPS}.bypassing")
    worker = start_worker(app=f"{APPS}.bypassing", pool="threads", concurrency=4)
    bases = (*client.CUT_OFF, *client.REACHED)
    sent = {base: client.app.send_task(f"{APPS}.bypassing.{base.__name__}") for base in bases}
    # What each class really does, so that the lines below are right and not only as expected.
    reached = {base for base, result in sent.items() if result.get(timeout=20)}
    assert reached == set(client.REACHED)
    assert sorted(told(worker)) == sorted(
        f"celery-awa: task {APPS}.bypassing.{base.__name__} has no progress and no checkpoint: "
        f"{culprit}.__call__ does not call super().__call__(); let it do so, or let AwaMixin go "
        "first among the bases"
        for base, culprit in client.CUT_OFF.items()
    )


@pytest.mark.parametrize("start_method", METHODS)
@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({"awa_database_url": "embedded:no\0path"}, f"{AWAY} embedded null byte"),
        ({"test_unreadable": True}, "celery-awa: this worker goes without it"),
    ],
    ids=["no path", "unreadable"],
)
def test_whatever_is_wrong_with_our_settings_the_worker_runs_its_tasks(
    start_worker: Start, client: ModuleType, config: dict[str, Any], line: str, start_method: str
) -> None:
    worker = start_worker(
        app=f"{APPS}.namespaced", config=config, start_method=start_method, concurrency=1
    )
    sent = client.app.send_task(f"{APPS}.namespaced.report_too_much", (300,))
    assert sent.get(timeout=20) is None
    assert line in told(worker)


@pytest.mark.parametrize(
    ("namespace", "name", "right"),
    [(None, "AWA_SCHEMA", "awa_schema"), ("shop", "SHOP_AWA_SCHEMA", "shop_awa_schema")],
)
def test_a_setting_that_celery_does_not_find_because_of_its_case_is_told(
    start_worker: Start, client: ModuleType, namespace: str | None, name: str, right: str
) -> None:
    worker = start_worker(
        app=f"{APPS}.namespaced",
        config={"test_namespace": namespace, "test_foreign": {name: "elsewhere"}},
        pool="solo",
        concurrency=1,
    )
    assert told(worker) == [f"celery-awa: setting {name} has no effect; write {right}"]


# The client.


def test_a_client_finds_the_database_of_an_app_or_url(
    client: ModuleType,
    start_in_thread: Callable[..., ModuleType],
    new_app: Callable[[], Celery],
    monkeypatch: pytest.MonkeyPatch,
    database_url: str,
) -> None:
    module = start_in_thread()
    sent = module.report.delay(5)
    assert sent.get(timeout=20) == 5
    by_setting, by_environment, by_install = new_app(), new_app(), new_app()
    by_setting.conf.awa_database_url = database_url
    by_install.conf.awa_database_url = NOBODY_ANSWERS
    celery_awa.install(by_install, database_url)
    with Client(database_url) as first:
        # The row follows the result, so at first there may be none.
        eventually(lambda: (job := first.get_job(sent.id)) and job.state == "completed")
    for source in (module.app, by_setting, by_install):
        with Client(source) as found:
            assert found.get_job(sent.id).state == "completed"
    monkeypatch.setenv("AWA_DATABASE_URL", database_url)
    with Client(by_environment) as found:
        assert found.get_job(sent.id).state == "completed"
        assert found.get_job("another") is None


def test_the_schema_of_the_settings_counts_for_worker_and_client(
    client: ModuleType,
    start_in_thread: Callable[..., ModuleType],
    empty_database_url: str,
) -> None:
    url = empty_database_url
    assert celery_awa.migrate(url, schema="shop_jobs") == ["0001_jobs", "0002_rescue"]
    module = start_in_thread(config={"awa_schema": "shop_jobs", "awa_database_url": url})
    sent = module.report.delay(5)
    assert sent.get(timeout=20) == 5
    with Client(module.app) as of_app, Client(url, schema="shop_jobs") as of_url:
        eventually(lambda: (job := of_app.get_job(sent.id)) and job.state == "completed")
        assert of_url.get_job(sent.id) == of_app.get_job(sent.id)
    with Client(url) as elsewhere, pytest.raises(SchemaError, match="no tables of celery-awa"):
        elsewhere.get_job(sent.id)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (5, "Client() takes a Celery app or a database URL, not int"),
        (None, "Client() takes a Celery app or a database URL, not NoneType"),
        ("", "the database URL is empty; it must be a text"),
        (" ", "the database URL is empty; it must be a text"),
        ("nonsense", "the database URL cannot be read"),
        (Celery(set_as_current=False), "this app names no database: set awa_database_url"),
    ],
    ids=["number", "nothing", "empty", "blank", "nonsense", "app"],
)
def test_a_client_of_nothing_is_refused(
    source: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWA_DATABASE_URL", raising=False)
    with pytest.raises(SettingsError, match=re.escape(message)):
        Client(source)


def test_jobs_are_listed_by_state_and_task_page_by_page(
    start_in_thread: Callable[..., ModuleType], jobs: Jobs, database_url: str
) -> None:
    module = start_in_thread()
    done = [module.report.delay(n) for n in range(3)]
    failed = [module.fail_after.delay(1) for _ in range(2)]
    for one in (*done, *failed):
        one.get(timeout=20, propagate=False)
    ids = [jobs.wait_for(one.id, "completed", "failed").id for one in (*done, *failed)]
    newest_first = sorted(ids, reverse=True)
    with Client(database_url) as client:
        assert [job.id for job in client.list_jobs()] == newest_first
        assert {job.task_id for job in client.list_jobs(state="failed")} == {
            one.id for one in failed
        }
        assert {job.task_id for job in client.list_jobs(kind=module.report.name)} == {
            one.id for one in done
        }
        assert client.list_jobs(state="failed", kind=module.report.name) == []
        page = client.list_jobs(limit=2)
        following = client.list_jobs(limit=2, before_id=page[-1].id)
        last = client.list_jobs(limit=2, before_id=following[-1].id)
        assert [job.id for job in (*page, *following, *last)] == newest_first
        assert client.list_jobs(before_id=last[-1].id) == []


@pytest.mark.parametrize(
    ("wanted", "error", "message"),
    [
        (
            {"state": "done"},
            ValueError,
            "state is 'done'; it must be one of scheduled, available, running, completed, "
            "retryable, failed, cancelled, waiting_external",
        ),
        ({"limit": 0}, ValueError, "limit is 0; it must be a whole number from 1 to 1,000"),
        ({"limit": 1_001}, ValueError, "limit is 1001; it must be a whole number from 1 to 1,000"),
        ({"limit": "5"}, ValueError, "limit is '5'; it must be a whole number from 1 to 1,000"),
        ({"limit": True}, ValueError, "limit is True; it must be a whole number from 1 to 1,000"),
        ({"before_id": "x"}, TypeError, "before_id must be the id of a job, not str"),
        ({"kind": 5}, TypeError, "kind must be the name of a task, not int"),
    ],
)
def test_a_list_that_cannot_be_is_refused_before_anything_is_asked(
    wanted: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as refused:
        Client(NOBODY_ANSWERS).list_jobs(**wanted)
    assert str(refused.value) == message
    with pytest.raises(TypeError, match="task_id must be a text, not int"):
        Client(NOBODY_ANSWERS).get_job(5)  # type: ignore[arg-type]
