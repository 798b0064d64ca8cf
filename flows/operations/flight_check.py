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
from dataclasses import dataclass
from typing import Literal, TypeVar

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL
from rich.table import Table

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.errors import ConfigError, CosmosRLError, UnavailableError
from cosmos_rl_core.rewards import _client as reward_client
from cosmos_rl_core.rewards import _service
from cosmos_rl_core.storage import store
from flows.launchers._processes import TORCHRUN, module
from flows.operations.pools import GPUS, POOL

Answer = TypeVar("Answer")
Word = Literal["ok", "failed", "not set up"]
TIMEOUT_S = 10.0
RING_TIMEOUT_S = 300.0
NUM_BYTES = 32 * 2**20
NUM_COMMITS = 10
ERROR = re.compile(r"^(?:\[rank\d+\]: )?(\w[\w.]*(?:Error|Exception): .*)$", re.MULTILINE)
"""The last line of a traceback in torchrun's output."""
TAIL = 1000
FORGETFUL = "prefect.server.concurrency.lease_storage.memory"
"""The default lease storage of Prefect's server. Slots that are taken when it restarts are never released."""
LASTING = "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE=prefect.server.concurrency.lease_storage.filesystem"


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
    except (CosmosRLError, httpx.HTTPError, subprocess.SubprocessError, OSError) as error:
        word, detail = "failed", str(error) or type(error).__name__
    return Finding(name, word, detail, time.monotonic() - began_s)


def table(findings: list[Finding]) -> Table:
    """Return the findings as a table."""
    rows = Table("check", "", "found", "seconds")
    for finding in findings:
        rows.add_row(finding.name, finding.word, finding.detail, f"{finding.seconds:.1f}")
    return rows


def require(findings: list[Finding]) -> None:
    """Raise :class:`UnavailableError` with the details of all failed checks, if there are any."""
    failed = [f"{finding.name}: {finding.detail}" for finding in findings if finding.word == "failed"]
    if failed:
        raise UnavailableError("\n".join([f"{len(failed)} of {len(findings)} checks failed", *failed]))


def _ask(question: Callable[[SyncPrefectClient], Answer], missing: str = "") -> Answer:
    """Return the answer of Prefect's server. Raises :class:`ConfigError` with ``missing`` if the object is missing."""
    if PREFECT_API_URL.value() is None:
        raise ConfigError("no Prefect server is configured; start one (`prefect server start`) and set PREFECT_API_URL")
    with get_client(sync_client=True) as client:
        try:
            return question(client)
        except ObjectNotFound:
            raise ConfigError(missing) from None


def _server() -> str:
    def check(client: SyncPrefectClient) -> str:
        if (error := client.api_healthcheck()) is not None:
            raise UnavailableError(f"{client.api_url} does not answer: {error}")
        return f"Prefect {client.api_version()} at {client.api_url}"

    return _ask(check)


def _pool() -> str:
    make = f"there is no work pool {POOL!r}; make it with `cosmos-flows infra init`"
    pool = _ask(lambda client: client.read_work_pool(POOL), make)
    if pool.is_paused:
        raise UnavailableError(f"the work pool {POOL!r} is paused; run `prefect work-pool resume {POOL}`")
    return f"{POOL}, of type {pool.type}"


def _worker() -> str:
    workers = _ask(lambda client: client.read_workers_for_work_pool(POOL), f"there is no work pool {POOL!r}")
    online = [worker.name for worker in workers if worker.status == "ONLINE"]
    if not online:
        raise UnavailableError(f"no worker is online; run `prefect worker start --pool {POOL}`")
    return f"{len(online)} online: {', '.join(online)}"


def _gpus(launch: LaunchConfig) -> str:
    wanted = _most_ranks(launch)
    if shutil.which("nvidia-smi") is None:
        raise NotSetUp("no nvidia-smi on this machine; stages run on the CPU")
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    names = subprocess.run(query, capture_output=True, text=True, timeout=TIMEOUT_S, check=True).stdout.splitlines()
    if len(names) < wanted:
        raise ConfigError(f"found {len(names)} GPUs, expected {wanted}: the cluster profile starts one process a GPU")
    return f"{len(names)} x {', '.join(sorted(set(names)))}"


def _gpu_limit(launch: LaunchConfig) -> str:
    name, wanted = launch.gpu_limit, _most_ranks(launch)
    if name is None:
        raise NotSetUp("the cluster profile has no gpu_limit; its runs do not wait for GPUs")
    make = f"`cosmos-flows infra init --gpus N` makes {GPUS!r}"
    missing = f"there is no global concurrency limit {name!r}; {make}"
    limit = _ask(lambda client: client.read_global_concurrency_limit_by_name(name), missing)
    if limit.limit < wanted:
        raise ConfigError(f"the limit {name!r} has {limit.limit} slots, a stage takes {wanted}; {make} larger")
    return f"{limit.active_slots} of {limit.limit} slots of {name!r} are taken"


