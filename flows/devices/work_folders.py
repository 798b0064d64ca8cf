"""Folders of this machine that hold the request, the log and the status of a running stage.

A flow locks each of its folders, and a cold stage locks its log, so that abandoned folders can be found.
"""

import fcntl
import math
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from cosmos_rl_core.canonical import from_json
from cosmos_rl_core.errors import FULL
from stages.artifacts.request import REQUEST

PREFIX = "cosmos-flows-"
"""Prefix of the folders' names in ``TMPDIR``."""


class WorkFolder:
    """A new folder, locked until it is removed or this process ends."""

    def __init__(self, name: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{name}-"))
        self._lock = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        hold(self._lock)

    def remove(self) -> None:
        """Delete the folder and its files."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def hold(file: int | IO[bytes]) -> None:
    """Lock an open file for this process and every process that inherits it."""
    # Some file systems have no locks. There the age of the files alone tells whether they are in use.
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_SH)


def abandoned(run_url: str, older_than_s: float, others_s: float) -> dict[Path, int]:
    """Return the size in bytes of each folder of this user that no process uses, or has written to for some time.

    The time is ``older_than_s`` seconds for a folder with a Request of the run, else ``others_s`` seconds: another
    folder's flow may not have written its Request yet, or may be of another run that has just begun.
    """
    found: dict[Path, int] = {}
    for folder in sorted(_place().glob(f"{PREFIX}*")):
        with suppress(FileNotFoundError):
            stat = folder.lstat()
            files = [path for path in folder.rglob("*") if path.is_file()]
            newest_s = max(path.lstat().st_mtime for path in (folder, *files))
            old = newest_s <= time.time() - (older_than_s if _is_of(run_url, folder) else others_s)
            mine = folder.is_dir() and stat.st_uid == os.getuid()
            if mine and old and not any(map(in_use, (folder, *files))):
                found[folder] = sum(path.lstat().st_size for path in files)
    return found


def remove_abandoned(run_url: str) -> None:
    """Remove the folders of flows of this run that were killed, once their processes are gone.

    Only for a process that holds the run's lease. What cannot be removed is left to ``gc``.
    """
    with suppress(OSError):
        for folder in abandoned(run_url, 0.0, math.inf):
            shutil.rmtree(folder, ignore_errors=True)


def _is_of(run_url: str, folder: Path) -> bool:
    """Return whether a folder has a Request of the run. Folders without a whole Request belong to no run."""
    try:
        slot = from_json((folder / REQUEST).read_bytes())["slot"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return str(slot).startswith(f"{run_url}/")


def _place() -> Path:
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:
        # gettempdir writes a file, for which a full disk has no space.
        return Path(os.environ.get("TMPDIR", "/tmp"))


def is_full(folder: Path, size: int = 1) -> bool:
    """Return whether the disk of a folder has no room for ``size`` bytes."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(size))
    except OSError as error:
        return error.errno in FULL
    return False


def in_use(path: Path) -> bool:
    """Return whether a process holds a file or folder, see :func:`hold`. Raises ``OSError`` if there are no locks."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False
