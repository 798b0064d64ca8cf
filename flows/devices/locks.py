"""The file of locks: a locked byte for each device in use, and one for each device that a run waits for.

These are Linux locks of open file descriptions: every process that inherits the open file holds them too, and the
kernel frees them when the last of these processes has ended, for whatever reason.

The byte is a hash of the physical device: its UUID if it is known. Runs agree on it, however ``CUDA_VISIBLE_DEVICES``
names the device. Runs on one machine exclude each other if they share ``/tmp``.
"""

import fcntl
import hashlib
import os
import struct
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO

from cosmos_rl_core.errors import UnavailableError

LOCKS = Path("/tmp/cosmos-flows-devices.lock")
"""File of locks. Not in ``TMPDIR``, which differs between users."""
CHOOSING = 0
"""Byte that a run locks while it chooses devices, so that two runs never get half of their devices each."""
WANTED = 2**57
"""Offset from a device's byte to the byte of runs that wait for it. Any number of runs may lock that together."""
_FLOCK = "hhqqi4x"
"""``struct flock`` of 64-bit Linux: type, whence, start, length, process."""


def open_locks() -> IO[bytes]:
    """Open the file of locks, which is always empty and which every user of the machine may read and write.

    Raises :class:`UnavailableError` if it cannot be opened.
    """
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


def byte_of(device: str) -> int:
    """Return the offset of a device's byte in the file of locks."""
    return 1 + int.from_bytes(hashlib.sha256(device.encode()).digest()[:7])


def lock(file: IO[bytes], byte: int) -> bool:
    """Lock one byte through an open file. Return False if another open file has locked it."""
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK, byte))
    except (BlockingIOError, PermissionError):
        return False
    return True


def is_in_place(file: IO[bytes]) -> bool:
    """Return whether an open file is still the file of locks. If that was removed, other runs lock a new one."""
    return LOCKS.exists() and os.path.samestat(os.fstat(file.fileno()), LOCKS.stat())


@contextmanager
def wanting(devices: Iterable[str]) -> Iterator[None]:
    """Tell other runs, while the context is open, that this run waits for these devices."""
    with open_locks() as file:
        for device in devices:
            with suppress(BlockingIOError, PermissionError):
                fcntl.fcntl(file, fcntl.F_OFD_SETLK, _flock(fcntl.F_RDLCK, WANTED + byte_of(device)))
        yield


def wanted(devices: Collection[str]) -> list[str]:
    """Return the devices among ``devices`` that a run waits for."""
    if not devices:
        return []
    with open_locks() as file:
        return [device for device in devices if _is_locked(file, WANTED + byte_of(device))]


def _is_locked(file: IO[bytes], byte: int) -> bool:
    """Return whether another open file has locked a byte."""
    found = fcntl.fcntl(file, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, byte))
    return struct.unpack(_FLOCK, found)[0] != fcntl.F_UNLCK


def _flock(kind: int, byte: int) -> bytes:
    return struct.pack(_FLOCK, kind, os.SEEK_SET, byte, 1, 0)
