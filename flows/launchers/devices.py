"""GPUs of this machine: which of them runs may use, and a lock on each one that a stage uses.

A lock is a byte of one file of the machine, locked through the stage's standard input. Locks of this kind (Linux, open
file descriptions) belong to the open file and not to a process: whoever inherits the file holds them too. Torchrun
closes every descriptor but the first three for its workers, and no stage reads its standard input, so that the
launcher, torchrun and every rank hold the locks, and nobody else does. The kernel frees a lock when the last of them is
gone, however it ended. The flow keeps no copy once a stage has started.

The byte follows from the physical device (its UUID where ``nvidia-smi`` tells it), so that runs agree on it however
``CUDA_VISIBLE_DEVICES`` names the device. Runs of one machine exclude each other if they see the same ``/tmp``.
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
from itertools import islice
from pathlib import Path
from tempfile import NamedTemporaryFile

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.errors import ConfigError, UnavailableError
from flows.running.waiting import Waiting
from stages.contracts import STAGES

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""With it CUDA counts devices as ``nvidia-smi`` does."""
LOCKS = Path("/tmp/cosmos-flows-devices.lock")
"""Not in ``TMPDIR``, which is another one for each user."""
CHOOSING = 0
"""The byte that is locked while a run chooses, so that two runs never take half of what each of them needs."""
ASK_S = 0.5
"""Between two looks whether devices are free."""
QUERY_TIMEOUT_S = 60.0
DRIVER = Path("/proc/driver/nvidia/gpus")
_FLOCK = "hhqqi4x"
"""``struct flock`` of 64-bit Linux: type, whence, start, length, process."""


@dataclass(frozen=True)
class Device:
    """A GPU."""

    name: str
    """As ``CUDA_VISIBLE_DEVICES`` may call it."""
    identity: str
    """Of the physical device: its UUID, or its name where nothing tells the UUID."""

    @property
    def byte(self) -> int:
        """Its place in the file of locks."""
        return 1 + int.from_bytes(hashlib.sha256(self.identity.encode()).digest()[:7])


@dataclass
class Share:
    """The devices of one stage, locked."""

    devices: Sequence[Device]
    file: int
    """Descriptor that holds the locks."""

    @property
    def environment(self) -> dict[str, str]:
        """What shows them, and no others, to a process."""
        order = {name: value for name, value in ORDER.items() if name not in os.environ}
        return order | {VISIBLE: ",".join(device.name for device in self.devices)}

    def close(self) -> None:
        """Drop this process's hold on the locks."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


@dataclass(frozen=True)
class Need:
    """What one stage asks for."""

    stage: str
    count: int
    chosen: tuple[int, ...] = ()
    """Indices into the visible devices; empty where any will do."""


def need_of(stage: str, launch: LaunchConfig) -> Need:
    """Return what a stage needs: the GPUs of its set, else one a rank. A stage without torch needs none."""
    if chosen := launch.stage_gpus.get(stage, ()):
        return Need(stage, len(chosen), chosen)
    alone = int(STAGES[stage].torch)
    return Need(stage, launch.processes_of(stage) if STAGES[stage].distributed else alone)


def visible(environment: Mapping[str, str] = os.environ) -> list[Device]:
    """The devices that CUDA would show to a process with this environment; none on a machine without GPUs."""
    known = _known()
    if (named := environment.get(VISIBLE)) is None:
        return [Device(uuid, uuid) for gpu in known for uuid in gpu]
    found: dict[str, Device] = {}
    for name in map(str.strip, named.split(",")):
        identity = _identity(name, known)
        if identity is None:
            # CUDA shows none after the first name that it does not know.
            break
        found.setdefault(identity, Device(name, identity))
    return list(found.values())


def _known() -> list[list[str]]:
    """UUIDs of each GPU in the order of ``nvidia-smi``: those of its MIG devices if it has any, else its own."""
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
    """Return the UUID of each GPU whose device file is here, by PCI address, from the driver's own files.

    For containers that have GPUs and no ``nvidia-smi``. MIG devices are not listed.
    """
    gpus: list[list[str]] = []
    for file in sorted(driver.glob("*/information")):
        lines = map(str.strip, file.read_text(encoding="utf-8").splitlines())
        facts = dict(re.split(r"\s*:\s*", line, maxsplit=1) for line in lines if ":" in line)
        if (devices / f"nvidia{facts.get('Device Minor')}").exists() and "GPU UUID" in facts:
            gpus.append([facts["GPU UUID"]])
    return gpus


def _identity(name: str, known: Sequence[Sequence[str]]) -> str | None:
    """The physical device of a name; None where CUDA would know none of that name."""
    if name.isdecimal():
        if not known:
            return name
        return known[int(name)][0] if int(name) < len(known) else None
    if not name.startswith(("GPU-", "MIG-")):
        return None
    # CUDA takes the beginning of a UUID too.
    full = [uuid for gpu in known for uuid in gpu if uuid.startswith(name)]
    return full[0] if len(full) == 1 else name


def require(needs: Sequence[Need], devices: Sequence[Device]) -> None:
    """Raise :class:`ConfigError` if stages that run side by side need more devices than are visible.

    Nothing is required of a machine without any.
    """
    if not devices:
        return
    seen = f"{len(devices)} visible: {', '.join(device.name for device in devices)}"
    for need in needs:
        if absent := [index for index in need.chosen if index >= len(devices)]:
            raise ConfigError(
                f"launch.stage_gpus.{need.stage} has {absent[0]}, an index into the devices that are visible; {seen}"
            )
    if (count := sum(need.count for need in needs)) > len(devices):
        stages = " and ".join(need.stage for need in needs)
        raise ConfigError(
            f"{stages} need {count} GPUs, one for each process; {seen}. Use fewer processes (launch.processes), or "
            f"show more devices ({VISIBLE})"
        )


@contextmanager
def taken(needs: Sequence[Need], devices: Sequence[Device], waiting: Waiting) -> Iterator[list[Share]]:
    """Wait until there are devices for all needs at once, and hold them.

    A share that is given to a process stays locked until its last process is gone. Without devices there is no share.
    Raises what :func:`require` raises.
    """
    require(needs, devices)
    with ExitStack() as held:
        why = ""
        while (shares := _take(needs, devices) if devices else []) is None:
            why = why or _why_busy(needs, devices)
            waiting.turn(why, ASK_S)
        for share in shares:
            held.callback(share.close)
        yield shares


def _why_busy(needs: Sequence[Need], devices: Sequence[Device]) -> str:
    wanted, names = sum(need.count for need in needs), ", ".join(device.name for device in devices)
    used = ", ".join(f"{name} by process {pid}" for name, pid in users(devices).items())
    return f"waits for {wanted} free GPUs of {names}; in use: {used or 'by processes that cannot be seen'}"


def users(devices: Sequence[Device]) -> dict[str, int]:
    """The first process of the stage that uses each device, by the device's name, as far as we may see processes."""
    names, found = {device.byte: device.name for device in devices}, {}
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdecimal()):
        # It may end meanwhile, or be another user's.
        with suppress(OSError):
            if os.readlink(f"/proc/{pid}/fd/0") != str(LOCKS):
                continue
            locks = Path(f"/proc/{pid}/fdinfo/0").read_text()
            for byte in re.findall(r"OFDLCK.* (\d+) \d+$", locks, re.MULTILINE):
                if int(byte) in names:
                    found.setdefault(names[int(byte)], pid)
    return found


