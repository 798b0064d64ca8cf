"""GPUs of this machine: the GPUs that runs may use, and a lock on each GPU that a stage uses.

A lock (:mod:`flows.devices.locks`) is held through the stage's standard input. Torchrun passes its workers only the
first three descriptors, and no stage reads its standard input. So the launcher, torchrun and every rank hold the locks,
and no other process. The flow closes its copy when a stage has started.

A process that stays between Requests has one device, whose lock has an open file of its own, and its flow keeps a copy.
"""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice, takewhile
from pathlib import Path
from typing import IO

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.config.parallelism import Device
from cosmos_rl_core.errors import ConfigError, counted
from flows.devices import locks
from flows.devices.waiting import Waiting
from stages.registry import STAGES

VISIBLE = "CUDA_VISIBLE_DEVICES"
MIG = "MIG-"
"""Prefix of the names of MIG devices, which are parts of GPUs. CUDA shows a process one, even if more are named."""
CHOOSING_TRIES, CHOOSING_S = 20, 0.01
"""How often, and at which interval in seconds, a run tries to lock the choice of devices."""
ASK_S = 0.5
"""Interval in seconds at which a waiting run looks for free devices."""
QUERY_TIMEOUT_S = 60.0
DRIVER = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True)
class Need:
    """Devices that one stage needs."""

    stage: str
    count: int
    chosen: tuple[int, ...] = ()
    """Indices into the visible devices; empty for any devices."""


@dataclass
class Share:
    """Locked devices of one stage."""

    need: Need
    file: IO[bytes]
    """Open file that holds the locks."""
    devices: Sequence[str] = ()
    apart: dict[str, IO[bytes]] = field(default_factory=dict[str, IO[bytes]])
    """Open files by device, each with the lock of that device. Empty unless :func:`taken` was called with ``kept``."""

    def close(self) -> None:
        """Close the flow's own files. Locks that a stage's process inherited stay until it ends."""
        for file in (self.file, *self.apart.values()):
            file.close()

    def lock(self, device: str, kept: set[str] | None) -> bool:
        """Lock a device, or take it out of the set ``kept``; see :func:`taken`. Return False if it is not free."""
        if kept is None:
            return locks.lock(self.file, locks.byte_of(device))
        if device in kept:
            kept.remove(device)
            return True
        file = locks.open_locks()
        if not locks.lock(file, locks.byte_of(device)):
            file.close()
            return False
        self.apart[device] = file
        return True

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment variable that shows a process these devices only."""
        return {VISIBLE: ",".join(self.devices)}


def need_of(stage: str, launch: LaunchConfig) -> Need:
    """Return the devices that a stage needs: its ``stage_gpus``, else one for each rank; none without torch."""
    if chosen := launch.stage_gpus.get(stage, ()):
        return Need(stage, len(chosen), chosen)
    elastic = launch.elastic_of(stage)
    return Need(stage, _num_ranks(stage, launch) * (elastic.min if elastic else 1))


def shares_of(stage: str, launch: LaunchConfig) -> list[Need]:
    """Return what a stage needs to begin: one need, or for an elastic stage one for each of its first workers."""
    elastic = launch.elastic_of(stage)
    return [need_of_worker(stage, launch)] * elastic.min if elastic else [need_of(stage, launch)]


def need_of_worker(stage: str, launch: LaunchConfig) -> Need:
    """Return the devices that a worker of an elastic stage needs."""
    return Need(stage, _num_ranks(stage, launch), launch.stage_gpus.get(stage, ()))


def _num_ranks(stage: str, launch: LaunchConfig) -> int:
    """Return the number of ranks that compute with torch together."""
    return launch.processes_of(stage) if STAGES[stage].distributed else int(STAGES[stage].torch)


def device_of(stage: str, launch: LaunchConfig, devices: Sequence[str]) -> Device | None:
    """Return the kind of device on which the ranks of a stage compute. None leaves it to the ranks.

    It follows from the profile, else from ``devices``, which this machine shows to stages. With None, ranks take a GPU
    if they see one.
    """
    if launch.device is not None:
        return launch.device
    if launch.launcher == "local":
        named = devices or launch.gpus or launch.gpu_limit or launch.stage_gpus
    else:
        named = launch.cluster.resources_of(stage).gpus_per_node
    # Forks see no device.
    return "cuda" if named else "cpu" if launch.mode == "warm" else None


def visible(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the devices that CUDA shows to a process with this environment; empty on a machine without GPUs.

    They are UUIDs, which name one device everywhere, or the names in the variable if the UUIDs are unknown.
    """
    known = _known()
    if (named := environment.get(VISIBLE)) is None:
        return [uuid for gpu in known for uuid in gpu]
    # CUDA ignores everything after the first unknown name.
    found = takewhile(bool, (_device(name.strip(), known) for name in named.split(",")))
    return list(dict.fromkeys(found))


