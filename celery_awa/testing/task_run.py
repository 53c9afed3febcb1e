"""One attempt of a task in a test, and the next one."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from celery.app.trace import build_tracer
from celery.canvas import Signature
from celery.exceptions import Reject, Retry
from celery.utils import uuid

from ..model import JobState
from ..plugin import envelope
from ..plugin.current import is_ours
from ..plugin.start import settings_of
from ..runtime.checkpoint import COMMITTED_STATE, STATE, VERSION
from .delivery import Delivery, Outbox, caught, sent_first
from .faults import After, Crash, NotReached, Plan, planned
from .memory_job import MemoryJob, as_kept
from .memory_process import MemoryProcess
from .stand_in import alone, standing_in

_NOT_GIVEN: Any = object()


@dataclass(frozen=True, eq=False, kw_only=True)
class TaskRun:
    """What became of one attempt; nothing changes it afterwards."""

    #: Where the job is now: ``completed``, ``failed``, ``cancelled``, ``retryable``, ``available``
    #: (interrupted or replaced), ``scheduled`` (snoozed), ``waiting_external``, or ``running``
    #: where its worker died or a newer attempt has it.
    state: JobState
    #: What the task returned, if it completed.
    result: Any
    #: What it failed with, or is retried for.
    error: BaseException | None
    #: What the next attempt finds as ``self.checkpoint``: reported and committed. Empty once the
    #: job is completed.
    checkpoint: dict[str, Any]
    #: The progress as it was reported last, before a crash or a lost lease, also of a job that
    #: completed, where a worker clears it. None: nothing was ever reported.
    progress: dict[str, Any] | None = field(repr=False)
    #: Number of the attempt in its run, from 1. Interrupted, snoozed and waiting ones do not count.
    attempt: int
    #: Seconds until a retry or a snooze is over.
    run_in: float | None
    #: What the callback that the job expects is known by.
    callback_token: str | None = field(repr=False)
    #: Whether a newer attempt had the job before this one was over.
    lease_lost: bool
    #: How often ``flush_progress`` wrote something.
    flushes: int = field(repr=False)
    #: What the task was replaced by (``self.replace``).
    replacement: Signature | None = field(repr=False)

    _task: Any = field(repr=False)
    _job: MemoryJob = field(repr=False)
    _delivery: Delivery = field(repr=False)

    @property
    def percent(self) -> int | None:
        """How far the task said it was, 0 to 100; None if it did not."""
        return (self.progress or {}).get("percent")

    @property
    def message(self) -> str | None:
        """What the task said it was doing."""
        return (self.progress or {}).get("message")

    @property
    def items(self) -> dict[str, int]:
        """How many finished items are kept of each loop, by its name (``"step/loop"``)."""
        reported = self.checkpoint.get(STATE, {}).get("iterations", {})
        committed = self.checkpoint.get(COMMITTED_STATE, {})
        names = [*reported, *(name for name in committed if name not in reported)]
        return {name: max(_done(reported, name), _done(committed, name)) for name in names}

    @property
    def steps(self) -> list[str]:
        """Which finished steps are kept, in their order."""
        steps = self.checkpoint.get(STATE, {}).get("steps", {})
        return list(steps.get("names", [])[: steps.get("finished", 0)])

    def resume(
        self,
        *,
        payload: Any = _NOT_GIVEN,
        crash_after: After | None = None,
        interrupt_after: After | None = None,
        lose_lease_after: After | None = None,
    ) -> TaskRun:
        """Run the next attempt, from what this one left; with its arguments, or those of its retry.

        Nobody waits: a retry, a snooze and a callback are due at once. ``payload``: of the callback
        that the job expects; a waiting job needs one. The rest as in :func:`run_task`. Can be
        called again, and each time goes on from here.

        A failed or cancelled job goes on as ``Client.retry`` would have it. RuntimeError for one
        that is completed or replaced, ValueError for a payload that is missing or not expected,
        and all that :func:`run_task` raises.
        """
        plan = planned(
            crash_after=crash_after,
            interrupt_after=interrupt_after,
            lose_lease_after=lose_lease_after,
        )
        self._check_unfinished()
        with alone():
            job = self._job.copy()
            if self._takes(payload):
                limit = settings_of(self._task.app, quiet=True).max_progress_bytes
                job.answer(as_kept({"payload": payload}, limit)["payload"])
            return _attempted(self._task, job, self._delivery, plan)

    def _check_unfinished(self) -> None:
        if self.replacement is not None:
            raise RuntimeError(f"the task was replaced by {self.replacement!r}: run that")
        if self.state is JobState.COMPLETED:
            raise RuntimeError("the run is completed: run_task() begins another")

    def _takes(self, payload: Any) -> bool:
        """Whether there is one; ValueError where it does not fit."""
        given = payload is not _NOT_GIVEN
        if given and self.callback_token is None:
            raise ValueError(f"no callback is expected, so no payload: the job is {self.state}")
        if not given and self.state is JobState.WAITING_EXTERNAL:
            raise ValueError("the job waits for its callback: give resume() the payload")
        return given


def run_task(
    task: Any,
    /,
    *args: Any,
    checkpoint: Mapping[str, Any] | None = None,
    checkpoint_version: int | None = None,
    crash_after: After | None = None,
    interrupt_after: After | None = None,
    lose_lease_after: After | None = None,
    **kwargs: Any,
) -> TaskRun:
    """Run one attempt of a task as a worker would, without broker, worker, database and results.

    ``task``: one with ``base=AwaTask`` (or another class of AwaMixin), followed by its arguments;
    or a signature of it, which may say more (``task_id``, ``retries``, ``headers``) and has the
    arguments whose names are taken here. They are serialized as a message would be.

    ``checkpoint``: what an earlier attempt left, as ``update_metadata`` takes it, or as another
    run's ``checkpoint`` has it; by code of ``checkpoint_version``, None: of the task's own.

    At most one of these, each a number of items from 1 on (of all loops of the task together), a
    loop's name and such a number, or the name of a step:

    - ``crash_after``: the worker dies there, as by SIGKILL. What its page holds by then is kept.
    - ``interrupt_after``: the worker is stopping from there on.
    - ``lose_lease_after``: a newer attempt has the job from there on.

    Raises NotReached if that place was never reached; TypeError for what is no task of ours, and
    ValueError or TypeError for other arguments that are not allowed; InvalidProgress and
    ProgressTooLarge for a checkpoint that cannot be one; what publishing raises for arguments that
    do not fit; RuntimeError inside a worker, or inside a task that ``run_task`` runs.
    """
    plan = planned(
        crash_after=crash_after, interrupt_after=interrupt_after, lose_lease_after=lose_lease_after
    )
    task, args, kwargs, options = _chosen(task, args, kwargs)
    with alone():
        job = _job(task, checkpoint, checkpoint_version)
        delivery = sent_first(task, args, kwargs, options)
        return _attempted(task, job, delivery, plan)


def _chosen(task: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any, dict[str, Any]]:
    """The task itself, its arguments, and how it is sent."""
    options: dict[str, Any] = {}
    if isinstance(task, Signature):
        if args or kwargs:
            raise TypeError("a signature has its own arguments: give run_task no others")
        signature = task
        task, args, kwargs = signature.type, signature.args, signature.kwargs
        known = ("task_id", "retries", "headers", "priority", "queue", "serializer")
        options = {name: signature.options[name] for name in known if name in signature.options}
    evaluate = getattr(task, "_get_current_object", None)
    task = task if evaluate is None else evaluate()
    if isinstance(task, type) or not is_ours(task):
        raise TypeError(
            f"run_task needs a task with base=AwaTask, or another class of AwaMixin, not {task!r}"
        )
    headers = options.get("headers") or {}
    return (
        task,
        args,
        kwargs,
        {**options, "headers": headers, "task_id": options.get("task_id") or uuid()},
    )


def _job(task: Any, checkpoint: Mapping[str, Any] | None, version: int | None) -> MemoryJob:
    job = MemoryJob(envelope.lost_policy(task))
    version = task.checkpoint_version if version is None else version
    if isinstance(version, bool) or not isinstance(version, int) or version < 0:
        raise ValueError(f"checkpoint_version is {version!r}; it must be a whole number from 0 on")
    if checkpoint is not None:
        kept = as_kept(checkpoint, settings_of(task.app, quiet=True).max_progress_bytes)
        if version and kept:
            kept = {VERSION: version, **kept}
        job.progress = {"metadata": kept}
    return job


def _attempted(task: Any, job: MemoryJob, delivery: Delivery, plan: Plan) -> TaskRun:
    """Run the attempt, and tell what became of it."""
    settings = settings_of(task.app, quiet=True)
    process = MemoryProcess(job, delivery.retries, settings, plan)
    with standing_in(task, process), caught(task, delivery.task_id) as outbox:
        result, error = _delivered(task, delivery)
    run = _told(task, process, delivery, outbox, result, error)
    if plan.fault is not None and not plan.reached:
        raise NotReached(
            f"{plan} was not reached: the job is {run.state}; this attempt finished the items "
            f"{plan.items} and the steps {plan.steps}",
            run,
        ) from run.error
    return run


def _delivered(task: Any, delivery: Delivery) -> tuple[Any, BaseException | None]:
    """The task's result and error, from Celery's own tracer."""
    args, kwargs = delivery.arguments()
    trace = build_tracer(task.name, task, app=task.app)
    try:
        traced = trace(delivery.task_id, args, kwargs, delivery.request(task))
    except Crash:
        return None, None
    except Reject as reject:  # of a hook after the body
        return None, reject
    if traced.info is None:
        return traced.retval, None
    raised = traced.info.retval
    return None, raised.exc if isinstance(raised, Retry) else raised


def _told(
    task: Any,
    process: MemoryProcess,
    delivery: Delivery,
    outbox: Outbox,
    result: Any,
    error: BaseException | None,
) -> TaskRun:
    job, attempt = process.job, process.attempt
    failed = not process.dead and job.state in (JobState.FAILED, JobState.RETRYABLE)
    return TaskRun(
        state=job.state,
        result=result if job.state is JobState.COMPLETED else None,
        error=error if failed else None,
        checkpoint=deepcopy(job.checkpoint(task.checkpoint_version)),
        progress=deepcopy(process.progress),
        attempt=attempt.number if attempt is not None else job.attempt,
        run_in=job.run_in,
        callback_token=job.callback_id,
        lease_lost=attempt is not None and attempt.lost,
        flushes=process.flushes,
        replacement=outbox.replacement,
        _task=task,
        _job=job,
        _delivery=delivery if process.dead else outbox.delivery or delivery,
    )


def _done(loops: Mapping[str, Any], name: str) -> int:
    done: int = loops.get(name, {}).get("done", 0)
    return done
