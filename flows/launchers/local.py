"""Stages on this machine: each one a new process, under torchrun if it is distributed, or forks of a warm process.

No process outlives the flow, so there is nothing to re-attach.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.process_trees import Process, Watched
from flows.devices import devices
from flows.devices.devices import Share
from flows.devices.waiting import Waiting
from flows.devices.work_folders import WorkFolder
from flows.launchers._base import Job, JobState
from flows.launchers._processes import WarmServer, start_cold
from stages.artifacts.request import REQUEST, Request

LOG = "log.txt"


class JobLauncher:
    """See :class:`flows.launchers._base.JobLauncher`."""

    def __init__(self, run_url: str, config: LaunchConfig) -> None:
        self._config = config
        self._warm: WarmServer | None = None
        # Forks of the warm mode compute on the CPU.
        self.devices = devices.visible() if config.mode == "cold" else []
        self._shares: dict[str, Share] = {}
        """Devices of the wave that is being started, by slot."""

    @contextmanager
    def reserve(self, requests: Sequence[Request], waiting: Waiting) -> Iterator[None]:
        """Lock devices that no other run on this machine uses. The stages' processes keep them locked."""
        needs = [devices.need_of(each.stage, self._config) for each in requests]
        with devices.taken(needs, self.devices, waiting) as shares:
            self._shares = dict(zip((each.slot for each in requests), shares, strict=False))
            yield

    def submit(self, job: Job) -> "LocalJob":
        """Start the job's process."""
        folder = WorkFolder(job.request.stage)
        try:
            request = folder.path / REQUEST
            request.write_text(job.request.model_dump_json(indent=1), encoding="utf-8")
            job.execution.write(request)
            return LocalJob(folder, Watched(self._start(job, request, folder.path / LOG)))
        except BaseException:
            folder.remove()
            raise

    def _start(self, job: Job, request: Path, log: Path) -> Process:
        if self._config.mode == "cold":
            share = self._shares.get(job.request.slot)
            process = start_cold(job, request, log, self._config, share)
            if share is not None:
                # Now only the stage's processes hold the locks, which are freed when they end.
                share.file.close()
            return process
        if self._warm is None or not self._warm.is_running:
            self._warm = WarmServer(self._config)
        return self._warm.start(job.request.stage, request, log, job.execution.parallelism.world_size)

    def reattach(self, job: Job) -> None:
        """Return None: no process outlives its flow."""

    def close(self) -> None:
        """End the fork server if there is one."""
        if self._warm is not None:
            self._warm.close()


@dataclass
class LocalJob:
    """See :class:`flows.launchers._base.RunningJob`."""

    folder: WorkFolder
    process: Watched

    @property
    def directory(self) -> Path:
        """Return the folder in which the process writes."""
        return self.folder.path

    def poll(self) -> JobState:
        """Return the state of the process."""
        code = self.process.poll()
        return JobState("running") if code is None else JobState("ended", code)

    def log(self) -> bytes | None:
        """Return the log of all ranks, None before it exists."""
        log = self.directory / LOG
        return log.read_bytes() if log.exists() else None

    def show_stacks(self) -> None:
        """Let the process and its descendants write their stacks to the log."""
        self.process.show_stacks()

    def cancel(self) -> None:
        """Kill the process and its descendants, including workers that torchrun left."""
        self.process.end()

    def discard(self) -> None:
        """Delete the folder."""
        self.folder.remove()