def _known() -> list[list[str]]:
    """Return the UUIDs of each GPU in the order of ``nvidia-smi``: its MIG devices if it has any, else its own."""
    if shutil.which("nvidia-smi") is None:
        return known_to_driver()
    query = ["nvidia-smi", "-L"]
    ran = subprocess.run(query, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=False)
    gpus: list[list[str]] = []
    for line in ran.stdout.splitlines():
        if (uuid := re.search(r"\(UUID: *([^)]+)\)", line)) is None:
            continue
        if line.startswith("GPU"):
            gpus.append([uuid[1]])
        elif gpus:
            gpus[-1] = [*(each for each in gpus[-1] if each.startswith("MIG")), uuid[1]]
    return gpus


def known_to_driver(driver: Path = DRIVER, devices: Path = Path("/dev")) -> list[list[str]]:
    """Return the UUID of each GPU that has a device file, in the order of PCI addresses, from the driver's own files.

    Serves containers that have GPUs and no ``nvidia-smi``. MIG devices are not listed.
    """
    gpus: list[list[str]] = []
    for file in sorted(driver.glob("*/information")):
        lines = map(str.strip, file.read_text(encoding="utf-8").splitlines())
        facts = dict(re.split(r"\s*:\s*", line, maxsplit=1) for line in lines if ":" in line)
        if (devices / f"nvidia{facts.get('Device Minor')}").exists() and "GPU UUID" in facts:
            gpus.append([facts["GPU UUID"]])
    return gpus


def _device(name: str, known: Sequence[Sequence[str]]) -> str:
    """Return the UUID of a device, its name if the UUID is unknown, or ``""`` if CUDA has no such device."""
    if name.isdecimal() and known:
        return known[int(name)][0] if int(name) < len(known) else ""
    if not name.startswith(("GPU-", "MIG-")):
        return name if name.isdecimal() else ""
    # CUDA also accepts the beginning of a UUID.
    full = [uuid for gpu in known for uuid in gpu if uuid.startswith(name)]
    return full[0] if len(full) == 1 else name


def require(needs: Sequence[Need], devices: Sequence[str]) -> None:
    """Raise :class:`ConfigError` if stages that run side by side need more devices than are visible.

    On a machine without devices, nothing is raised.
    """
    if not devices:
        return
    seen = f"{len(devices)} visible: {', '.join(devices)}"
    for need in needs:
        if absent := [index for index in need.chosen if index >= len(devices)]:
            raise ConfigError(
                f"launch.stage_gpus.{need.stage} has {absent[0]}, which is no index into the visible devices; {seen}"
            )
        whole = [device for device in _eligible(need, devices) if not device.startswith(MIG)]
        if need.count > 1 and len(whole) < need.count <= len(devices):
            raise ConfigError(f"{need.stage}: {need.count} processes cannot meet on MIG devices; {seen}")
    if (count := sum(need.count for need in needs)) > len(devices):
        stages = " and ".join(need.stage for need in needs)
        raise ConfigError(
            f"{stages} need {count} GPUs, one for each process; {seen}. Use fewer processes (launch.processes), or "
            f"show more devices ({VISIBLE})"
        )


