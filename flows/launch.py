"""Run a wave of Requests: reuse what stands, start the rest, watch it, and raise the stage's own words.

A wave is one synchronous Prefect task, called directly, so that a cancellation reaches it. Resuming is this: asking the
store what stands. Prefect's task cache is off.
"""

import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.states import Completed
from prefect.tasks import Task, exponential_backoff

from cosmos_rl_core import store
from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.errors import EXIT_CODES, ConfigError, CosmosRLError, StageError
from flows.display import Display
from flows.processes import StageProcess, WarmServer, kill, start_cold, tree
from stages.artifacts import standing, why_stale
from stages.contracts import STAGES, Request
from stages.manifest import Manifest
from stages.outcome import read_failures, read_status

POLL_INTERVAL_S = 0.05
TREE_INTERVAL_S = 1.0
LOG_TAIL = 30
"""Lines of a failed stage's log that are shown."""
KIND_OF_EXIT = {code: kind for kind, code in EXIT_CODES.items()}
"""What the runner's exit code says where it could not even leave an error file."""


@dataclass
class Launcher:
    """Makes Requests' artifacts stand."""

    run_url: str
    config: LaunchConfig
    display: Display
    check: Callable[[], None]
    """Raises when the work must end although nothing of it failed."""
    allow_numerics_change: bool = False
    on_done: Callable[[Sequence[Request], Sequence[Manifest]], None] | None = None
    """Told of every wave that stands, made now or before."""
    _warm: WarmServer | None = None
    _out_of_memory: set[str] = field(default_factory=set)
    """Slots whose last try ran out of memory: the next one takes half as many samples at once."""

    def launch(self, name: str, *requests: Request) -> list[Manifest]:
        """Run a wave side by side and return its manifests, in order.

        Raises :class:`StageError` when retries are used up.
        """
        _refuse_overlap(requests)
        as_task = task(
            name=name.rpartition("/")[2],
            task_run_name=name,
            retries=self.config.max_attempts - 1,
            retry_delay_seconds=exponential_backoff(self.config.retry_delay_s),
            retry_jitter_factor=0.5,
            retry_condition_fn=_worth_retrying,
            cache_policy=NO_CACHE,
            persist_result=False,
        )
        outcome = as_task(lambda: self._wave(name, requests))()
        manifests = cast("list[Manifest]", outcome.result() if isinstance(outcome, State) else outcome)
        if self.on_done is not None:
            self.on_done(requests, manifests)
        return manifests

    def close(self) -> None:
        """End the fork server, if there is one."""
        if self._warm is not None:
            self._warm.close()

    def _wave(self, name: str, requests: Sequence[Request]) -> Any:
        self.check()
        missing = [request for request in requests if standing_manifest(request) is None]
        if missing:
            self._make(name, missing)
        manifests = [standing_manifest(request) for request in requests]
        if any(manifest is None for manifest in manifests):
            raise StageError.of("crash", f"{name} ended without an artifact that stands")
        self.display.done(name, [m for m in manifests if m is not None], skipped=not missing)
        return manifests if missing else Completed(name="Skipped", data=manifests)

    def _make(self, name: str, requests: Sequence[Request]) -> None:
        """Start, watch and end the processes; whatever happens here, none of them is left."""
        running: list[_Running] = []
        with ExitStack() as at_the_end:
            try:
                for request in requests:
                    directory = Path(tempfile.mkdtemp(prefix=f"cosmos-flows-{request.stage}-"))
                    at_the_end.callback(shutil.rmtree, directory, ignore_errors=True)
                    running.append(self._start(request, directory))
                while any(one.returncode is None for one in running):
                    time.sleep(POLL_INTERVAL_S)
                    self.check()
                    for one in running:
                        one.look(self.config.stall_timeout_s)
                    self.display.progress(name, [one.status for one in running if one.status is not None])
            finally:
                # All are ended before anything else that could fail.
                for one in running:
                    one.end()
                for one in running:
                    one.keep_log()
            failed = {one.request.slot: error for one in running if (error := one.failure()) is not None}
        self._out_of_memory -= {request.slot for request in requests}
        self._out_of_memory |= {slot for slot, error in failed.items() if error.kind == "out_of_memory"}
        if failed:
            self.display.note(str(next(iter(failed.values()))))
            # What cannot be helped by another try comes first.
            raise min(failed.values(), key=lambda error: error.retryable)

    def _start(self, request: Request, directory: Path) -> "_Running":
        path = directory / "request.json"
        path.write_text(request.model_dump_json(indent=1), encoding="utf-8")
        argv, log = self._argv(request, path), directory / "log.txt"
        if self.config.mode == "warm":
            process = self._fork_server().start(argv, log)
        else:
            process = start_cold(request, argv, log, self.config)
        return _Running(request, process, directory, log, self.display.note)

    def _argv(self, request: Request, path: Path) -> list[str]:
        """What ``stages.runner`` is given on each rank."""
        argv = [str(path), "--threads", str(self.config.threads)]
        argv += ["--numerics-record", store.join(self.run_url, "numerics", f"{request.stage}.json")]
        # Longer than what counts as hung, so that the supervisor decides and not a rank that waits for a large write.
        argv += ["--rank-timeout-s", str(2 * self.config.stall_timeout_s)]
        if STAGES[request.stage].distributed and (size := self.config.shard_size_of(request.stage)) > 1:
            argv += ["--dp-shard-size", str(size), *(["--fsdp-offload"] if self.config.fsdp_offload else [])]
        if (size := self.config.cp_size_of(request.stage)) > 1:
            argv += ["--cp-size", str(size)]
        argv += ["--compile"] if self.config.compile else []
        argv += ["--halve"] if request.slot in self._out_of_memory else []
        argv += [] if self.config.deterministic else ["--nondeterministic"]
        return argv + (["--allow-numerics-change"] if self.allow_numerics_change else [])

    def _fork_server(self) -> WarmServer:
        """The one that runs, or a new one."""
        if self._warm is None or not self._warm.alive:
            self._warm = WarmServer(self.config)
        return self._warm


