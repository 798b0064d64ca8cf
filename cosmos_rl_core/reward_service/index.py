"""Index of accepted requests and their results: an SQLite database, durable at each commit."""

import json
import logging
import queue
import sqlite3
import threading
import time
from asyncio import wrap_future
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from cosmos_rl_core.errors import ArtifactError, ConfigError

log = logging.getLogger(__name__)
MAX_GROUP = 256
"""Number of changes that one commit makes durable."""
FORMAT = 1
"""Version of the database's format, its `user_version`."""
REDIS_S = 5.0
"""Seconds within which Redis must answer."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    uuid TEXT NOT NULL,
    type TEXT NOT NULL,
    expected TEXT,
    accepted_s REAL NOT NULL,
    settled_s REAL,
    result TEXT,
    PRIMARY KEY (uuid, type)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS settled ON jobs (settled_s);
"""
_INSERT = "INSERT INTO jobs (uuid, type, expected, accepted_s) VALUES (?, ?, ?, ?)"
_SETTLE = "UPDATE jobs SET result = ?, settled_s = ? WHERE uuid = ? AND type = ? AND result IS NULL"
_EXPIRE = (
    "DELETE FROM jobs WHERE settled_s < ? AND uuid NOT IN (SELECT uuid FROM jobs WHERE result IS NULL) RETURNING uuid"
)


@dataclass(frozen=True)
class Job:
    """One reward of one request."""

    uuid: str
    type: str
    """Name under which the client asked for the reward."""
    expected: str | None = None
    """Digest of the scorer that the client expects."""


@dataclass
class _Change:
    statement: str
    rows: Sequence[Sequence[Any]]
    done: "Future[int]" = field(default_factory=lambda: Future[int]())


class Index:
    """The database. One thread writes; changes that wait for the disk at the same time share a commit."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._changes: queue.SimpleQueue[_Change | None] = queue.SimpleQueue()
        try:
            self._reader = _connected(path)
            (found,) = self._reader.execute("PRAGMA user_version").fetchone()
            if found not in (0, FORMAT):
                raise ArtifactError(f"{path} has the format {found}, expected {FORMAT}: a newer service wrote it")
            self._reader.executescript(f"{_SCHEMA} PRAGMA user_version = {FORMAT};")
        except sqlite3.DatabaseError as error:
            advice = "move service.spool away to begin anew; requests without results are then lost"
            raise ArtifactError(f"{path} cannot be used: {error}; {advice}") from error
        self._thread = threading.Thread(target=self._write, name="index", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Finish all changes and close the database."""
        self._changes.put(None)
        self._thread.join()
        self._reader.close()

    async def accept(self, jobs: Sequence[Job]) -> None:
        """Add the jobs of a request. When this returns, they outlive a crash of the machine."""
        now_s = time.time()
        await self._change(_INSERT, [(job.uuid, job.type, job.expected, now_s) for job in jobs])

    async def settle(self, job: Job, result: dict[str, Any]) -> bool:
        """Store a job's result and return True. If it has one already, that stays, and False is returned."""
        text = json.dumps(result, allow_nan=False)
        return await self._change(_SETTLE, [(text, time.time(), job.uuid, job.type)]) == 1

    async def expire(self, ttl_s: float) -> int:
        """Delete results older than ``ttl_s`` seconds, of requests whose jobs all have results; return their number."""
        return await self._change(_EXPIRE, [(time.time() - ttl_s,)])

    def waiting(self) -> list[Job]:
        """Return all jobs without results, the oldest first."""
        rows = self._reader.execute("SELECT uuid, type, expected FROM jobs WHERE result IS NULL ORDER BY accepted_s")
        return [Job(*row) for row in rows]

    def result(self, uuid: str, kind: str) -> str | None:
        """Return the result of a job as JSON, or None if there is none."""
        row = self._reader.execute("SELECT result FROM jobs WHERE uuid = ? AND type = ?", (uuid, kind)).fetchone()
        return None if row is None else row[0]

    def types(self, uuid: str) -> list[str]:
        """Return the names of the rewards of a request; none if it is unknown."""
        return [kind for (kind,) in self._reader.execute("SELECT type FROM jobs WHERE uuid = ?", (uuid,))]

    async def _change(self, statement: str, rows: Sequence[Sequence[Any]]) -> int:
        """Return the number of rows that changed, once they are on the disk."""
        change = _Change(statement, rows)
        self._changes.put(change)
        return await wrap_future(change.done)

    def _write(self) -> None:
        writer = _connected(self._path)
        while (first := self._changes.get()) is not None:
            group: list[_Change] = [first]
            while len(group) < MAX_GROUP and not self._changes.empty():
                if (change := self._changes.get()) is None:
                    self._changes.put(None)
                    break
                group.append(change)
            _commit(writer, group)
        writer.close()


