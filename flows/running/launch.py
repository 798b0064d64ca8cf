"""Run waves of Requests as Prefect tasks: reuse current artifacts, make the others, retry temporary failures.

Waves that are all current are one task together (:func:`taken`).

A wave is one synchronous task that is called directly, so that a cancellation interrupts it. Prefect's task cache is
off, because the store decides what is current.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.exceptions import Pause
from prefect.states import Cancelled, Completed, Failed
from prefect.tasks import Task, exponential_backoff

from cosmos_rl_core.errors import CosmosRLError, StageError, StoppedError
from flows.running import gpus, pauses
from flows.running.wave import Waves
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Request
from stages.artifacts.slots import current_manifest


def launch(waves: Waves, name: str, *requests: Request) -> list[Manifest]:
    """Run a wave side by side, as one Prefect task, and return its manifests, in order.

    Raises :class:`StageError` when retries are used up, and Prefect's ``Pause`` if the flow run is suspended.
    """

    def worth_retrying(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
        """Decide on another attempt. Prefect asks only while an attempt is left, so the last failure is not noted here.

        The process that began the flow shows the last failure.
        """
        error = state.result(raise_on_failure=False)
        if not (isinstance(error, CosmosRLError) and error.retryable):
            return False
        waves.display.note(f"another attempt follows: {error}")
        return True

    as_task = task(
        name=name.rpartition("/")[2],
        task_run_name=name,
        retries=waves.config.max_attempts - 1,
        retry_delay_seconds=exponential_backoff(waves.config.retry_delay_s),
        retry_jitter_factor=0.5,
        retry_condition_fn=worth_retrying,
        cache_policy=NO_CACHE,
        persist_result=False,
    )
    try:
        return _result(as_task(lambda: _attempt(waves, name, requests))())
    except StageError as error:
        raise error.in_full() from None


def taken(waves: Waves, name: str, work: Callable[[], None]) -> None:
    """Take the run through waves that are made already, as one Prefect task ``name``, whose state is ``Skipped``."""

    def skipped() -> Any:
        waves.check()
        return _ended(work) or Completed(name="Skipped")

    as_task = task(name="kept", task_run_name=name, cache_policy=NO_CACHE, persist_result=False)
    _result(as_task(skipped)())


def grouped(name: str, work: Callable[[], None]) -> None:
    """Do work that launches waves as one Prefect task, a node of the run's graph that opens to show them.

    A task, because a flow in a flow would take a second at least and have other rules for retries and suspension.
    """
    as_task = task(name=name.partition("-")[0], task_run_name=name, cache_policy=NO_CACHE, persist_result=False)
    _result(as_task(lambda: _ended(work))())


def _ended(work: Callable[[], None]) -> Any:
    """Do work. Return None, or a state with the exception that ended it early; see :func:`_attempt`."""
    try:
        work()
    except Pause as suspended:
        return Cancelled(message="the flow run was suspended", data=suspended)
    except StoppedError as error:
        return Cancelled(message=str(error), data=error)
    except Exception as error:  # raised again outside of the task
        return Failed(message=error.summary if isinstance(error, StageError) else str(error), data=error)


def _result(outcome: Any) -> Any:
    """Return the result of a task, or raise the exception in the state that it returned."""
    result = outcome.result(raise_on_failure=False) if isinstance(outcome, State) else outcome
    if isinstance(result, BaseException):
        raise result.with_traceback(None)
    return result


def _attempt(waves: Waves, name: str, requests: Sequence[Request]) -> Any:
    """Return the manifests, or a state with the exception that kept them from being made.

    If an exception were raised, Prefect would log all its frames twice. A task that a suspension ended would be shown
    as running forever.
    """
    try:
        waves.check()
        found = [current_manifest(request) for request in requests]
        missing = [request for request, manifest in zip(requests, found, strict=True) if manifest is None]
        if missing:
            asked_s = time.monotonic()
            waves.begun.update(request.slot for request in missing)
            pauses.wait_while_paused(waves.waiting())
            waves.make(name, missing, asked_s, partial(gpus.taken, launch=waves.config, waiting=waves.waiting()))
            found = [current_manifest(request) for request in requests]
        manifests = [manifest for manifest in found if manifest is not None]
        if len(manifests) < len(requests):
            raise StageError.of("crash", f"{name} ended without a current artifact")
        waves.display.done(name, manifests, skipped=not missing)
        return manifests if missing else Completed(name="Skipped", data=manifests)
    except StoppedError as error:
        return Cancelled(message=str(error), data=error)
    except CosmosRLError as error:
        return Failed(message=str(error), data=error)
    except Pause as suspended:
        return Cancelled(message="the flow run was suspended", data=suspended)
