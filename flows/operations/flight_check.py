"""Checks of everything that a run needs. Each check uses the real service."""

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from itertools import pairwise
from typing import Literal, TypeVar

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL
from rich.table import Table

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.errors import ConfigError, CosmosRLError, UnavailableError
from cosmos_rl_core.rewards._remote import client as reward_client
from cosmos_rl_core.storage import store
from flows.devices import devices, fitting
from flows.launchers._processes import TORCHRUN, module
from flows.operations.pools import GPUS, WORK_POOL
from stages.registry import STAGES

Answer = TypeVar("Answer")
Word = Literal["ok", "failed", "not set up"]
TIMEOUT_S = 10.0
RING_TIMEOUT_S = 300.0
NUM_BYTES = 32 * 2**20
NUM_COMMITS = 10
ERROR = re.compile(r"^(?:\[rank\d+\]: )?(\w[\w.]*(?:Error|Exception): .*)$", re.MULTILINE)
"""Matches the last line of a traceback in torchrun's output."""
TAIL = 1000
LEASES = "prefect.server.concurrency.lease_storage"
FORGETFUL = f"{LEASES}.memory"
"""The default lease storage of Prefect's server. Slots that are taken when it restarts are never released."""
LASTING = f"PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE={LEASES}.filesystem"
FORGETS = (
    "the server keeps the leases of taken concurrency slots in memory alone: after a restart nothing releases them; "
    f"start it with `{LASTING} prefect server start`"
)
NO_WORK_POOL = f"there is no work pool {WORK_POOL!r}; make it with `cosmos-flows infra init`"


class NotSetUp(Exception):  # noqa: N818 - it is not an error
    """Raised by a check of something optional that is not configured."""


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str
    word: Word
    detail: str
    seconds: float


def flight_check(store_url: str, launch: LaunchConfig) -> list[Finding]:
    """Run every check, even if some fail."""
    return [find(name, store_url, launch) for name in CHECKS]


def find(name: str, store_url: str, launch: LaunchConfig) -> Finding:
    """Run one check of :data:`CHECKS`."""
    began_s = time.monotonic()
    word: Word = "ok"
    try:
        detail = CHECKS[name](store_url, launch)
    except NotSetUp as nothing:
        word, detail = "not set up", str(nothing)
    except httpx.HTTPStatusError as error:
        status, asked = HTTPStatus(error.response.status_code), error.request.url
        word, detail = "failed", f"{asked} answers {status} {status.phrase}; is this the right address?"
    except (CosmosRLError, httpx.HTTPError, subprocess.SubprocessError, OSError) as error:
        word, detail = "failed", str(error) or type(error).__name__
    return Finding(name, word, detail, round(time.monotonic() - began_s, 1))


def table(findings: list[Finding]) -> Table:
    """Return the findings as a table."""
    rows = Table("check", "", "found", "seconds")
    for finding in findings:
        rows.add_row(finding.name, finding.word, finding.detail, str(finding.seconds))
    return rows


def require(findings: list[Finding]) -> None:
    """Raise :class:`UnavailableError` with the details of all failed checks, if there are any."""
    if failed := [f"{found.name}: {found.detail}" for found in findings if found.word == "failed"]:
        title = f"{len(failed)} of {len(findings)} checks failed"
        raise UnavailableError("\n".join([title, *failed]))


def _ask(question: Callable[[SyncPrefectClient], Answer], missing: str = "") -> Answer:
    """Return the answer of Prefect's server. Raises :class:`ConfigError` with ``missing`` if the object is missing."""
    if PREFECT_API_URL.value() is None:
        raise ConfigError("no Prefect server is named; run `prefect server start`, set PREFECT_API_URL")
    with get_client(sync_client=True) as client:
        try:
            return question(client)
        except ObjectNotFound:
            raise ConfigError(missing) from None


def _server(*_: object) -> str:
    error = _ask(lambda client: client.api_healthcheck())
    if isinstance(error, httpx.HTTPStatusError):
        raise error
    if error is not None:
        raise UnavailableError(f"{PREFECT_API_URL.value()} does not answer: {error}")
    return _ask(lambda client: f"Prefect {client.api_version()} at {client.api_url}")


def _pool(*_: object) -> str:
    pool = _ask(lambda client: client.read_work_pool(WORK_POOL), NO_WORK_POOL)
    if pool.is_paused:
        raise UnavailableError(f"{WORK_POOL!r} is paused; run `prefect work-pool resume {WORK_POOL}`")
    return f"{WORK_POOL}, of type {pool.type}"


def _worker(*_: object) -> str:
    workers = _ask(lambda client: client.read_workers_for_work_pool(WORK_POOL), NO_WORK_POOL)
    online = [worker.name for worker in workers if worker.status == "ONLINE"]
    if not online:
        raise UnavailableError(f"no worker is online; run `prefect worker start --pool {WORK_POOL}`")
    return f"{len(online)} online: {', '.join(online)}"


def _gpus(_: str, launch: LaunchConfig) -> str:
    _require_local(launch)
    stages = [name for name, stage in STAGES.items() if stage.torch]
    if wrong := fitting.misfits(stages, launch, devices.visible()):
        raise ConfigError("\n".join(wrong))
    if shutil.which("nvidia-smi") is None:
        if found := devices.visible():
            return f"{len(found)} without nvidia-smi: {', '.join(found)}"
        raise NotSetUp("no nvidia-smi on this machine; stages run on the CPU")
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    names = _output(query, TIMEOUT_S, "nvidia-smi failed").splitlines()
    return f"{len(names)} x {', '.join(sorted(set(names)))}"


