"""Sha256 of files; digests of large files are stored, so that other processes need not read the files again."""

import fcntl
import hashlib
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from cosmos_rl_core.canonical import digest, sha256
from cosmos_rl_core.errors import ConfigError, UnavailableError
from cosmos_rl_core.storage import cache, store

SMALLEST_BYTES = 2**20
"""Size in bytes below which a file is read each time, because that takes no longer than finding a stored digest."""
MAX_THREADS = 8


@dataclass(frozen=True)
class Remembered:
    """Stored digests of files: one small file each in ``directory``, None to store nothing.

    A digest is valid while the file keeps its inode, size, content time and inode time (``ctime``, which programs
    cannot set). The file system must change one of them with every change of a byte; a failing disk goes unnoticed.
    After the directory is removed, every file is read again. If several processes ask for the digest of one file at
    the same time, as the ranks of a stage do, one of them reads it, and the others wait.
    """

    directory: Path | None
    settled_s: float = 2.0
    """Age in seconds of a file's last change from which its digest is stored. A younger file could change again within
    the same tick of the clock."""

    @classmethod
    def of_user(cls) -> "Remembered":
        """Return the stored digests that all processes of this user share."""
        folder = cache.of_user()
        return cls(folder and folder / "sha256")

    def sha256(self, file: Path) -> str:
        """Return the digest of the file's bytes, in hex."""
        with file.open("rb") as stream:
            stamp = _stamp(stream.fileno())
            entry = self._entry(file) if stamp[1] >= SMALLEST_BYTES else None
            if entry is not None and (found := _read(entry, stamp)) is not None:
                return found
            if entry is None or max(stamp[2:]) >= (time.time() - self.settled_s) * 1e9:
                return hashlib.file_digest(stream, "sha256").hexdigest()
            with _alone(entry):
                if (found := _read(entry, stamp)) is not None:
                    return found
                found = hashlib.file_digest(stream, "sha256").hexdigest()
                if _stamp(stream.fileno()) == stamp:
                    # Without space or permission, nothing is remembered.
                    with suppress(ConfigError, UnavailableError):
                        store.write(str(entry), " ".join(map(str, [*stamp, found])).encode())
        return found

    def _entry(self, file: Path) -> Path | None:
        # Links are resolved, because snapshots in the cache of the Hugging Face hub share their files.
        return self.directory and self.directory / sha256(os.fsencode(file.resolve()))


def files_digest(files: dict[str, Path]) -> str:
    """Return the sha256 (hex) over names and bytes of files; times, order and places of the files do not count.

    Large files that did not change since they were last read have a stored digest (:class:`Remembered`).
    """
    remembered, names = Remembered.of_user(), sorted(files)
    with ThreadPoolExecutor(MAX_THREADS) as pool:
        found = pool.map(remembered.sha256, [files[name] for name in names])
    return digest([list(pair) for pair in zip(names, found, strict=True)])


def _stamp(file: int) -> list[int]:
    """Return inode, size in bytes, and the times of content and inode in nanoseconds."""
    status = os.fstat(file)
    return [status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


@contextmanager
def _alone(entry: Path) -> Iterator[None]:
    """Hold a lock on an entry that one thread of one process can hold; go on without it where none can be made."""
    with ExitStack() as held:
        with suppress(OSError):
            entry.parent.mkdir(parents=True, exist_ok=True)
            # Many entries share a lock, so that there are few lock files.
            lock = held.enter_context(entry.with_name(f"{entry.name[:2]}{cache.LOCK}").open("wb"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _read(entry: Path, stamp: list[int]) -> str | None:
    try:
        *known, found = entry.read_text().split() or [""]
    except (OSError, ValueError):
        return None
    return found if known == [str(number) for number in stamp] else None
