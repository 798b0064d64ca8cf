"""A read-only web server for the runs of a store: one page of all runs, and the report of each."""

import mimetypes
import posixpath
import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from cosmos_rl_core.errors import ArtifactError, ConfigError, CosmosRLError
from cosmos_rl_core.storage import store
from flows.ledger.costs import device_time, duration
from flows.library.lines import RunLine, all_runs
from flows.library.opened_run import open_run
from flows.reporting import ranges
from flows.reporting.report import page_now
from flows.watching.run_list import changes
from stages.reporting.page import render

LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Hosts that only this machine reaches."""
REFRESH_S = 15
"""Seconds after which a browser asks for the list of runs again."""
ALONE = {"x-content-type-options": "nosniff", "content-security-policy": "sandbox"}
"""Headers of files: a page that a plugin wrote into a run cannot act on this server."""
OTHER_KIND = "application/octet-stream"
SHARE = 10
"""A page is made again only after this many times as long as making it took."""


@dataclass(frozen=True)
class _Made:
    data: bytes
    at_s: float
    took_s: float

    @property
    def is_fresh(self) -> bool:
        """Return whether the page need not be made again yet."""
        return time.monotonic() - self.at_s < SHARE * self.took_s


class Reports:
    """The pages of a store. One is made at a time, since a run's plan decides which outside plugins are loaded."""

    def __init__(self, store_url: str) -> None:
        self._store = store.absolute(store_url)
        self._lock = Lock()
        self._pages: dict[str, _Made] = {}

    def runs(self, _: Request) -> Response:
        """Return the page of all runs: those at work first, then by name."""
        return HTMLResponse(self._page("", lambda: self._list(all_runs(self._store))))

    def report(self, request: Request) -> Response:
        """Return the report of a run as it is now."""
        run = _plain(request.path_params["run"])
        return HTMLResponse(self._page(run, lambda: page_now(open_run(run, self._store))))

    def file(self, request: Request) -> Response:
        """Return any file of a run. Reports link some of them."""
        run, path = _plain(request.path_params["run"]), request.path_params["path"]
        if posixpath.normpath(path) != path or path.startswith(("/", "..")) or "\0" in path:
            raise HTTPException(404, "a file of a run is named without dots and double slashes")
        url = store.join(self._store, "runs", run, path)
        try:
            file = store.stream(url)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            raise HTTPException(404, f"{run} has no file {path}") from error
        except OSError as error:
            raise HTTPException(503, f"{path} of {run} cannot be read: {error.strerror}") from error
        kind = mimetypes.guess_type(path)[0] or ("text/plain" if path.endswith(".jsonl") else OTHER_KIND)
        return ranges.answer(file, request.headers.get("range"), kind, ALONE)

    def _page(self, run: str, make: Callable[[], bytes]) -> bytes:
        with self._lock:
            if (made := self._pages.get(run)) is None or not made.is_fresh:
                began_s = time.monotonic()
                data = make()
                ended_s = time.monotonic()
                self._pages[run] = made = _Made(data, ended_s, ended_s - began_s)
            return made.data

    def _list(self, lines: list[RunLine]) -> bytes:
        ordered = sorted(lines, key=lambda line: (line.state != "running", line.run))
        written = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        return render("runs.html", store=self._store, rows=[_row(line) for line in ordered], written=written,
                      refresh_s=REFRESH_S)  # fmt: skip


def _row(line: RunLine) -> dict[str, object]:
    """Return the cells of a run."""
    return {
        "run": line.run,
        "state": line.state,
        "algorithm": line.algorithm,
        "iterations": f"{line.iterations} of {line.num_iterations}" if line.num_iterations else "",
        "rewards": list(changes(line)),
        "left": "" if line.left_s is None else duration(line.left_s),
        "devices": "" if line.device_s is None else device_time(line.device_s),
        "error": line.error,
    }


def _plain(run: str) -> str:
    """Return the id of a run. Raises 404 for one that would leave the folder of runs."""
    if run in (".", ".."):
        raise HTTPException(404, f"there is no run {run}")
    return run


def app_of(store_url: str, host: str) -> Starlette:
    """Return the web application. On a loopback host it answers only requests that name one.

    Otherwise a page of another site could read reports through a name that it points at this machine.
    """
    reports = Reports(store_url)
    routes = [
        Route("/", reports.runs),
        Route("/runs/{run}", lambda request: RedirectResponse(f"/runs/{request.path_params['run']}/report/index.html")),
        Route("/runs/{run}/report/index.html", reports.report),
        Route("/runs/{run}/{path:path}", reports.file),
    ]
    trusted = [Middleware(TrustedHostMiddleware, allowed_hosts=[*LOOPBACK, "[::1]"])] if host in LOOPBACK else []
    handlers = {
        ConfigError: lambda _, error: PlainTextResponse(str(error), 404),
        ArtifactError: lambda _, error: PlainTextResponse(str(error), 500),
        CosmosRLError: lambda _, error: PlainTextResponse(str(error), 503),
    }
    return Starlette(routes=routes, middleware=trusted, exception_handlers=handlers)


def serve(store_url: str, host: str, port: int, said: Callable[[str], None]) -> None:
    """Serve the reports of a store until Ctrl-C or SIGTERM. ``said`` gets the address.

    Raises :class:`ConfigError` if there is no such store or the port is taken.
    """
    store.check_readable(store_url)
    config = uvicorn.Config(app_of(store_url, host), host=host, port=port, log_level="warning", lifespan="off")
    try:
        listening = config.bind_socket()
        listening.listen(config.backlog)
    except SystemExit as error:
        wrong = "the port is taken, or this machine has no such address"
        raise ConfigError(f"cannot serve at {host}:{port}: {wrong}; name others with --port and --host") from error
    shown = f"[{host}]" if ":" in host else host
    said(f"reports of {store.absolute(store_url)} at http://{shown}:{listening.getsockname()[1]}")
    uvicorn.Server(config).run(sockets=[listening])
