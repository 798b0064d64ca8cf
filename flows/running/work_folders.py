"""Folders of this machine in which flows keep what a stage is given and says while it runs.

A flow holds a lock on each of its folders, and a cold stage one on its log, so that a folder whose processes are gone
can be told from one in use.
"""

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

PREFIX = "cosmos-flows-"
"""Of their names in ``TMPDIR``."""


class WorkFolder:
    """A new folder, in use until it is removed or this process ends."""

    def __init__(self, name: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{name}-"))
        self._lock = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        hold(self._lock)

    def remove(self) -> None:
        """Delete it with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def hold(file: int | IO[bytes]) -> None:
    """Mark an open file as in use, by this process and those that inherit it."""
    # Not every file system has locks; the age of what is in a folder counts too.
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_SH)


def abandoned(older_than_s: float) -> dict[Path, int]:
    """This user's folders that no process uses and in which nothing was written for so long; sizes in bytes."""
    found: dict[Path, int] = {}
    for folder in sorted(_place().glob(f"{PREFIX}*")):
        with suppress(FileNotFoundError):
            stat = folder.lstat()
            files = [path for path in folder.rglob("*") if path.is_file()]
            newest_s = max(path.lstat().st_mtime for path in (folder, *files))
            old = newest_s <= time.time() - older_than_s
            mine = folder.is_dir() and stat.st_uid == os.getuid()
            if mine and old and not any(map(_in_use, (folder, *files))):
                found[folder] = sum(path.lstat().st_size for path in files)
    return found


def _place() -> Path:
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:
        # It writes a file to find out, for which a full disk has no space.
        return Path(os.environ.get("TMPDIR", "/tmp"))


def _in_use(path: Path) -> bool:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False
