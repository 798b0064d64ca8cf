"""A node's own copies of what lies far away: bytes named by their digest, at most so many of them.

For objects that never change, read through their manifests from a store that is no directory. Every process of a node
may use it at once, and each object is fetched once: who asks for it meanwhile waits. The directory comes from the
environment, as it belongs to the node and not to the run.
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
"""Environment variable: a directory on this node's own disk. Without it nothing is kept."""
GIGABYTES = "COSMOS_RL_CACHE_GB"
"""Environment variable: how much the directory may hold, in 10^9 bytes."""
DEFAULT_GB = "100"
SMALLEST_BYTES = 2**16
"""Smaller objects are not kept: fetching one costs about as much as finding out what makes room for it."""
PART, LOCK = ".part", ".lock"


@dataclass(frozen=True)
class Cache:
    """Files named by their own sha256 in one directory; those used longest ago make room for new ones."""

    directory: Path
    max_bytes: int

    def read(self, digest: str, size: int, fetch: Callable[[], bytes]) -> bytes:
        """The bytes of this digest: a copy, or what ``fetch`` gives, which must have checked them and is kept.

        A damaged copy is dropped and fetched again.
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
        """Some bytes of a copy, not checked; None where there is none."""
        try:
            with (self.directory / digest).open("rb") as file:
                file.seek(start)
                return file.read(end - start)
        except FileNotFoundError:
            return None

    def drop(self, digest: str) -> None:
        """Remove a copy, if there is one."""
        (self.directory / digest).unlink(missing_ok=True)

    def _copy(self, digest: str) -> bytes | None:
        path = self.directory / digest
        try:
            # Its time of use decides who makes room.
            os.utime(path)
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        if sha256(data) == digest:
            return data
        self.drop(digest)
        return None

    def _keep(self, digest: str, data: bytes) -> None:
        """Keep a copy. One process at a time, so that the bound holds, and an unfinished file is of a dead process."""
        temporary = self.directory / f"{digest}{PART}"
        with self._alone("room"):
            self._make_room(len(data))
            try:
                temporary.write_bytes(data)
                temporary.replace(self.directory / digest)
            except OSError:
                # No space left: the caller has the bytes all the same, and the next one fetches them again.
                temporary.unlink(missing_ok=True)

    def _make_room(self, size: int) -> None:
        left = self.max_bytes - size
        for path, status in sorted(self._files(), key=lambda file: file[1].st_mtime_ns, reverse=True):
            left -= status.st_size
            if left < 0 or path.suffix == PART:
                path.unlink(missing_ok=True)

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        for path in self.directory.iterdir():
            # A damaged copy may be dropped by another process meanwhile.
            with suppress(FileNotFoundError):
                if path.suffix != LOCK:
                    yield path, path.stat()

    @contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """One thread of one process at a time; one that dies lets go."""
        with (self.directory / f"{name}{LOCK}").open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def of_node(url: str, environment: Mapping[str, str] = os.environ) -> Cache | None:
    """This node's cache for what lies at a URL; None where the environment names none, or where a directory holds it.

    Raises :class:`ConfigError` for a directory that cannot be made, or a size that is no number.
    """
    name, gigabytes = environment.get(DIRECTORY), environment.get(GIGABYTES, DEFAULT_GB)
    if not name or "://" not in url:
        return None
    try:
        if (max_bytes := int(1e9 * float(gigabytes))) <= 0:
            raise ValueError
        Path(name).mkdir(parents=True, exist_ok=True)
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{GIGABYTES} = {gigabytes!r} is no number of gigabytes above 0") from error
    except OSError as error:
        raise ConfigError(f"{DIRECTORY} = {name!r} cannot be used: {error.strerror}") from error
    return Cache(Path(name), max_bytes)


def of_user(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Where this user's programs keep what may be forgotten; None where the environment names no such place."""
    if found := environment.get("XDG_CACHE_HOME"):
        return Path(found, "cosmos-rl-flows")
    home = environment.get("HOME")
    return Path(home, ".cache", "cosmos-rl-flows") if home else None
