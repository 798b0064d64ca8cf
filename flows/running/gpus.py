"""GPUs that runs share: slots of a global concurrency limit of the Prefect server, taken for as long as stages run.

A wave takes all of its slots at once, and no flow asks for more while it has some, so that runs never wait in a circle.
Slots are a lease that the flow renews: those of a flow that was killed come back when its lease runs out.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from http import HTTPStatus

import httpx
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
from prefect.concurrency.sync import concurrency

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.errors import ConfigError, UnavailableError
from flows.launchers.devices import need_of
from flows.running.server import is_overloaded, server_is_own
from flows.running.waiting import Waiting
from stages.artifacts.request import Request

LEASE_S = 120.0
"""Renewed after three quarters of it. The server takes no less than 60 s."""
SWEEP_S = 15.0
"""Between two looks of the server for leases that have run out."""
ASK_S = 2.0
"""Between two questions whether slots are free. Prefect's own waiting grows to 30 s, and cannot be interrupted."""
PATIENCE_S = 300.0
"""For a server that does not answer, such as one that starts again."""


@contextmanager
def taken(requests: Sequence[Request], launch: LaunchConfig, waiting: Waiting) -> Iterator[None]:
    """Wait for the GPUs of stages that run side by side, and keep them.

    A command's own server has nobody to share with. Raises :class:`ConfigError` if the server has no such limit, or
    never so many slots, :class:`UnavailableError` if it stays away.
    """
    count = sum(need_of(request.stage, launch).count for request in requests)
    if launch.gpu_limit is None or count == 0 or server_is_own():
        yield
        return
    held = ExitStack()
    _wait(held, launch.gpu_limit, count, waiting)
    try:
        yield
    finally:
        # Where the server is away, they come back by themselves.
        with suppress(httpx.HTTPError):
            held.close()


def _wait(held: ExitStack, limit: str, count: int, waiting: Waiting) -> None:
    """Return when the slots are ours."""
    busy = (
        f"waits for {count} slots of the limit {limit!r}, which other runs have; those of a flow that was "
        f"killed come back within {LEASE_S + SWEEP_S:g} s"
    )
    answered_s = time.monotonic()
    while True:
        try:
            if _take(held, limit, count):
                return
            answered_s, why = time.monotonic(), busy
        except UnavailableError as error:
            if time.monotonic() - answered_s > PATIENCE_S:
                raise
            why = f"waits for Prefect's server: {error}"
        waiting.turn(why, ASK_S)


def _take(held: ExitStack, limit: str, count: int) -> bool:
    """Whether the slots were free, and are ours now."""
    try:
        held.enter_context(
            concurrency(
                limit,
                occupy=count,
                max_retries=0,
                lease_duration=LEASE_S,
                strict=True,
                # A server that is away for minutes, or forgets its leases, is no reason to end hours of work; Prefect
                # warns. True would also throw an exception into whatever line runs, even one that cleans up.
                raise_on_lease_renewal_failure=False,
            )
        )
    except ConcurrencySlotAcquisitionError as error:
        cause = error.__cause__
        answered = isinstance(cause, httpx.HTTPStatusError)
        if answered and cause.response.status_code == HTTPStatus.LOCKED:
            return False
        message = f"cannot take {count} slots of the global concurrency limit {limit!r}: {error}"
        if cause is not None and (not answered or is_overloaded(cause)):
            raise UnavailableError(message) from error
        raise ConfigError(
            f"{message}; `cosmos-flows infra init --gpus N` makes it, and makes it larger; a cluster profile without "
            "launch.gpu_limit does not ask for it"
        ) from error
    return True
