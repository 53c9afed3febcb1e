"""The function of docs/deploy.md that opens connections, run as it stands there."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path

from celery import Celery
from psycopg.conninfo import make_conninfo

from celery_awa import Client
from celery_awa.plugin.start import settings_of, store_opener
from tests.services.postgres import PASSWORD_ROLE, PrivatePostgres

from .jobs import running

pytest_plugins = ["tests.integration.stores", "tests.integration.runtime"]

DEPLOY = Path(__file__).resolve().parents[2] / "docs" / "deploy.md"


def documented(in_place_of: dict[str, str]) -> str:
    """The code of the page, with what is this run's in place of what is the reader's."""
    found = re.search(r"<!-- test: connect -->\n```python\n(.*?)```", DEPLOY.read_text(), re.DOTALL)
    assert found, "no code"
    code = found[1]
    for theirs, ours in in_place_of.items():
        assert code.count(theirs) == 1, theirs
        code = code.replace(theirs, ours)
    return code


def test_the_documented_function_follows_a_password_that_changes(
    private_postgres: PrivatePostgres, private_url: str, tmp_path: Path
) -> None:
    file = tmp_path / "password"
    url = make_conninfo(private_url, user=PASSWORD_ROLE)
    code = documented(
        {"/run/secrets/shop_worker": str(file), "postgresql://shop_worker@db/shop": url}
    )
    app = Celery("shop", set_as_current=False)
    exec(compile(code, str(DEPLOY), "exec"), {"app": app})
    for task_id, password in (("one", "first"), ("two", "second")):
        private_postgres.set_password(password)
        private_postgres.terminate_backends()
        file.write_text(password)
        with closing(store_opener(app, settings_of(app))()) as store:
            running(store, task_id)  # type: ignore[arg-type]  # it is the real one
    with Client(app) as client:
        assert [job.task_id for job in client.list_jobs()] == ["two", "one"]
