"""pytest-celery's nodes over local processes in place of its containers."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from typing import Any

from celery import Celery
from pytest_celery import (
    CeleryTestBackend,
    CeleryTestBroker,
    CeleryTestNode,
    CeleryTestSetup,
    CeleryTestWorker,
)

from tests.acceptance.brokers import Broker
from tests.acceptance.workers import DEFAULT_APP, Worker, load_app


class LocalNode(CeleryTestNode):
    """A node whose "container" is a plain object of ours."""

    def ready(self) -> bool:
        """Whether it can be used; a broker of a test always can."""
        return True

    def teardown(self) -> None:
        """Nothing: the fixture that made the object ends it."""


class LocalBroker(LocalNode, CeleryTestBroker):
    """The broker of a test."""

    container: Broker

    def config(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The URL, as clusters want it."""
        return {"url": self.container.url, "host_url": self.container.url}

    def name(self) -> str:
        """What kind it is."""
        return self.container.kind


class LocalBackend(LocalNode, CeleryTestBackend):
    """The result backend that comes with the broker of a test."""

    container: Broker

    def config(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The URL, as clusters want it."""
        url = str(self.container.config["result_backend"])
        return {"url": url, "host_url": url}


class LocalWorker(LocalNode, CeleryTestWorker):
    """A worker process."""

    container: Worker

    def ready(self) -> bool:
        """Wait until the worker takes tasks."""
        return self.container.ready().running

    def logs(self) -> str:
        """What the worker wrote."""
        return self.container.log()

    def name(self) -> str:
        """The worker's node name."""
        return self.container.name

    def hostname(self) -> str:
        """The worker's node name."""
        return self.container.name

    def kill(self, signal: str | int = "SIGKILL", reload_container: bool = True) -> None:
        """Signal the worker's own process."""
        self.container.kill(_number(signal))

    def restart(self, reload_container: bool = True, force: bool = False) -> None:
        """Stop it, killing it with ``force``, and start it again under the same name."""
        if force:
            self.container.end()
        else:
            self.container.stop()
        self.container.start()
        self.ready()

    def wait_for_log(self, log: str, message: str = "", timeout: int = 10) -> None:
        """Wait until the log holds the text."""
        self.container.wait_for_log(re.escape(log), timeout=timeout)


class LocalSetup(CeleryTestSetup):
    """A setup whose app is the workers' own, under their whole configuration."""

    @classmethod
    def config(cls, celery_worker_cluster_config: dict[str, Any]) -> dict[str, Any]:
        """The configuration as it is: URLs alone do not make a private broker."""
        return celery_worker_cluster_config

    @classmethod
    def create_setup_app(
        cls, celery_setup_config: Mapping[str, Any], celery_setup_app_name: str
    ) -> Celery:
        """The app that sends to the workers."""
        app: Celery = load_app(celery_setup_app_name, celery_setup_config).app
        return app

    @classmethod
    def name(cls) -> str:
        """The module of the app."""
        return DEFAULT_APP

    def ready(self, ping: bool = False, control: bool = False, docker: bool = False) -> bool:
        """Whether every worker takes tasks."""
        assert self.worker_cluster is not None
        return self.worker_cluster.ready() and super().ready(ping, control, docker=False)

    def teardown(self) -> None:
        """Close the app."""
        self.app.close()


def _number(name: str | int) -> int:
    return name if isinstance(name, int) else signal.Signals[name]
