"""The service: it accepts requests, has them decoded and scored, and keeps the results."""

import asyncio
import logging
import sqlite3
from collections import Counter
from collections.abc import Coroutine, Iterable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from cosmos_rl_core.canonical import digest
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.reward_service import decoder, frames, results
from cosmos_rl_core.reward_service.config import Config
from cosmos_rl_core.reward_service.index import Copies, Index, Job
from cosmos_rl_core.reward_service.pool import ScorerError, WorkerPool
from cosmos_rl_core.reward_service.results import Identity
from cosmos_rl_core.reward_service.scorers import Devices, Offer, RefusedError, decoder_of, scorer_of
from cosmos_rl_core.reward_service.spool import Spool

EXPIRY_S = 60.0
"""Longest interval at which old results are deleted."""
SETTLE_PAUSES_S = (0.5, 30.0)
"""First and longest pause before a result is stored again that did not fit on the disk."""
DECODED_AHEAD = 2
"""Number of requests whose latents are decoded before a process of their scorer is free."""
log = logging.getLogger(__name__)


class Service:
    """Scorers, requests and results."""

    def __init__(self, config: Config, spool: Spool) -> None:
        self.config, self.spool = config, spool
        self.index = Index(spool.index)
        self.draining = False
        self.counts: Counter[tuple[str, ...]] = Counter()
        """Numbers of events, by the kind of event and its labels."""
        self.seconds: Counter[str] = Counter()
        """Seconds of scoring by scorer."""
        self.arriving = 0
        """Number of bodies that arrive now."""
        self._waiting: dict[str, int] = {}
        """Number of samples of each request without results; 0 until its frame is read."""
        self._tasks: set[asyncio.Task[None]] = set()
        folders, devices = _folders(config), Devices(config)
        dtype = config.settings.decode_args.dtype
        version = decoder.version(folders, dtype) if folders else ""
        self._decoder = decoder_of(folders, config, devices, spool.logs) if folders else None
        self.scorers = [scorer_of(served, config, devices, spool.logs, version) for served in config.served]
        # Pixels take over 20 times the room of latents: they are made as they are needed, not for the whole queue.
        at_work = sum(one.args.processes * one.at_a_time for one in config.served)
        self._pixels = asyncio.Semaphore(at_work + DECODED_AHEAD)
        self.offer = Offer({name: scorer for scorer in self.scorers for name in scorer.served.names}, folders)
        service = config.settings.service
        self.copies = Copies(service.redis_url, service.result_ttl_s) if service.redis_url else None

    @property
    def queued(self) -> int:
        """Return the number of requests without results, including requests that are arriving."""
        return len(self._waiting) + self.arriving

    @property
    def pools(self) -> list[WorkerPool]:
        """Return the processes of all scorers, and of the decoder."""
        return [scorer.pool for scorer in self.scorers] + ([self._decoder] if self._decoder else [])

    def start(self) -> None:
        """Start the processes, and go on with the requests that were accepted before the service last ended."""
        waiting: dict[str, list[Job]] = {}
        for job in self.index.waiting():
            waiting.setdefault(job.uuid, []).append(job)
        if swept := self.spool.sweep(waiting):
            log.info("deleted %d files of requests that were not accepted or are done", swept)
        for pool in self.pools:
            pool.start()
        for uuid, jobs in waiting.items():
            self._begin(uuid, jobs, None)
        if waiting:
            log.info("went on with %d requests", len(waiting))
        self._spawn(self._expire())

    async def drain(self) -> None:
        """Let running work finish within ``service.drain_s`` seconds, and end the rest until the next start."""
        self.draining = True
        drain_s = self.config.settings.service.drain_s
        await asyncio.gather(*(pool.stop(drain_s) for pool in self.pools))
        await asyncio.sleep(0)  # what was answered last is now on its way into the index
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def close(self) -> None:
        """Write what is on its way into the index, and close it."""
        await asyncio.to_thread(self.index.close)
        if self.copies is not None:
            await self.copies.close()

    async def accept(self, uuid: str, frame: frames.Frame) -> None:
        """Make a received request durable, and have it scored."""
        await asyncio.to_thread(self.spool.keep, uuid)
        jobs = [Job(uuid, name, frame.scorers.get(name)) for name in frame.rewards]
        await self.index.accept(jobs)
        self._begin(uuid, jobs, frame)

    def result(self, uuid: str, kind: str) -> str | None:
        """Return a result as JSON, None if there is none yet.

        Raises :class:`RefusedError` for an unknown request, and for a reward that it did not ask for.
        """
        if (found := self.index.result(uuid, kind)) is not None:
            return found
        types = self.index.types(uuid)
        if not types:
            kept_s = self.config.settings.service.result_ttl_s
            raise RefusedError(404, f"this service knows no request {uuid}; results are kept for {kept_s:g} s")
        if kind not in types:
            raise RefusedError(404, f"request {uuid} asked for {', '.join(types)}, not {kind}")
        return None

    async def push(self, uuid: str, kind: str, told: Mapping[str, Any]) -> bool:
        """Store a result that a process outside the service computed; return False if there is a result already.

        Its digest never equals the digest of a scorer here, so a client that expects a scorer does not accept it.
        Raises ``ValueError`` for a result without scores, and :class:`RefusedError` for an unknown request.
        """
        if self.result(uuid, kind) is not None:
            return False
        identity = Identity(kind, "pushed", digest({"pushed": kind}))
        result = results.pushed(kind, told, self._waiting.get(uuid) or None, identity)
        return await self._settle(Job(uuid, kind), result)

    def _begin(self, uuid: str, jobs: Iterable[Job], frame: frames.Frame | None) -> None:
        self._waiting[uuid] = 0 if frame is None else frame.shape[0]
        self._spawn(self._request(uuid, [*jobs], frame))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a request was left to the next start", exc_info=error)

    async def _request(self, uuid: str, jobs: list[Job], frame: frames.Frame | None) -> None:
        """Bring a request to its end: a result for each of its jobs, whatever happens."""
        try:
            await self._results(uuid, jobs, frame)
        except Exception as error:
            log.exception("a mistake of the service itself")
            for job in jobs:
                # Jobs that have results keep them.
                await self._end(job, results.failed(job.type, f"the service failed: {error}", self._identity(job)))
        self.spool.forget(uuid)
        del self._waiting[uuid]

    async def _results(self, uuid: str, jobs: list[Job], frame: frames.Frame | None) -> None:
        message: dict[str, Any] = {"frame": str(self.spool.frame(uuid))}
        try:
            frame = frame or await asyncio.to_thread(frames.read, self.spool.frame(uuid))
            self._waiting[uuid] = frame.shape[0]
            async with self._pixels if frame.media == "latent" else nullcontext():
                if frame.media == "latent":
                    message["decoded"] = await self._decode(uuid, frame)
                await asyncio.gather(*(self._score(job, message, frame) for job in jobs))
        except (frames.FrameError, ScorerError, OSError) as error:
            for job in jobs:
                await self._end(job, results.failed(job.type, str(error), self._identity(job)))

    async def _decode(self, uuid: str, frame: frames.Frame) -> dict[str, Any]:
        if self._decoder is None:
            raise ScorerError("latents, and this service has no decoder: set decode_args.model_path")
        message = {"frame": str(self.spool.frame(uuid)), "pixels": str(self.spool.pixels(uuid))}
        answer = await self._decoder.do(message, frame.kind, frame.shape[0])
        if "error" in answer:
            raise ScorerError(f"the latents cannot be decoded: {answer['error']}")
        return answer

    async def _score(self, job: Job, message: Mapping[str, Any], frame: frames.Frame) -> None:
        scorer, decoded_s = self.offer.scorers.get(job.type), message.get("decoded", {}).get("seconds", 0.0)
        try:
            if scorer is None:
                raise ScorerError(f"this service no longer serves {job.type}")
            answer = await scorer.pool.do(message, frame.kind, frame.shape[0])
            if job.expected not in (None, scorer.identity.digest):
                raise ScorerError(f"the scorer changed after the request was accepted; it is now {scorer.identity}")
            self.seconds[scorer.served.names[0]] += answer.get("seconds", 0.0)
            options, identity = scorer.served.options, scorer.identity
            result = results.scored(job.type, answer, frame.shape[0], options, identity, decoded_s)
        except ScorerError as error:
            result = results.failed(job.type, str(error), self._identity(job))
        await self._end(job, result)

    def _identity(self, job: Job) -> Identity:
        scorer = self.offer.scorers.get(job.type)
        return scorer.identity if scorer else Identity(job.type, "", "")

    async def _end(self, job: Job, result: dict[str, Any]) -> None:
        """Store a result, however long the disk is full."""
        pause_s, longest_s = SETTLE_PAUSES_S
        while True:
            try:
                await self._settle(job, result)
                return
            except sqlite3.OperationalError as error:
                log.error("a result of %s was not stored, tried again in %g s: %s", job.uuid, pause_s, error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, longest_s)

    async def _settle(self, job: Job, result: dict[str, Any]) -> bool:
        is_first = await self.index.settle(job, result)
        if is_first:
            self.counts["settled", job.type, "failed" if result["scores"] is None else "scored"] += 1
            if self.copies is not None:
                await self.copies.put(job, result)
        return is_first

    async def _expire(self) -> None:
        ttl_s = self.config.settings.service.result_ttl_s
        while True:
            with suppress(sqlite3.OperationalError):  # a full disk; the next time
                await self.index.expire(ttl_s)
            await asyncio.sleep(min(EXPIRY_S, ttl_s / 2))


def _folders(config: Config) -> dict[str, Path]:
    """Return the folders of VAEs by their channels. A wrong folder is only a warning, because images need no VAE."""
    if config.settings.no_latent_decoder:
        return {}
    try:
        return decoder.folders_of(config.settings.decode_args)
    except ConfigError as error:
        log.warning("latents are refused: %s", error)
        return {}
