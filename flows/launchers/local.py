"""This machine: a process a stage, under torchrun if it is distributed, or a fork of one that has imported everything.

None outlives the flow, so there is never anything to re-attach.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.process_trees import kill, tree
from flows.launchers._base import Job, JobState
from flows.launchers._processes import StageProcess, WarmServer, start_cold
from flows.running import devices, gpus
from flows.running.devices import Share
from flows.running.work_folders import WorkFolder
from stages.artifacts.request import Request
from stages.contracts import STAGES

TREE_INTERVAL_S = 1.0
KILLED = -9


class JobLauncher:
    """See :class:`flows.launchers._base.JobLauncher`; an id is the job's directory."""

    def __init__(self, run_url: str, config: LaunchConfig) -> None:
        self._config = config
        self._running: dict[str, Running] = {}
        self._folders: dict[str, WorkFolder] = {}
        self._warm: WarmServer | None = None
        # Forks compute on the CPU.
        self._devices = devices.visible() if config.mode == "cold" else []
        self._shares: dict[str, Share] = {}
        """By slot, those of the wave that is being started."""
        for name in STAGES:
            devices.require([self._need(name)], self._devices)

    @contextmanager
    def reserve(
        self, requests: Sequence[Request], note: Callable[[str], None], check: Callable[[], None]
    ) -> Iterator[None]:
        """Lock devices that no other run of this machine uses; the stages' processes keep them locked."""
        needs = [self._need(each.stage) for each in requests]
        with devices.taken(needs, self._devices, note, check) as shares:
            self._shares = dict(zip((each.slot for each in requests), shares, strict=False))
            yield

    def _need(self, stage: str) -> devices.Need:
        return devices.Need(stage, gpus.gpus_of(stage, self._config), self._config.stage_gpus.get(stage, ()))

    def submit(self, job: Job) -> str:
        """Start its process."""
        folder = WorkFolder(job.request.stage)
        directory = folder.path
        try:
            path = directory / "request.json"
            path.write_text(job.request.model_dump_json(indent=1), encoding="utf-8")
            job.execution.write(path)
            self._running[str(directory)] = Running(self._start(job, path, directory / "log.txt"))
        except BaseException:
            folder.remove()
            raise
        self._folders[str(directory)] = folder
        return str(directory)

    def _start(self, job: Job, request: Path, log: Path) -> StageProcess:
        if self._config.mode == "cold":
            share = self._shares.get(job.request.slot)
            process = start_cold(job, request, log, self._config, share)
            if share is not None:
                # From here on the stage's processes alone hold the locks, so that they end with them.
                share.close()
            return process
        if self._warm is None or not self._warm.alive:
            self._warm = WarmServer(self._config)
        return self._warm.start(request, log)

    def reattach(self, job: Job) -> str | None:
        """Nothing: processes of a dead flow are dead."""

    def poll(self, job_id: str) -> JobState:
        """Ask the process."""
        return self._running[job_id].look()

    def outcome(self, job_id: str) -> Path:
        """Where the process writes."""
        return Path(job_id)

    def logs(self, job_id: str) -> bytes | None:
        """Of all ranks."""
        log = Path(job_id, "log.txt")
        return log.read_bytes() if log.exists() else None

    def cancel(self, job_id: str) -> None:
        """Leave no process."""
        self._running[job_id].end()

    def discard(self, job_id: str) -> None:
        """Remove its directory."""
        self._running.pop(job_id)
        self._folders.pop(job_id).remove()

    def close(self) -> None:
        """End the fork server, if there is one."""
        if self._warm is not None:
            self._warm.close()


@dataclass
class Running:
    """A process, and what it started."""

    process: StageProcess
    returncode: int | None = None
    _looked_s: float = 0.0
    _tree: list[psutil.Process] = field(default_factory=list)

    def look(self) -> JobState:
        """Notice the end."""
        now_s = time.monotonic()
        if self.returncode is None:
            self.returncode = self.process.poll()
        if now_s - self._looked_s > TREE_INTERVAL_S:
            self._looked_s = now_s
            self._tree = tree(self.process.pid) or self._tree
        return JobState("running") if self.returncode is None else JobState("ended", self.returncode)

    def end(self) -> None:
        """Kill the process, and the workers of a torchrun that ended without them."""
        if self.returncode is None:
            kill(tree(self.process.pid))
            self.returncode = self.process.poll()
            self.returncode = KILLED if self.returncode is None else self.returncode
        kill(self._tree)
