"""Is everything there that a run needs? Each check asks the real thing and says what it found."""

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
from typing import Literal

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

Word = Literal["ok", "failed", "not set up"]
TIMEOUT_S = 10.0
RING_TIMEOUT_S = 300.0
NUM_BYTES = 32 * 2**20
NUM_COMMITS = 10
ERROR = re.compile(r"^(?:\[rank\d+\]: )?(\w[\w.]*(?:Error|Exception): .*)$", re.MULTILINE)
"""Last line of a traceback, as torchrun passes it on."""
TAIL = 1000
FORGETFUL = "prefect.server.concurrency.lease_storage.memory"
"""What Prefect's server keeps leases in by default: slots that are taken while it starts again are never given back."""
LASTING = "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE=prefect.server.concurrency.lease_storage.filesystem"


class NotSetUp(Exception):  # noqa: N818 - it is not an error
    """There is nothing to check, and a run that does not ask for it needs none."""


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    name: str
    word: Word
    detail: str
    seconds: float


def flight_check(store_url: str, launch: LaunchConfig) -> list[Finding]:
    """Check everything, whatever else fails."""
    checks: dict[str, Callable[[], str]] = {
        "server": _server,
        "pool": _pool,
        "worker": _worker,
        "gpus": lambda: _gpus(launch),
        "gpu limit": lambda: _gpu_limit(launch),
        "leases": lambda: _leases(launch),
        "ring": lambda: _ring(launch),
        "store": lambda: _store(store_url),
        "reward service": _reward_service,
        "wandb": _wandb,
    }
    return [_find(name, check) for name, check in checks.items()]


def table(findings: list[Finding]) -> Table:
    """For people."""
    rows = Table()
    for column in ("check", "", "found", "seconds"):
        rows.add_column(column)
    for finding in findings:
        rows.add_row(finding.name, finding.word, finding.detail, f"{finding.seconds:.1f}")
    return rows


def require(findings: list[Finding]) -> None:
    """Raise :class:`UnavailableError` that names what failed."""
    failed = [f"{finding.name}: {finding.detail}" for finding in findings if finding.word == "failed"]
    if failed:
        raise UnavailableError("\n".join([f"{len(failed)} of {len(findings)} checks failed", *failed]))


def _find(name: str, check: Callable[[], str]) -> Finding:
    began_s = time.monotonic()
    word: Word
    try:
        word, detail = "ok", check()
    except NotSetUp as nothing:
        word, detail = "not set up", str(nothing)
    except (CosmosRLError, httpx.HTTPError, subprocess.SubprocessError, OSError) as error:
        word, detail = "failed", str(error) or type(error).__name__
    return Finding(name, word, detail, time.monotonic() - began_s)


def _client() -> SyncPrefectClient:
    if PREFECT_API_URL.value() is None:
        raise ConfigError("no Prefect server is named; start one (`prefect server start`) and set PREFECT_API_URL")
    return get_client(sync_client=True)


def _server() -> str:
    with _client() as client:
        if (error := client.api_healthcheck()) is not None:
            raise UnavailableError(f"{client.api_url} does not answer: {error}")
        return f"Prefect {client.api_version()} at {client.api_url}"


def _pool() -> str:
    with _client() as client:
        try:
            pool = client.read_work_pool(POOL)
        except ObjectNotFound:
            raise ConfigError(f"there is no work pool {POOL!r}; make it with `cosmos-flows infra init`") from None
    if pool.is_paused:
        raise UnavailableError(f"the work pool {POOL!r} is paused; `prefect work-pool resume {POOL}`")
    return f"{POOL}, of type {pool.type}"


def _worker() -> str:
    with _client() as client:
        try:
            workers = client.read_workers_for_work_pool(POOL)
        except ObjectNotFound:
            raise ConfigError(f"there is no work pool {POOL!r}") from None
    online = [worker.name for worker in workers if worker.status == "ONLINE"]
    if not online:
        raise UnavailableError(f"no worker is online; start one: prefect worker start --pool {POOL}")
    return f"{len(online)} online: {', '.join(online)}"


def _gpus(launch: LaunchConfig) -> str:
    wanted = _most_ranks(launch)
    if shutil.which("nvidia-smi") is None:
        raise NotSetUp("no nvidia-smi on this machine; stages run on its CPU")
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    names = subprocess.run(query, capture_output=True, text=True, timeout=TIMEOUT_S, check=True).stdout.splitlines()
    if len(names) < wanted:
        raise ConfigError(f"{len(names)} GPUs; the cluster profile starts {wanted} processes, one a GPU")
    return f"{len(names)} x {', '.join(sorted(set(names)))}"


def _gpu_limit(launch: LaunchConfig) -> str:
    name, wanted = launch.gpu_limit, _most_ranks(launch)
    if name is None:
        raise NotSetUp("the cluster profile names no gpu_limit; its runs do not wait for GPUs")
    make = f"`cosmos-flows infra init --gpus N` makes {GPUS!r}"
    with _client() as client:
        try:
            limit = client.read_global_concurrency_limit_by_name(name)
        except ObjectNotFound:
            raise ConfigError(f"there is no global concurrency limit {name!r}; {make}") from None
    if limit.limit < wanted:
        raise ConfigError(f"the limit {name!r} has {limit.limit} slots, a stage takes {wanted}; {make} larger")
    return f"{limit.active_slots} of {limit.limit} slots of {name!r} are taken"


def _leases(launch: LaunchConfig) -> str:
    """Slots are leases of the server, whatever profile it was started under: only it can tell where it keeps them."""
    with _client() as client:
        kept_in = client.request("GET", "/admin/settings").json()["server"]["concurrency"]["lease_storage"]
    if kept_in != FORGETFUL:
        return f"a server that starts again knows who has which slots, by {kept_in}"
    lost = (
        "the server keeps in memory who has which slots of a limit: those taken while it starts again stay taken; "
        f"start it with `{LASTING} prefect server start`"
    )
    if launch.gpu_limit is None:
        raise NotSetUp(f"{lost}. Only cluster profiles with a gpu_limit need it")
    raise ConfigError(lost)


def _most_ranks(launch: LaunchConfig) -> int:
    return max([launch.processes, *launch.stage_processes.values()])


def _ring(launch: LaunchConfig) -> str:
    """Under torchrun as the stages are; on this machine alone."""
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
    """What torchrun says last is only that one failed, and a ruler."""
    found = [error for error in ERROR.findall(said) if "ChildFailedError" not in error]
    return found[-1] if found else said[-TAIL:].strip() or "they said nothing"


def _store(url: str) -> str:
    place = store.join(store.absolute(url), ".check", secrets.token_hex(8))
    data = secrets.token_bytes(NUM_BYTES)
    began_s = time.monotonic()
    store.write(store.join(place, "data"), data)
    written_s = time.monotonic()
    if store.read(store.join(place, "data")) != data:
        raise UnavailableError(f"{place}/data reads other bytes than were written")
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
    races = "" if decides else "; it does not refuse a second writer: have one process write a run at a time"
    return f"{rates}, commit {commit_ms:.1f} ms{races}"


def _reward_service() -> str:
    if not os.environ.get(_service.ENQUEUE_URL):
        raise NotSetUp(f"{_service.ENQUEUE_URL} is not set; only recipes with a remote reward need it")
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