class Copies:
    """Copies of results in Redis, where other replicas of the service find them: ``<uuid>_<reward>``, a result as JSON.

    If Redis does not answer, the service goes on without copies.
    """

    def __init__(self, url: str, ttl_s: float) -> None:
        try:
            redis = import_module("redis.asyncio")
            self._redis: Any = redis.from_url(url, socket_timeout=REDIS_S, socket_connect_timeout=REDIS_S)
        except ImportError as error:
            raise ConfigError("service.redis_url needs the package redis: pip install redis") from error
        except ValueError as error:
            raise ConfigError(f"service.redis_url is no URL of a Redis: {error}") from error
        self._failures = (OSError, redis.RedisError)
        self._ttl_s = max(1, int(ttl_s))
        self.errors = 0
        """Number of results that could not be copied or looked up."""

    async def put(self, job: Job, result: dict[str, Any]) -> None:
        """Copy a result; it lasts as long as the service's own."""
        try:
            await self._redis.set(f"{job.uuid}_{job.type}", json.dumps(result), ex=self._ttl_s)
        except self._failures as error:
            self._failed(error)

    async def get(self, uuid: str, kind: str) -> str | None:
        """Return the result that a replica copied, or None."""
        try:
            found = await self._redis.get(f"{uuid}_{kind}")
        except self._failures as error:
            self._failed(error)
            return None
        return found.decode() if found else None

    async def close(self) -> None:
        """Close all connections."""
        await self._redis.aclose()

    def _failed(self, error: Exception) -> None:
        self.errors += 1
        log.error("Redis does not answer: %s", error)


def _commit(writer: sqlite3.Connection, group: Sequence[_Change]) -> None:
    """Apply changes in one transaction, then set the outcome of each."""
    counts = list[int | sqlite3.Error]()
    try:
        writer.execute("BEGIN IMMEDIATE")
        for change in group:
            counts.append(_apply(writer, change))
        writer.execute("COMMIT")
    except sqlite3.Error as error:
        if writer.in_transaction:
            writer.execute("ROLLBACK")
        counts = [error] * len(group)
    for change, count in zip(group, counts, strict=True):
        if change.done.set_running_or_notify_cancel():
            if isinstance(count, sqlite3.Error):
                change.done.set_exception(count)
            else:
                change.done.set_result(count)


def _apply(writer: sqlite3.Connection, change: _Change) -> int | sqlite3.Error:
    """Apply a change and return the number of changed rows.

    If it violates the database's integrity, it is undone alone, and the error is returned.
    """
    writer.execute("SAVEPOINT one")
    try:
        changed = 0
        for row in change.rows:
            cursor = writer.execute(change.statement, row)
            changed += len(cursor.fetchall()) if cursor.description else cursor.rowcount
    except sqlite3.IntegrityError as error:
        writer.execute("ROLLBACK TO one")
        return error
    writer.execute("RELEASE one")
    return changed


def _connected(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    return connection