def _take(needs: Sequence[Need], devices: Sequence[Device]) -> list[Share] | None:
    """A share for each need, or None if there are not enough free devices for all of them."""
    with ExitStack() as undone:
        guard = _open()
        undone.callback(os.close, guard)
        if not _lock(guard, CHOOSING):
            return None
        shares: dict[int, Share] = {}
        # Needs with devices of their own choose first, so that no other need has them.
        for index, need in sorted(enumerate(needs), key=lambda one: not one[1].chosen):
            share = shares[index] = Share([], _open())
            undone.callback(share.close)
            chosen = [devices[each] for each in need.chosen]
            eligible = chosen or sorted(devices, key=lambda device: device.identity)
            free = (device for device in eligible if _lock(share.file, device.byte))
            found = set(islice(free, need.count))
            if len(found) < need.count:
                return None
            share.devices = [device for device in devices if device in found]
        if _replaced(guard):
            return None
        undone.pop_all()
        os.close(guard)
        return [shares[index] for index in range(len(needs))]


def _open() -> int:
    """Open the file of locks, which every user of the machine may read and write; there is never anything in it."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        if not LOCKS.exists():
            with NamedTemporaryFile(dir=LOCKS.parent, prefix=f".{LOCKS.name}.") as made, suppress(FileExistsError):
                os.fchmod(made.fileno(), 0o666)
                # Linux refuses O_CREAT of another user's file in /tmp, and a file must never be seen without its mode.
                os.link(made.name, LOCKS)
        file = os.open(LOCKS, flags)
        # Programs that clean /tmp go by age.
        os.utime(file)
    except OSError as error:
        raise UnavailableError(f"cannot lock GPUs in {LOCKS}: {error}") from error
    return file


def _replaced(file: int) -> bool:
    """Whether somebody has removed the file of locks meanwhile, so that others lock another one."""
    return not LOCKS.exists() or not os.path.samestat(os.fstat(file), LOCKS.stat())


def _lock(file: int, byte: int) -> bool:
    """Lock one byte through an open file, if nobody has it."""
    lock = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, lock)
    except (BlockingIOError, PermissionError):
        return False
    return True
