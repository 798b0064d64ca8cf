"""A cache on a node's own disk for objects of a remote store, named by their digest and bounded in bytes.

It holds objects that never change and whose digests are in a manifest. All processes of a node can share it: each
object is fetched once, and other readers wait for it meanwhile. The environment names the directory, because it belongs
to the node and not to the run.
"""

import fcntl
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from cosmos_rl_core.canonical import sha256
from cosmos_rl_core.errors import ConfigError

DIRECTORY = "COSMOS_RL_CACHE_DIR"
"""Environment variable: a directory on this node's own disk. Without it nothing is cached."""
GIGABYTES = "COSMOS_RL_CACHE_GB"
"""Environment variable: the largest size of the directory, in 10^9 bytes."""
DEFAULT_GB = "100"
SMALLEST_BYTES = 2**16
"""Size in bytes below which objects are not cached: making room costs about as much as fetching one."""
PART, LOCK = ".part", ".lock"


@dataclass(frozen=True)
class Cache:
    """A directory of files named by their sha256. The least recently used files make room for new ones."""

    directory: Path
    max_bytes: int

    def read(self, digest: str, size: int, fetch: Callable[[], bytes]) -> bytes:
        """Return the bytes with this digest, from a copy or from ``fetch``, whose result is then cached.

        ``fetch`` must check the bytes. A damaged copy is dropped and fetched again.
        """
        if not SMALLEST_BYTES <= size <= self.max_bytes:
            return fetch()
        if (found := self._copy(digest)) is not None:
            return found
        with self._alone(digest[:2]):
            if (found := self._copy(digest)) is None:
                found = fetch()
                self._keep(digest, found)
            return found

    def read_part(self, digest: str, start: int, end: int) -> bytes | None:
        """Return bytes ``start`` to ``end`` of a copy without checking them, None if there is no copy."""
        try:
            with (self.directory / digest).open("rb") as file:
                file.seek(start)
                return file.read(end - start)
        except FileNotFoundError:
            return None

    def drop(self, digest: str) -> None:
        """Remove a copy if it exists."""
        (self.directory / digest).unlink(missing_ok=True)

    def _copy(self, digest: str) -> bytes | None:
        path = self.directory / digest
        try:
            # The time of the last use decides which copies make room.
            os.utime(path)
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        if sha256(data) == digest:
            return data
        self.drop(digest)
        return None

    def _keep(self, digest: str, data: bytes) -> None:
        """Write a copy, one process at a time: so the bound holds, and unfinished files belong to dead processes."""
        temporary = self.directory / f"{digest}{PART}"
        with self._alone("room"):
            self._make_room(len(data))
            try:
                temporary.write_bytes(data)
                temporary.replace(self.directory / digest)
            except OSError:
                # Without space the caller still has the bytes, and the next reader fetches them again.
                temporary.unlink(missing_ok=True)

    def _make_room(self, size: int) -> None:
        left = self.max_bytes - size
        newest_first = sorted(self._files(), key=lambda file: file[1].st_mtime_ns, reverse=True)
        for path, status in newest_first:
            left -= status.st_size
            if left < 0 or path.suffix == PART:
                path.unlink(missing_ok=True)

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        for path in self.directory.iterdir():
            # Another process may drop a damaged copy meanwhile.
            with suppress(FileNotFoundError):
                if path.suffix != LOCK:
                    yield path, path.stat()

    @contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """Hold a lock that one thread of one process can hold; it ends with its process."""
        with (self.directory / f"{name}{LOCK}").open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def of_node(url: str, environment: Mapping[str, str] = os.environ) -> Cache | None:
    """Return this node's cache for a URL; None without a directory in the environment, or for a local path.

    Raises :class:`ConfigError` if the directory cannot be made or the size is not a number above 0.
    """
    name, gigabytes = environment.get(DIRECTORY), environment.get(GIGABYTES, DEFAULT_GB)
    if not name or "://" not in url:
        return None
    try:
        if (max_bytes := int(1e9 * float(gigabytes))) <= 0:
            raise ValueError
        Path(name).mkdir(parents=True, exist_ok=True)
    except (ValueError, OverflowError) as error:
        expected = "a number of gigabytes above 0"
        raise ConfigError(f"{GIGABYTES} = {gigabytes!r} is not {expected}") from error
    except OSError as error:
        raise ConfigError(f"{DIRECTORY} = {name!r} cannot be used: {error.strerror}") from error
    return Cache(Path(name), max_bytes)


def of_user(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return this user's cache directory for this project, None if the environment names no place for one."""
    if found := environment.get("XDG_CACHE_HOME"):
        return Path(found, "cosmos-rl-flows")
    home = environment.get("HOME")
    return Path(home, ".cache", "cosmos-rl-flows") if home else None


def of_cosmos_rl(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the directory of cosmos-rl's downloads, None if the environment names no place for one."""
    if found := environment.get("COSMOS_CACHE_DIR"):
        return Path(found).expanduser()
    home = environment.get("HOME")
    return Path(home, ".cache", "cosmos_rl") if home else None
