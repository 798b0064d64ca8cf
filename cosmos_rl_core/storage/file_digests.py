"""Sha256 of files. That of a large one is remembered, so that not every process that asks for it reads the file."""

import hashlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cosmos_rl_core.canonical import digest, sha256
from cosmos_rl_core.errors import UnavailableError
from cosmos_rl_core.storage import cache, store

SMALLEST_BYTES = 2**20
"""Smaller files are read each time: that takes no longer than finding what is remembered."""
MAX_THREADS = 8


@dataclass(frozen=True)
class Remembered:
    """Digests of files as they once were: one small file each in ``directory``, None to remember nothing.

    A digest holds while inode, size, time of content and time of inode (``ctime``, which no program sets) are those
    that the file had. So the file system is trusted to change one of them with any byte. What it does not see, such as
    a rotting disk, is not seen here; removing the directory has everything read again.
    """

    directory: Path | None
    settled_s: float = 2.0
    """A file that has just changed is not remembered: its next change may fall into the same tick of the clock."""

    @classmethod
    def of_user(cls) -> "Remembered":
        """Return the digests that this user's processes share."""
        folder = cache.of_user()
        return cls(folder and folder / "sha256")

    def sha256(self, file: Path) -> str:
        """Return the digest of the file's bytes, in hex."""
        with file.open("rb") as stream:
            stamp = _stamp(stream.fileno())
            entry = self._entry(file) if stamp[1] >= SMALLEST_BYTES else None
            if entry is not None and (found := _read(entry, stamp)) is not None:
                return found
            began_s = time.time()
            found = hashlib.file_digest(stream, "sha256").hexdigest()
            settled = max(stamp[2:]) < (began_s - self.settled_s) * 1e9 and _stamp(stream.fileno()) == stamp
        if entry is not None and settled:
            _write(entry, stamp, found)
        return found

    def _entry(self, file: Path) -> Path | None:
        # By where it really is: snapshots of a hub's cache share their files.
        return self.directory and self.directory / sha256(os.fsencode(file.resolve()))


def files_digest(files: dict[str, Path]) -> str:
    """Sha256 (hex) over names and bytes of files; times, order and where they lie do not count.

    Of large files that did not change since they were last read, this takes :class:`Remembered`'s word.
    """
    remembered, names = Remembered.of_user(), sorted(files)
    with ThreadPoolExecutor(MAX_THREADS) as pool:
        found = pool.map(remembered.sha256, [files[name] for name in names])
    return digest([list(pair) for pair in zip(names, found, strict=True)])


def _stamp(file: int) -> list[int]:
    """Inode, size, and the times of content and inode."""
    status = os.fstat(file)
    return [status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _read(entry: Path, stamp: list[int]) -> str | None:
    try:
        *known, found = entry.read_text().split() or [""]
    except (OSError, ValueError):
        return None
    return found if known == [str(number) for number in stamp] else None


def _write(entry: Path, stamp: list[int], found: str) -> None:
    # Without space or permission, nothing is remembered.
    with suppress(UnavailableError):
        store.write(str(entry), " ".join(map(str, [*stamp, found])).encode())