def standing_manifest(request: Request) -> Manifest | None:
    """The committed artifact that stands for this Request, or None."""
    _, manifest = standing(request.slot)
    if manifest is None or why_stale(manifest, request) is not None:
        return None
    return manifest


@dataclass
class _Running:
    request: Request
    process: StageProcess
    directory: Path
    log: Path
    note: Callable[[str], None]
    returncode: int | None = None
    status: Any = None
    hung: bool = False
    _notes_seen: int = 0
    _alive_s: float = field(default_factory=time.monotonic)
    _looked_s: float = 0.0
    _tree: list[Any] = field(default_factory=list)

    def look(self, stall_timeout_s: float) -> None:
        """Notice the end, progress, or the lack of it."""
        now_s = time.monotonic()
        # Before the status is read, so that the last words of a process that has ended are not missed.
        if self.returncode is None:
            self.returncode = self.process.poll()
        if now_s - self._looked_s > TREE_INTERVAL_S:
            self._looked_s = now_s
            self._tree = tree(self.process.pid) or self._tree
        status = read_status(self.directory)
        if status is not None and (self.status is None or status.sequence != self.status.sequence):
            self._alive_s = now_s
            for message in status.notes[self._notes_seen :]:
                self.note(f"{self.request.stage}: {message}")
            self._notes_seen = len(status.notes)
            self.status = status
        if self.returncode is None and now_s - self._alive_s > stall_timeout_s:
            self.hung = True
            self.end()

    def end(self) -> None:
        """Leave no process."""
        if self.returncode is None:
            kill(tree(self.process.pid))
            self.returncode = self.process.poll()
            self.returncode = -9 if self.returncode is None else self.returncode
        kill(self._tree)

    def keep_log(self) -> None:
        """Put the log beside the artifact. Where that fails, the stage's own words matter more."""
        if not self.log.exists():
            return
        name = f"logs/{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(2)}.log"
        try:
            store.write(store.join(self.request.slot, name), self.log.read_bytes())
        except CosmosRLError as error:
            self.note(f"the log could not be kept: {error}")

    def failure(self) -> StageError | None:
        """Why there is no artifact: a manifest wins, then the ranks' own words, then how the process ended."""
        if standing_manifest(self.request) is not None:
            return None
        name = self.request.slot.rsplit("/", 2)
        where = "/".join(name[-2:])
        failures = read_failures(self.directory)
        if failures and not failures[0].collective:
            return StageError.of(failures[0].kind, f"{where} failed ({failures[0].kind}): {failures[0].message}")
        if self.hung:
            return StageError.of(
                "hung", f"{where} gave no sign of life and was ended; its log is under {self.request.slot}/logs"
            )
        kind = "killed" if self._killed() else KIND_OF_EXIT.get(self.returncode or 0, "crash")
        return StageError.of(kind, f"{where} ended ({kind}, exit code {self.returncode}):\n{self._tail()}")

    def _killed(self) -> bool:
        # torchrun exits with 1 whatever happened to a worker; only its report says how the worker ended.
        return self.returncode == -9 or bool(re.search(r"exitcode\s*:\s*-9\b", self._tail(200)))

    def _tail(self, lines: int = LOG_TAIL) -> str:
        if not self.log.exists():
            return "(no log)"
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


def _worth_retrying(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
    error = state.result(raise_on_failure=False)
    retry = isinstance(error, CosmosRLError) and error.retryable
    if retry:
        get_run_logger().warning("trying again: %s", error)
    return retry


def _refuse_overlap(requests: Sequence[Request]) -> None:
    slots = [request.slot for request in requests]
    gpus = [gpu for request in requests for gpu in request.gpus]
    if len(set(slots)) != len(slots) or len(set(gpus)) != len(gpus):
        raise ConfigError("requests of one wave must have slots and GPU sets of their own")