def _leases(launch: LaunchConfig) -> str:
    """Check where the server stores the leases of slots. Only its own settings tell."""
    settings = _ask(lambda client: client.request("GET", "/admin/settings").json())
    kept_in = settings["server"]["concurrency"]["lease_storage"]
    if kept_in != FORGETFUL:
        return f"taken slots survive a restart of the server, in {kept_in}"
    lost = (
        "the server keeps taken slots in memory, so slots that are taken when it restarts are never released; "
        f"start it with `{LASTING} prefect server start`"
    )
    if launch.gpu_limit is None:
        raise NotSetUp(f"{lost}. Only cluster profiles with a gpu_limit need this")
    raise ConfigError(lost)


def _most_ranks(launch: LaunchConfig) -> int:
    return max([launch.processes, *launch.stage_processes.values()])


def _ring(launch: LaunchConfig) -> str:
    """Sum a tensor over ranks under torchrun, on this machine alone."""
    ranks = max(2, launch.processes)
    command = [*module(sys.executable, TORCHRUN), "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1", "--nproc-per-node", str(ranks)]
    ended = subprocess.run(
        [*command, "--max-restarts", "0", "--no-python", *module(sys.executable, "stages.execution.ring")],
        capture_output=True,
        text=True,
        timeout=RING_TIMEOUT_S,
        env={"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"} | os.environ,
        check=False,
    )
    if ended.returncode:
        raise UnavailableError(f"{ranks} ranks could not sum a tensor: {_error_of_a_rank(ended.stderr)}")
    found = json.loads(ended.stdout.splitlines()[-1])
    return f"{found['ranks']} ranks over {found['backend']} on {found['device']}: {found['gb_per_s']} GB/s a rank"


def _error_of_a_rank(said: str) -> str:
    """Return the last error of a rank in torchrun's output. The very last one only names the failed rank."""
    found = [error for error in ERROR.findall(said) if "ChildFailedError" not in error]
    return found[-1] if found else said[-TAIL:].strip() or "no output"


def _store(url: str) -> str:
    place = store.join(store.absolute(url), ".check", secrets.token_hex(8))
    data = secrets.token_bytes(NUM_BYTES)
    began_s = time.monotonic()
    store.write(store.join(place, "data"), data)
    written_s = time.monotonic()
    if store.read(store.join(place, "data")) != data:
        raise UnavailableError(f"{place}/data does not hold the bytes that were written")
    read_s = time.monotonic()
    commits = [store.join(place, f"manifest.{n}.json") for n in range(NUM_COMMITS)]
    for name in commits:
        store.put_if_absent(name, name.encode())
    committed_s = time.monotonic()
    decides = store.decides_races(place)
    for name in (store.join(place, "data"), *commits):
        store.remove(name)
    megabytes, commit_ms = NUM_BYTES / 1e6, 1e3 * (committed_s - read_s) / NUM_COMMITS
    rates = f"write {megabytes / (written_s - began_s):.0f} MB/s, read {megabytes / (read_s - written_s):.0f} MB/s"
    races = "" if decides else "; it does not refuse a second writer: let one process at a time write a run"
    return f"{rates}, commit {commit_ms:.1f} ms{races}"


def _reward_service() -> str:
    if not os.environ.get(_service.ENQUEUE_URL):
        raise NotSetUp(f"{_service.ENQUEUE_URL} is not set; only remote rewards need it")
    service = _service.Service.from_environment()
    with reward_client.Client(service, TIMEOUT_S) as client:
        return client.check()


def _wandb() -> str:
    if not os.environ.get("WANDB_API_KEY"):
        raise NotSetUp("WANDB_API_KEY is not set; only [logging] logger = ['wandb'] needs it")
    if os.environ.get("WANDB_MODE") == "offline":
        raise NotSetUp("WANDB_MODE is offline")
    url = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    httpx.get(url, timeout=TIMEOUT_S)
    return f"{url} answers"


CHECKS: dict[str, Callable[[str, LaunchConfig], str]] = {
    "server": lambda store_url, launch: _server(),
    "pool": lambda store_url, launch: _pool(),
    "worker": lambda store_url, launch: _worker(),
    "gpus": lambda store_url, launch: _gpus(launch),
    "gpu limit": lambda store_url, launch: _gpu_limit(launch),
    "leases": lambda store_url, launch: _leases(launch),
    "ring": lambda store_url, launch: _ring(launch),
    "store": lambda store_url, launch: _store(store_url),
    "reward service": lambda store_url, launch: _reward_service(),
    "wandb": lambda store_url, launch: _wandb(),
}
"""Functions of the store's URL and the cluster profile that return a detail.

They raise :class:`NotSetUp` if there is nothing to check, and another error if the check fails.
"""