def _eligible(need: Need, devices: Sequence[str]) -> list[str]:
    return [devices[index] for index in need.chosen] or sorted(devices)


@contextmanager
def taken(
    needs: Sequence[Need],
    devices: Sequence[str],
    waiting: Waiting,
    kept: Callable[[], Collection[str]] | None = None,
) -> Iterator[list[Share]]:
    """Wait for devices for all needs at once, and lock them.

    A share that a process inherits stays locked until its last process ends. With ``kept`` each device has a lock of
    its own, and the devices that ``kept`` returns are free for this run, whose processes keep them locked. On a machine
    without devices the list is empty. Raises what :func:`require` raises.
    """
    require(needs, devices)
    with ExitStack() as asking:
        why = ""
        while (shares := _take(needs, devices, kept and kept()) if devices else []) is None:
            if not why:
                why = _why_busy(needs, devices)
                named = {device for need in needs if need.count for device in _eligible(need, devices)}
                asking.enter_context(locks.wanting(named))
            waiting.turn(why, ASK_S)
    try:
        yield shares
    finally:
        for share in shares:
            share.close()


def taken_now(need: Need, devices: Sequence[str], kept: Collection[str] | None = None) -> Share | None:
    """Lock devices for a need and return its share; None if not enough are free, or there are none to lock.

    With ``kept`` each device has a lock of its own; see :func:`taken`.
    """
    shares = _take([need], devices, kept) if devices else None
    return shares[0] if shares else None


def _why_busy(needs: Sequence[Need], devices: Sequence[str]) -> str:
    wanted, names = sum(need.count for need in needs), ", ".join(devices)
    used = ", ".join(f"{name} by process {pid}" for name, pid in users(devices).items())
    return f"waits for {counted(wanted, 'free GPU')} of {names}; in use: {used or 'by processes that cannot be seen'}"


def users(devices: Sequence[str]) -> dict[str, int]:
    """Return one process id for each device in use, for processes that this user may inspect."""
    names, found = {locks.byte_of(device): device for device in devices}, {}
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdecimal()):
        # The process may have ended, or belong to another user.
        with suppress(OSError):
            if os.readlink(f"/proc/{pid}/fd/0") != str(locks.LOCKS):
                continue
            held = Path(f"/proc/{pid}/fdinfo/0").read_text()
            for byte in re.findall(r"OFDLCK.* (\d+) \d+$", held, re.MULTILINE):
                if int(byte) in names:
                    found.setdefault(names[int(byte)], pid)
    return found


def _lock_soon(guard: IO[bytes]) -> bool:
    """Lock the byte for the choice of devices, which other runs hold for milliseconds. Return False if that fails."""
    for _ in range(CHOOSING_TRIES):
        if locks.lock(guard, locks.CHOOSING):
            return True
        time.sleep(CHOOSING_S)
    return False


def _take(needs: Sequence[Need], devices: Sequence[str], kept: Collection[str] | None = None) -> list[Share] | None:
    """Return a share for each need, or None if free devices do not suffice for all. See :func:`taken`."""
    with locks.open_locks() as guard, ExitStack() as undone:
        if not _lock_soon(guard):
            return None
        shares = [Share(need, locks.open_locks()) for need in needs]
        for share in shares:
            undone.callback(share.close)
        left = None if kept is None else set(kept)
        # Needs for certain devices come first, so that no other need takes these devices.
        for share in sorted(shares, key=lambda share: not share.need.chosen):
            need = share.need
            alone = need.count == 1
            eligible = [name for name in _eligible(need, devices) if alone or not name.startswith(MIG)]
            # Devices with processes that stay come first, before new processes start.
            eligible.sort(key=lambda name: name not in (left or ()))
            free = (device for device in eligible if share.lock(device, left))
            found = set(islice(free, need.count))
            if len(found) < need.count:
                return None
            share.devices = [device for device in devices if device in found]
        if not locks.is_in_place(guard):
            return None
        undone.pop_all()
        return shares
