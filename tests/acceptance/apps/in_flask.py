"""The tasks of a Flask application, set up as Flask's documentation says."""

from __future__ import annotations

import json
import os
from typing import Any

import flask
from celery import Celery, Task, shared_task
from flask import Flask

import celery_awa
from celery_awa import AwaMixin
from tests.acceptance.apps.configured import CONFIG_VARIABLE
from tests.acceptance.diary import note
from tests.waiting import hold


def celery_init_app(app: Flask) -> Celery:
    """As in Flask's documentation, "Background Tasks with Celery"."""

    class FlaskTask(Task):
        def __call__(self, *args: object, **kwargs: object) -> object:
            with app.app_context():
                return self.run(*args, **kwargs)

    celery_app = Celery(app.name, task_cls=FlaskTask)
    celery_app.config_from_object(app.config["CELERY"])
    celery_app.set_default()
    app.extensions["celery"] = celery_app
    return celery_app


flask_app = Flask("shop")
flask_app.config["CELERY"] = json.loads(os.environ[CONFIG_VARIABLE])
app = celery_init_app(flask_app)
FlaskTask = app.Task
celery_awa.install(app, default_base=True)


class AwaFlaskTask(AwaMixin, FlaskTask):
    """Flask's task class with ours first."""


@shared_task(base=AwaFlaskTask, bind=True)
def with_base(self: Any, percent: float, gate: str | None = None) -> str:
    """A task with the mixin over Flask's task class."""
    return _report(self, percent, gate)


@shared_task(bind=True)
def with_default(self: Any, percent: float, gate: str | None = None) -> str:
    """A task with the base of the app."""
    return _report(self, percent, gate)


def _report(task: Any, percent: float, gate: str | None) -> str:
    task.set_progress(percent, flask.current_app.name)
    note(task, "reported", bases=[base.__name__ for base in type(task).__mro__])
    hold(gate)
    return flask.current_app.name
