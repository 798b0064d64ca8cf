"""Folder of accepted requests: a body is on disk before it is acknowledged.

``incoming/`` holds bodies that still arrive, ``frames/`` bodies of accepted requests, ``decoded/`` pixels of latents,
``logs/`` what scorers print, ``index.sqlite`` all requests with their results. Two services never share a folder.
"""

import fcntl
import os
import secrets
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, Self

from anyio import to_thread

from cosmos_rl_core.errors import ConfigError

BLOCK_BYTES = 2**18
"""Bytes of a body that are collected before they are written."""


class TooLargeError(ValueError):
    """A body that is larger than the limit."""


class Spool:
    """The folder, locked for this process."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.incoming, self.frames, self.decoded, self.logs = (
            root / name for name in ("incoming", "frames", "decoded", "logs")
        )
        root.parent.mkdir(parents=True, exist_ok=True)
        for folder in (root, self.incoming, self.frames, self.decoded, self.logs):
            # Prompts and pictures of accepted requests are not for other users of the machine.
            folder.mkdir(mode=0o700, exist_ok=True)
        _sync_folder(root)
        _sync_folder(root.absolute().parent)
        self._lock = _locked(root)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.close()

    @property
    def index(self) -> Path:
        """Return the file of the index."""
        return self.root / "index.sqlite"

    def frame(self, uuid: str) -> Path:
        """Return the file of an accepted request's body."""
        return self.frames / uuid

    def pixels(self, uuid: str) -> Path:
        """Return the file of the pixels that a request's latents were decoded to."""
        return self.decoded / f"{uuid}.npy"

    def forget(self, uuid: str) -> None:
        """Delete the files of a request."""
        for path in (self.pixels(uuid), self.frame(uuid)):
            path.unlink(missing_ok=True)

    def sweep(self, waiting: Iterable[str]) -> int:
        """Delete everything but the bodies of waiting requests; return the number of files deleted."""
        kept = {self.frame(uuid) for uuid in waiting}
        swept = [path for folder in (self.incoming, self.frames, self.decoded) for path in folder.iterdir()]
        swept = [path for path in swept if path not in kept]
        for path in swept:
            path.unlink()
        return len(swept)

    async def receive(self, uuid: str, blocks: AsyncIterator[bytes], max_bytes: int) -> Path:
        """Write a body as it arrives, and return its file.

        Raises :class:`TooLargeError` as soon as it is larger than ``max_bytes``, and ``OSError`` for a full disk.
        """
        path = self.incoming / uuid
        try:
            with path.open("xb", buffering=0) as file:
                async for block in _joined(blocks, max_bytes):
                    await to_thread.run_sync(_write, file, block)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return path

    def keep(self, uuid: str) -> None:
        """Make a received body durable: bytes, then name."""
        with (self.incoming / uuid).open("rb") as file:
            os.fsync(file.fileno())
        os.rename(self.incoming / uuid, self.frame(uuid))
        _sync_folder(self.frames)

    def drop(self, uuid: str) -> None:
        """Delete a body that was not accepted."""
        (self.incoming / uuid).unlink(missing_ok=True)
        self.forget(uuid)

    def worker_token(self) -> str:
        """Write a new token for processes that push results, readable by this user alone, and return it."""
        token, path = secrets.token_urlsafe(32), self.root / "worker.token"
        path.unlink(missing_ok=True)
        with open(path, "x", encoding="ascii", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(token)
        return token


async def _joined(blocks: AsyncIterator[bytes], max_bytes: int) -> AsyncIterator[bytes]:
    """Yield a body in larger blocks."""
    held, total = bytearray(), 0
    async for block in blocks:
        total += len(block)
        if total > max_bytes:
            raise TooLargeError
        held += block
        if len(held) >= BLOCK_BYTES:
            yield bytes(held)
            held.clear()
    yield bytes(held)


def _write(file: IO[bytes], block: bytes) -> None:
    rest = memoryview(block)
    while rest:
        # A disk that becomes full takes only a part of the block.
        rest = rest[file.write(rest) :]


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _locked(root: Path) -> IO[str]:
    """Return the open file that holds the folder's lock; the kernel frees it when this process ends."""
    file = (root / "lock").open("a+", encoding="ascii")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        owner = file.read().strip() or "unknown"
        file.close()
        raise ConfigError(f"another service, process {owner}, uses {root}; give each its own service.spool") from error
    with suppress(OSError):  # a full disk; the number is for people
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
    return file
