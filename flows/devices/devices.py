"""GPUs of this machine: which of them runs may use, and a lock on each GPU that a stage uses.

A lock is one byte of a file, locked through the stage's standard input. These are Linux locks of open file
descriptions: every process that inherits the open file holds them too. Torchrun passes its workers only the first three
descriptors, and no stage reads its standard input. So the launcher, torchrun and every rank hold the locks, and no
other process. The kernel frees a lock when the last of these processes has ended, for whatever reason. The flow closes
its copy when a stage has started.

The byte is a hash of the physical device: its UUID if it is known. Runs agree on it, however ``CUDA_VISIBLE_DEVICES``
names the device. Runs on one machine exclude each other if they share ``/tmp``.
"""

import fcntl
import hashlib
import os
import re
import shutil
import struct
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.config.parallelism import Device
from cosmos_rl_core.errors import ConfigError, UnavailableError, counted
from flows.devices.waiting import Waiting
from stages.registry import STAGES

VISIBLE = "CUDA_VISIBLE_DEVICES"
MIG = "MIG-"
"""Beginning of the name of a part of a GPU. CUDA shows a process one such part, whatever the variable names."""
LOCKS = Path("/tmp/cosmos-flows-devices.lock")
"""File of locks. Not in ``TMPDIR``, which differs between users."""
CHOOSING = 0
"""Byte that a run locks while it chooses devices, so that two runs never get half of their devices each."""
ASK_S = 0.5
"""Interval in seconds at which a waiting run looks for free devices."""
QUERY_TIMEOUT_S = 60.0
DRIVER = Path("/proc/driver/nvidia/gpus")
_FLOCK = "hhqqi4x"
"""``struct flock`` of 64-bit Linux: type, whence, start, length, process."""


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

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment variable that shows a process these devices only."""
        return {VISIBLE: ",".join(self.devices)}


def need_of(stage: str, launch: LaunchConfig) -> Need:
    """Return the devices that a stage needs: its ``stage_gpus``, else one for each rank, without torch none."""
    if chosen := launch.stage_gpus.get(stage, ()):
        return Need(stage, len(chosen), chosen)
    alone = int(STAGES[stage].torch)
    return Need(stage, launch.processes_of(stage) if STAGES[stage].distributed else alone)


def device_of(stage: str, launch: LaunchConfig, devices: Sequence[str]) -> Device | None:
    """Return where the ranks of a stage compute. ``devices`` are those that this machine gives to stages.

    None leaves it to the ranks, which take a GPU if they see one: the profile names none, and none is known here.
    """
    if launch.device is not None or launch.mode == "warm":
        return launch.device or "cpu"
    if launch.launcher == "local":
        named = devices or launch.gpus or launch.gpu_limit or launch.stage_gpus
    else:
        named = launch.stage_gpus.get(stage) or launch.allocations.resources_of(stage).gpus_per_node
    return "cuda" if named else None


def visible(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the devices that CUDA shows to a process with this environment; none on a machine without GPUs.

    They have UUIDs, which name one device everywhere, except where nothing tells the UUID.
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
    """Return the UUID of a device, the name if the UUID is unknown, and nothing if CUDA has no such device."""
    if name.isdecimal() and known:
        return known[int(name)][0] if int(name) < len(known) else ""
    if not name.startswith(("GPU-", "MIG-")):
        return name if name.isdecimal() else ""
    # CUDA also accepts the beginning of a UUID.
    full = [uuid for gpu in known for uuid in gpu if uuid.startswith(name)]
    return full[0] if len(full) == 1 else name


def require(needs: Sequence[Need], devices: Sequence[str]) -> None:
    """Raise :class:`ConfigError` if stages that run side by side need more devices than are visible.

    A machine without devices passes.
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
def taken(needs: Sequence[Need], devices: Sequence[str], waiting: Waiting) -> Iterator[list[Share]]:
    """Wait for devices for all needs at once, and lock them.

    A share that a process inherits stays locked until its last process ends. On a machine without devices the list is
    empty. Raises what :func:`require` raises.
    """
    require(needs, devices)
    why = ""
    while (shares := _take(needs, devices) if devices else []) is None:
        why = why or _why_busy(needs, devices)
        waiting.turn(why, ASK_S)
    try:
        yield shares
    finally:
        for share in shares:
            share.file.close()


