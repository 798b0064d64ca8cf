"""GPUs that runs share: slots of a global concurrency limit of the Prefect server (concurrency slots), taken while
stages run.

A wave takes all its slots at once, and no flow requests more while it has some, so runs cannot deadlock. The flow
renews a lease on its slots. The slots of a killed flow are free again when its lease expires.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from http import HTTPStatus
from typing import Any

import httpx
from prefect.client.orchestration import get_client
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.errors import ConfigError, UnavailableError, counted
from flows.devices.devices import need_of
from flows.devices.waiting import Waiting
from flows.running.server import is_overloaded, server_is_own
from stages.artifacts.request import Request

LEASE_S = 120.0
"""Duration of a lease in seconds, renewed after three quarters. The server accepts at least 60 s."""
SWEEP_S = 15.0
"""Interval in seconds at which the server looks for expired leases."""
ASK_S = 2.0
"""Interval in seconds at which a flow asks for slots. Prefect's own interval grows to 30 s and ignores interrupts."""
PATIENCE_S = 300.0
"""Wait in seconds for a server that does not answer, for example while it restarts."""
CREATE = (
    "create or enlarge the global concurrency limit with `cosmos-flows infra init --gpus N`, or remove "
    "launch.gpu_limit from the cluster profile"
)


def gpu_slots(launch: LaunchConfig) -> int | None:
    """Return the concurrency slots of the limit ``launch.gpu_limit``.

    None without one, on a command's own server, where no other run is, and if the server does not answer.

    Raises :class:`ConfigError` if the server has no such limit.
    """
    name = launch.gpu_limit
    if name is None or server_is_own() or PREFECT_API_URL.value() is None:
        return None
    try:
        with get_client(sync_client=True) as client:
            return client.read_global_concurrency_limit_by_name(name).limit
    except ObjectNotFound as error:
        found = f"launch.gpu_limit: there is no global concurrency limit {name!r} at {PREFECT_API_URL.value()}"
        raise ConfigError(f"{found}; {CREATE}") from error
    except httpx.HTTPError:
        return None


@contextmanager
def taken(requests: Sequence[Request], launch: LaunchConfig, waiting: Waiting) -> Iterator[None]:
    """Wait for the slots of stages that run side by side, and keep them.

    Does nothing on a command's own server, where no other run is. Raises :class:`ConfigError` if the server has no such
    limit or too few slots in all, :class:`UnavailableError` if it does not answer for minutes.
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
        # If the server does not answer, the lease expires.
        with suppress(httpx.HTTPError):
            held.close()


def _wait(held: ExitStack, limit: str, count: int, waiting: Waiting) -> None:
    """Return when the flow has the slots."""
    # If the server is down for minutes or loses its leases, the work still continues; Prefect warns. An exception at a
    # failed renewal could come at any line, even in cleanup code.
    options: Any = {"max_retries": 0, "strict": True, "raise_on_lease_renewal_failure": False}
    answered_s, wanted = time.monotonic(), f"{counted(count, 'slot')} of the limit {limit!r}"
    while True:
        try:
            held.enter_context(concurrency(limit, occupy=count, lease_duration=LEASE_S, **options))
            return
        except ConcurrencySlotAcquisitionError as error:
            message, cause = f"cannot take {wanted}: {error}", error.__cause__
            answered = isinstance(cause, httpx.HTTPStatusError)
            if answered and cause.response.status_code == HTTPStatus.LOCKED:
                free_s, answered_s = LEASE_S + SWEEP_S, time.monotonic()
                why = f"waits for {wanted}, which other runs hold; a killed flow's come back in {free_s:g} s"
            elif cause is None or (answered and not is_overloaded(cause)):
                raise ConfigError(f"{message}; {CREATE}") from error
            elif time.monotonic() - answered_s > PATIENCE_S:
                raise UnavailableError(message) from error
            else:
                why = f"waits for Prefect's server: {message}"
        waiting.turn(why, ASK_S)
