"""Endpoints of the service: cosmos-rl's protocol, descriptions of the scorers, health and metrics."""

import asyncio
import hmac
import json
import logging
import sqlite3
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qsl
from uuid import uuid4

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from starlette.requests import ClientDisconnect

from cosmos_rl_core.errors import no_space
from cosmos_rl_core.reward_service import frames
from cosmos_rl_core.reward_service.scorers import RefusedError
from cosmos_rl_core.reward_service.service import Service
from cosmos_rl_core.reward_service.spool import TooLargeError
from cosmos_rl_core.rewards._base.answers import brief

ROOT = "/api/reward"
FORMAT = 1
"""Version of the format of ``/info``."""
DEFAULT_TYPE = "dance_grpo"
"""Reward of a ``pull`` that names none, as in cosmos-rl."""
RETRY_S = "5"
"""Seconds after which a client is asked to repeat a request that the service could not take."""
MAX_FORM_BYTES, MAX_FORM_FIELDS = 2**24, 64
READ_ANYWAY_BYTES = 2**26
"""Most bytes that are read of the body of a refused request, so that its client sees the answer, no broken pipe."""
READ_ANYWAY_S = 5.0
SLOWEST = 4096
"""Lowest average speed in bytes a second of a body that takes longer than its timeout."""
log = logging.getLogger(__name__)
Form = dict[str, str]


def app_of(service: Service, worker_token: str = "") -> FastAPI:
    """Return the application. ``/push`` takes results only with ``worker_token``, and no results if that is empty."""
    app = FastAPI(title="reward service", openapi_url=None)
    endpoints = Endpoints(service, worker_token)
    app.add_api_route("/healthz", endpoints.health, methods=["GET"])
    app.add_api_route("/metrics", endpoints.metrics, methods=["GET"])
    app.add_api_route(f"{ROOT}/info", endpoints.info, methods=["GET"])
    for name in ("enqueue", "pull", "push", "ping", "latent_attr"):
        app.add_api_route(f"{ROOT}/{name}", getattr(endpoints, name), methods=["POST"])
    app.state.service = service
    app.add_exception_handler(RefusedError, _refused)
    app.add_exception_handler(ClientDisconnect, _gone)
    for full in (OSError, sqlite3.OperationalError):
        app.add_exception_handler(full, _without_space)
    return app