def taken_now(need: Need, devices: Sequence[str]) -> Share | None:
    """Lock devices for a need and return its share; None if not enough are free, or there are none to lock."""
    shares = _take([need], devices) if devices else None
    return shares[0] if shares else None


def _why_busy(needs: Sequence[Need], devices: Sequence[str]) -> str:
    wanted, names = sum(need.count for need in needs), ", ".join(devices)
    used = ", ".join(f"{name} by process {pid}" for name, pid in users(devices).items())
    return f"waits for {counted(wanted, 'free GPU')} of {names}; in use: {used or 'by processes that cannot be seen'}"


def users(devices: Sequence[str]) -> dict[str, int]:
    """Return one process id for each device in use, for processes that this user may inspect."""
    names, found = {_byte(device): device for device in devices}, {}
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdecimal()):
        # The process may have ended, or belong to another user.
        with suppress(OSError):
            if os.readlink(f"/proc/{pid}/fd/0") != str(LOCKS):
                continue
            locks = Path(f"/proc/{pid}/fdinfo/0").read_text()
            for byte in re.findall(r"OFDLCK.* (\d+) \d+$", locks, re.MULTILINE):
                if int(byte) in names:
                    found.setdefault(names[int(byte)], pid)
    return found


def _take(needs: Sequence[Need], devices: Sequence[str]) -> list[Share] | None:
    """Return a share for each need, or None if free devices do not suffice for all."""
    with _open() as guard, ExitStack() as undone:
        if not _lock(guard, CHOOSING):
            return None
        shares = [Share(need, undone.enter_context(_open())) for need in needs]
        # Needs for certain devices come first, so that no other need takes these devices.
        for share in sorted(shares, key=lambda share: not share.need.chosen):
            need = share.need
            alone = need.count == 1
            eligible = (name for name in _eligible(need, devices) if alone or not name.startswith(MIG))
            free = (device for device in eligible if _lock(share.file, _byte(device)))
            found = set(islice(free, need.count))
            if len(found) < need.count:
                return None
            share.devices = [device for device in devices if device in found]
        # If the file of locks was removed, other runs lock a new one.
        if not LOCKS.exists() or not os.path.samestat(os.fstat(guard.fileno()), LOCKS.stat()):
            return None
        undone.pop_all()
        return shares


def _open() -> IO[bytes]:
    """Open the file of locks, which is always empty and which every user of the machine may read and write."""
    try:
        if not LOCKS.exists():
            with NamedTemporaryFile(dir=LOCKS.parent, prefix=f".{LOCKS.name}.") as made, suppress(FileExistsError):
                os.fchmod(made.fileno(), 0o666)
                # Linux refuses O_CREAT of another user's file in /tmp. Linking publishes the file with its mode set.
                os.link(made.name, LOCKS)
        file = os.fdopen(os.open(LOCKS, os.O_RDWR | os.O_NOFOLLOW), "rb+", buffering=0)
        # Programs that clean /tmp delete old files.
        os.utime(file.fileno())
    except OSError as error:
        raise UnavailableError(f"cannot lock GPUs in {LOCKS}: {error}") from error
    return file


def _byte(device: str) -> int:
    """Return the offset of a device's byte in the file of locks."""
    return 1 + int.from_bytes(hashlib.sha256(device.encode()).digest()[:7])


def _lock(file: IO[bytes], byte: int) -> bool:
    """Lock one byte through an open file. Return False if another open file has locked it."""
    lock = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, lock)
    except (BlockingIOError, PermissionError):
        return False
    return True