def _gpu_limit(_: str, launch: LaunchConfig) -> str:
    name, wanted = launch.gpu_limit, launch.most_ranks
    if name is None:
        raise NotSetUp("the cluster profile has no gpu_limit; its runs do not wait for GPUs")
    make = f"`cosmos-flows infra init --gpus N` makes {GPUS!r}"
    missing = f"there is no global concurrency limit {name!r}; {make}"
    found = _ask(lambda client: client.read_global_concurrency_limit_by_name(name), missing)
    if (slots := found.limit) < wanted:
        raise ConfigError(f"{name!r} has {slots} slots, a stage takes {wanted}; {make} larger")
    return f"{found.active_slots} of {slots} slots of {name!r} are taken"


def _leases(_: str, launch: LaunchConfig) -> str:
    """Check where the server stores the leases of slots, which only its own settings say."""
    settings = _ask(lambda client: client.request("GET", "/admin/settings").json())
    kept_in = settings["server"]["concurrency"]["lease_storage"]
    if kept_in != FORGETFUL:
        return f"taken slots survive a restart of the server, in {kept_in}"
    if launch.gpu_limit is None:
        raise NotSetUp(f"{FORGETS}. Only cluster profiles with a gpu_limit need this")
    raise ConfigError(FORGETS)


def _ring(_: str, launch: LaunchConfig) -> str:
    """Sum a tensor over ranks under torchrun, on this machine alone, each on the device of a stage's rank."""
    _require_local(launch)
    device = devices.device_of("update", launch, devices.visible()) or "any"
    ranks = launch.processes if device == "cuda" else max(2, launch.processes)
    torchrun = [*module(sys.executable, TORCHRUN), "--rdzv-backend", "c10d", "--max-restarts", "0"]
    torchrun += ["--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    torchrun += ["--nproc-per-node", str(ranks), "--no-python"]
    command = [*torchrun, *module(sys.executable, "stages.execution.ring"), device]
    said = _output(command, RING_TIMEOUT_S, f"{ranks} ranks could not sum a tensor")
    found = json.loads(said.splitlines()[-1])
    connection = f"{found['ranks']} ranks over {found['backend']} on {found['device']}"
    return connection if found["gb_per_s"] is None else f"{connection}: {found['gb_per_s']} GB/s a rank"


def _require_local(launch: LaunchConfig) -> None:
    if launch.launcher != "local":
        raise NotSetUp(f"ranks compute on nodes of {launch.launcher}; check one there, with a profile of one machine")


def _output(command: list[str], timeout_s: float, failed: str) -> str:
    """Return the output of a command.

    Raises :class:`UnavailableError` with ``failed`` and the last error of the command if it fails.
    """
    env = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"} | os.environ
    ended = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=env)
    if ended.returncode:
        # The very last error of torchrun only names the failed rank.
        errors = [error for error in ERROR.findall(ended.stderr) if "ChildFailedError" not in error]
        # nvidia-smi prints its errors to stdout.
        errors = errors or [(ended.stderr.strip() or ended.stdout.strip())[-TAIL:]]
        raise UnavailableError(f"{failed}: {errors[-1]}")
    return ended.stdout


def _store(url: str, _: LaunchConfig) -> str:
    place, own = store.join(store.absolute(url), ".check"), secrets.token_hex(8)
    large, data = store.join(place, f"{own}.data"), secrets.token_bytes(NUM_BYTES)
    small = [store.join(place, f"{own}.manifest.{n}.json") for n in range(NUM_COMMITS)]
    times = [time.monotonic()]
    try:
        store.write(large, data)
        times.append(time.monotonic())
        if store.read(large) != data:
            raise UnavailableError(f"{large} does not hold the bytes that were written")
        times.append(time.monotonic())
        for name in small:
            store.put_if_absent(name, name.encode())
        times.append(time.monotonic())
        decides = store.decides_races(place)
    finally:
        for name in (large, *small):
            with suppress(CosmosRLError):  # a store may allow no deletions
                store.remove(name)
    write_s, read_s, commits_s = (after - before for before, after in pairwise(times))
    rates = f"write {NUM_BYTES / 1e6 / write_s:.0f} MB/s, read {NUM_BYTES / 1e6 / read_s:.0f} MB/s"
    races = "" if decides else "; it cannot refuse a second writer: write a run by one process only"
    return f"{rates}, commit {1e3 * commits_s / NUM_COMMITS:.1f} ms{races}"


def _reward_service(*_: object) -> str:
    if not reward_client.is_named(os.environ):
        raise NotSetUp(f"{reward_client.ENQUEUE_URL} is not set; only remote rewards need it")
    with reward_client.Client(reward_client.Service.from_environment(), TIMEOUT_S) as client:
        return client.check()


def _wandb(*_: object) -> str:
    if not os.environ.get("WANDB_API_KEY"):
        raise NotSetUp("WANDB_API_KEY is not set; only [logging] logger = ['wandb'] needs it")
    if os.environ.get("WANDB_MODE") == "offline":
        raise NotSetUp("WANDB_MODE is offline")
    url = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    httpx.get(url, timeout=TIMEOUT_S)
    return f"{url} answers"


_OF_PREFECT = (_server, _pool, _worker, _gpu_limit, _leases)
_OF_MACHINES = (_gpus, _ring, _store, _reward_service, _wandb)
CHECKS: dict[str, Callable[[str, LaunchConfig], str]] = {
    check.__name__[1:].replace("_", " "): check for check in (*_OF_PREFECT, *_OF_MACHINES)
}
"""Functions of the store's URL and the cluster profile that return a detail, by name.

They raise :class:`NotSetUp` if there is nothing to check, and another error if the check fails.
"""