class Endpoints:
    """Handlers of the endpoints."""

    def __init__(self, service: Service, worker_token: str) -> None:
        self._service, self._worker_token = service, worker_token
        self._replica = service.config.environment.get("LEPTON_REPLICA_ID", "")
        self._registry = CollectorRegistry()
        self._registry.register(_Metrics(service))

    async def enqueue(self, request: Request) -> Response:
        """Accept a frame. When this answers 200, the frame is on the disk."""
        service, uuid = self._service, str(uuid4())
        try:
            await self._admit(request)
        except RefusedError as error:
            # Nothing is read of a client without the token.
            if error.status != 401:
                await _read_anyway(_blocks(request, READ_ANYWAY_S))
            raise
        service.arriving += 1
        try:
            frame = await self._receive(request, uuid)
            service.offer.check(frame)
            await service.accept(uuid, frame)
        except BaseException as error:
            service.spool.drop(uuid)
            if isinstance(error, frames.FrameError):
                raise RefusedError(422, f"bad frame: {error}") from error
            raise
        finally:
            service.arriving -= 1
        service.counts["accepted",] += 1
        told = {"uuid": uuid} | ({"replica_id": self._replica} if self._replica else {})
        return JSONResponse(told)

    async def _admit(self, request: Request) -> None:
        """Raise :class:`RefusedError` for a request that can be refused before its body is read."""
        self._require(request, self._service.config.token)
        settings = self._service.config.settings.service
        if (encoding := request.headers.get("content-encoding", "identity")) != "identity":
            raise RefusedError(415, f"Content-Encoding {brief(encoding)}: send the frame as it is, not compressed")
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > settings.max_body_mb * 2**20:
            raise _too_large(settings.max_body_mb)
        if self._service.draining:
            raise RefusedError(503, "the service is shutting down")
        if self._service.queued >= settings.max_queue:
            raise RefusedError(429, f"{self._service.queued} requests wait, at most {settings.max_queue}")

    async def _receive(self, request: Request, uuid: str) -> frames.Frame:
        settings = self._service.config.settings.service
        blocks, most = _blocks(request, settings.body_timeout_s), int(settings.max_body_mb * 2**20)
        try:
            path = await self._service.spool.receive(uuid, blocks, most)
        except TooLargeError as error:
            await _read_anyway(blocks)
            raise _too_large(settings.max_body_mb) from error
        return await asyncio.to_thread(frames.read, path)

    async def pull(self, request: Request) -> Response:
        """Answer with a result, with 400 while there is none, or with 404 for an unknown request or reward."""
        self._require(request, self._service.config.token)
        form = await _form(request)
        if missing := _missing(form, "uuid"):
            return missing
        uuid, kind = form["uuid"], form.get("type") or DEFAULT_TYPE
        try:
            found = self._service.result(uuid, kind)
        except RefusedError as error:
            copies = self._service.copies
            found = await copies.get(uuid, kind) if copies else None
            if found is None:
                return JSONResponse({"message": error.detail}, error.status)
        if found is None:
            return JSONResponse({"message": f"Not found scores for {uuid}"}, 400)
        return Response(found, media_type="application/json")

    async def push(self, request: Request) -> Response:
        """Store a result that another process computed, unless there is one already."""
        if not self._worker_token:
            raise RefusedError(401, "this service takes no results")
        self._require(request, self._worker_token)
        form = await _form(request)
        if missing := _missing(form, "uuid", "scores"):
            return missing
        uuid, kind = form["uuid"], form.get("type") or DEFAULT_TYPE
        try:
            told = json.loads(form["scores"])
            if not isinstance(told, dict):
                raise ValueError("expected a JSON object")
            if not await self._service.push(uuid, kind, told):
                return JSONResponse({"message": f"{uuid} has {kind} scores, which stay"}, 409)
        except (ValueError, RecursionError) as error:
            return JSONResponse({"message": f"Error storing scores: {brief(error)}"}, 500)
        return JSONResponse({"message": "Scores received and stored successfully"})

    async def ping(self, request: Request) -> Response:
        """Answer a client's ping."""
        self._require(request, self._service.config.token)
        return _missing(await _form(request), "info_data") or JSONResponse({"message": "Ping request received"})

    async def latent_attr(self, request: Request) -> Response:
        """Accept a client's facts about its latents and ignore them: here they come from the VAE's own files."""
        self._require(request, self._service.config.token)
        form = await _form(request)
        if missing := _missing(form, "fields"):
            return missing
        try:
            if not isinstance(json.loads(form["fields"]), dict):
                raise ValueError("expected a JSON object")
        except (ValueError, RecursionError) as error:
            return JSONResponse({"message": f"Error setting latent attributes: {brief(error)}"}, 500)
        return JSONResponse({"message": "Latent attributes set successfully"})

    async def info(self, request: Request) -> Response:
        """Answer with a description of each scorer, by name."""
        self._require(request, self._service.config.token)
        named = {name: scorer.info() for name, scorer in self._service.offer.scorers.items()}
        return JSONResponse({"format": FORMAT, "scorers": named})

    async def health(self, request: Request) -> Response:
        """Answer 200 once all scorers are ready, else 503. Only clients with the token see the faults, by scorer."""
        pools, trusted = self._service.pools, self._is_trusted(request, self._service.config.token)
        faults = {pool.label: pool.fault for pool in pools if pool.fault and trusted}
        loading = [pool.label for pool in pools if not pool.ready]
        state = "draining" if self._service.draining else "not ready" if loading else "ready"
        told = {"status": state, "queued": self._service.queued, "loading": loading, "faults": faults}
        return JSONResponse(told, 200 if state == "ready" else 503)

    async def metrics(self, request: Request) -> Response:
        """Return numbers for Prometheus."""
        self._require(request, self._service.config.token)
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    def _require(self, request: Request, token: str) -> None:
        """Raise :class:`RefusedError` unless a request has the token."""
        if not self._is_trusted(request, token):
            raise RefusedError(401, "the bearer token is missing or wrong")

    def _is_trusted(self, request: Request, token: str) -> bool:
        """Return whether a request has the token, in a time that does not depend on a wrong token."""
        given = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        return not token or hmac.compare_digest(given.encode(), token.encode())


