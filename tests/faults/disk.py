"""One case: the disk of a command is full from a seeded change of files on; with room, the same command goes on."""

import errno
import json
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from tests.e2e.flow_process import eventually
from tests.faults.bases import Bases
from tests.faults.kill import ENDED_S, RANDOM, REACHED_S, SAME, judge, reference_of, start
from tests.faults.scenes import SCENES

Disk = Literal["store", "tmp", "everything"]
"""What is on the disk: the store, ``TMPDIR``, or both with the output of the commands and Prefect's database."""
SIZE = "96m"
UNAVAILABLE = 75


@dataclass
class Full:
    """When the disk was full, and what came of it."""

    place: str
    seed: int
    disk: Disk = "store"
    change: int = 0
    of: int = 0
    at: str = ""
    codes: list[int] = field(default_factory=list[int])
    """Exit codes of the commands on the full disk."""
    outcome: str = ""
    seconds: float = 0.0

    def line(self) -> str:
        """The case as a line of JSON."""
        return json.dumps(asdict(self))


def may_mount(folder: Path) -> bool:
    """Whether this process may mount a file system."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, check=False, capture_output=True).returncode != 0:
        return False
    subprocess.run(["umount", str(folder)], check=True)
    return True


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A disk of little room at a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path) -> Path:
    """Take all room of a disk; returns the file to remove."""
    path = disk / "filler"
    with path.open("wb", buffering=0) as file:
        for size in (2**20, 4096, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
    return path


def play(place: str, seed: int, bases: Bases) -> Full:
    """Make one case. The files of a case that went wrong stay."""
    reference = reference_of(place, bases)
    dice, began_s = random.Random(f"full {place} {seed}"), time.monotonic()
    case = Full(place, seed, dice.choice(["store", "store", "tmp", "everything"]), of=reference.changes)
    case.change = dice.randint(1, reference.changes)
    folder = bases.folder / "cases" / f"full-{place.replace(' ', '-')}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    with small_disk(folder if case.disk == "everything" else folder / case.disk) as disk:
        scene = SCENES[place](bases, folder)
        try:
            before = {} if scene.deletes else scene.flows.manifests()
            hold = scene.hold(case.change)
            started = start(scene, hold)
            eventually(lambda: hold.reached() or all(one.process.poll() is not None for one in started), REACHED_S)
            if (moment := hold.reached()) is not None:
                case.at = f"{moment.event} {RANDOM.sub('*', moment.path.removeprefix(str(folder)))}"
            filler = fill(disk)
            hold.release()
            for one in started:
                one.process.wait(ENDED_S)
            case.codes = [one.process.returncode for one in started]
            said = "\n".join(one.said for one in started)
            filler.unlink()
            case.outcome = _complaint(case, said) or judge(scene, reference, before)
        finally:
            scene.ends.close()
            scene.flows.kill_all()
        if case.outcome != SAME and case.disk != "everything":
            shutil.copytree(disk, folder.with_name(f"{folder.name}-disk"), dirs_exist_ok=True)
    case.seconds = round(time.monotonic() - began_s, 1)
    if case.outcome == SAME:
        shutil.rmtree(folder)
    return case


def _complaint(case: Full, said: str) -> str:
    """What is wrong with the end on the full disk; nothing if the command needed no room any more."""
    if any(code not in (0, UNAVAILABLE) for code in case.codes):
        return f"ended with {case.codes}: {said[-3000:]}"
    # Where its output has no room either, only the code tells.
    if UNAVAILABLE in case.codes and case.disk != "everything" and "no space left" not in said.lower():
        return f"does not say that no space is left: {said[-3000:]}"
    if "Traceback" in said:
        return f"a traceback: {said[-3000:]}"
    return ""
