"""Task classes with a call of their own: those of ``CUT_OFF`` never pass it on to ours."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from celery import Task

import celery_awa
from celery_awa import AwaMixin, AwaTask
from tests.acceptance.apps.configured import configured_app

app = configured_app("bypassing")
celery_awa.install(app)

Call = Callable[..., Any]


class Straight(AwaTask):
    """Calls the body."""

    __call__ = lambda self, *args, **kwargs: self.run(*args, **kwargs)  # noqa: E731


class Past(AwaTask):
    """Calls Celery's, past ours."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return Task.__call__(self, *args, **kwargs)


class Elsewhere(AwaTask):
    """Calls super, but not its call."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        super().on_success(None, "", (), {})
        return self.run(*args, **kwargs)


class Foreign(Task):
    """Knows nothing of ours, as Flask's."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


class BeforeOurs(Foreign, AwaTask):
    """Has a foreign call before ours."""


def traced(call: Call) -> Call:
    """Around a call, as decorators are."""

    @functools.wraps(call)
    def around(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return around


def traced_silently(call: Call) -> Call:
    """Around a call, and does not say around which."""

    def around(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return around


class WrappedStraight(AwaTask):
    """Calls the body, in a wrapper."""

    @traced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


CUT_OFF = {
    Straight: "Straight",
    Past: "Past",
    Elsewhere: "Elsewhere",
    BeforeOurs: "Foreign",
    WrappedStraight: "WrappedStraight",
}


class Super(AwaTask):
    """Calls super."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


class Named(Super):
    """Calls a base by its name."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return Super.__call__(self, *args, **kwargs)


class Inner(AwaTask):
    """Calls super in a function within."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        def attempt() -> Any:
            return super(Inner, self).__call__(*args, **kwargs)

        return attempt()


class Wrapped(AwaTask):
    """Wraps our call and says so."""

    __call__ = traced(AwaTask.__call__)


class WrappedSilently(AwaTask):
    """Wraps our call and does not say so."""

    __call__ = traced_silently(AwaTask.__call__)


def call_next(task: Any, *args: Any, **kwargs: Any) -> Any:
    """What several classes share."""
    return super(Shared, task).__call__(*args, **kwargs)


class Shared(AwaTask):
    """Leaves it to a function of the module."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return call_next(self, *args, **kwargs)


class Caller:
    """A call that is an object."""

    def __get__(self, task: Any, owner: type) -> Call:
        return functools.partial(AwaMixin.__call__, task)


class ByObject(AwaTask):
    """Has an object for a call."""

    __call__ = Caller()


class Circular(AwaTask):
    """Has a call that says it wraps itself."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)

    __call__.__wrapped__ = __call__


class OursFirst(AwaMixin, Foreign):
    """Has our call before the foreign one."""


REACHED = (*(Super, Named, Inner, Wrapped, WrappedSilently, Shared, ByObject, Circular, OursFirst),)


def report(self: Any) -> bool:
    """Report, and say whether there is an attempt to report to."""
    self.set_progress(10)
    return self.attempt is not None


for base in (*CUT_OFF, *REACHED):
    app.task(report, base=base, bind=True, name=f"{__name__}.{base.__name__}")