class _Metrics:
    """Numbers of a service, read when they are asked for."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Any:
        service, counts = self._service, self._service.counts
        yield CounterMetricFamily("reward_accepted", "Requests accepted", value=counts["accepted",])
        errors = service.copies.errors if service.copies else 0
        yield CounterMetricFamily("reward_redis_errors", "Calls of Redis that failed", value=errors)
        yield GaugeMetricFamily("reward_queued", "Requests without results", value=service.queued)
        settled = CounterMetricFamily("reward_settled", "Results", labels=["reward", "outcome"])
        refused = CounterMetricFamily("reward_refused", "Requests refused", labels=["status"])
        for (what, *labels), count in list(counts.items()):
            if what in ("settled", "refused"):
                (settled if what == "settled" else refused).add_metric(labels, count)
        ready = GaugeMetricFamily("reward_processes_ready", "Processes that can score", labels=["scorer"])
        deaths = CounterMetricFamily("reward_process_deaths", "Processes that ended at work", labels=["scorer"])
        for pool in service.pools:
            ready.add_metric([pool.label], pool.ready)
            deaths.add_metric([pool.label], pool.deaths)
        seconds = CounterMetricFamily("reward_scoring_seconds", "Seconds of scoring", labels=["scorer"])
        for name, spent_s in service.seconds.items():
            seconds.add_metric([name], spent_s)
        yield from (settled, refused, ready, deaths, seconds)


def _too_large(max_mb: float) -> RefusedError:
    return RefusedError(413, f"a body of more than {max_mb:g} MiB; send fewer samples in a request")


async def _blocks(request: Request, timeout_s: float) -> AsyncIterator[bytes]:
    """Yield a body as it arrives. Raises :class:`RefusedError` for one that stops arriving, or hardly arrives."""
    stream, started_s, received = request.stream(), time.monotonic(), 0
    while True:
        left_s = timeout_s + received / SLOWEST - (time.monotonic() - started_s)
        try:
            async with asyncio.timeout(min(timeout_s, left_s)):
                block = await anext(stream)
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            stopped, slow = f"no byte of the body within {timeout_s:g} s", f"the body takes {timeout_s:g} s and comes"
            slow += f" at less than {SLOWEST} bytes a second"
            raise RefusedError(408, slow if received and left_s < timeout_s else stopped) from error
        received += len(block)
        yield block


async def _read_anyway(blocks: AsyncIterator[bytes]) -> None:
    read = 0
    with suppress(RefusedError):  # the body has stopped arriving
        async for block in blocks:
            read += len(block)
            if read > READ_ANYWAY_BYTES:
                return


async def _form(request: Request) -> Form:
    """Return the fields of a form, none for a body of another type. Raises :class:`RefusedError` for a large body."""
    body = bytearray()
    async for block in _blocks(request, 60.0):
        body += block
        if len(body) > MAX_FORM_BYTES:
            raise _too_large(MAX_FORM_BYTES / 2**20)
    if not request.headers.get("content-type", "").startswith("application/x-www-form-urlencoded"):
        return {}
    try:
        return dict(parse_qsl(body.decode("ascii"), keep_blank_values=True, max_num_fields=MAX_FORM_FIELDS))
    except ValueError as error:
        raise RefusedError(422, f"the form cannot be read: {brief(error)}") from error


def _missing(form: Mapping[str, str], *names: str) -> Response | None:
    """Return the answer 422 to a form that lacks a field, in FastAPI's words; None if it has all ``names``."""
    detail = [
        {"type": "missing", "loc": ["body", name], "msg": "Field required", "input": None}
        for name in names
        if name not in form
    ]
    return JSONResponse({"detail": detail}, 422) if detail else None


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    service: Service = request.app.state.service
    service.counts["refused", str(error.status)] += 1
    headers = {"Retry-After": RETRY_S} if error.status in (429, 503, 507) else None
    return JSONResponse({"detail": error.detail} | error.told, error.status, headers)


async def _gone(request: Request, error: Exception) -> Response:
    """Return an answer that nobody gets: the client hung up in the middle of its body."""
    return Response(status_code=400)


async def _without_space(request: Request, error: Exception) -> Response:
    if (full := no_space(error)) is None:
        raise error
    log.error("a request was refused: %s", full)
    return await _refused(request, RefusedError(507, "the disk of the service is full; send the request again later"))
