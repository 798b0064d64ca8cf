"""Stages on this machine: new processes, several ranks under torchrun; forks; or processes that stay."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.process_trees import Watched
from flows.devices import devices
from flows.devices.devices import Need, Share
from flows.devices.staying import Processes
from flows.devices.waiting import Waiting
from flows.devices.work_folders import WorkFolder
from flows.launchers._base import Job, JobState
from flows.launchers._processes import WarmServer, start_cold
from flows.launchers._resident import Gang, Residents
from stages.artifacts.request import REQUEST, Request
from stages.registry import STAGES

LOG = "log.txt"


class JobLauncher:
    """See :class:`flows.launchers._base.JobLauncher`."""

    def __init__(self, run_url: str, config: LaunchConfig) -> None:
        self._config = config
        self._warm: WarmServer | None = None
        self._residents = Residents(config)
        self.devices = [] if config.forks else devices.visible()
        self._shares: dict[str, list[Share]] = {}
        """Devices of the wave that is being started, by slot: a share for a stage, or for each of its first workers."""

    @contextmanager
    def reserve(self, requests: Sequence[Request], waiting: Waiting) -> Iterator[None]:
        """Lock devices that no other run on this machine uses. The stages' processes keep them locked."""
        asked = [(each.slot, need) for each in requests for need in devices.shares_of(each.stage, self._config)]
        kept = None
        if any(self._how(each.stage) == "resident" for each in requests):
            self._residents.let_others_go_first(waiting)
            kept = self._residents.idle
        with devices.taken([need for _, need in asked], self.devices, waiting, kept) as shares:
            self._shares = {}
            for (slot, _), share in zip(asked, shares, strict=False):
                self._shares.setdefault(slot, []).append(share)
            yield

    def taken_meanwhile(self, need: Need) -> Share | None:
        """Lock devices, taking them from idle processes if no other is free; return None if there are not enough."""
        share = devices.taken_now(need, self.devices)
        if share is None and self._residents.idle():
            self._residents.give_back()
            share = devices.taken_now(need, self.devices)
        return share

    def give_back(self) -> None:
        """End the processes that serve no Request."""
        self._residents.give_back()

    def _how(self, stage: str) -> str:
        """Return how the ranks of a stage run: cold, forked or resident. Only a stage with torch may be resident."""
        if not STAGES[stage].torch:
            return "cold" if self._config.mode == "cold" else "forked"
        return self._config.ranks_on(devices.device_of(stage, self._config, self.devices))

    def _how_job(self, job: Job) -> str:
        """Return how the ranks of a job run. Only processes that stay meet ranks of other nodes."""
        return self._how(job.request.stage) if job.part is None else "resident"

    def submit(self, job: Job) -> "LocalJob":
        """Start the job's process."""
        shares = self._shares.get(job.request.slot)
        return self._begin(job, shares.pop() if shares else None)

    def join(self, job: Job) -> "LocalJob | None":
        """Start another worker of an elastic stage on devices that are free now; None if there are not enough."""
        stage = job.request.stage
        chosen = self._config.stage_gpus.get(stage, ())
        need = Need(stage, job.ranks_here if STAGES[stage].torch else 0, chosen)
        if self._shares.get(job.request.slot) or not self.devices or not need.count:
            return self.submit(job)
        share = self._free_now(need, apart=self._how_job(job) == "resident")
        if share is None:
            return None
        try:
            return self._begin(job, share)
        finally:
            # Its processes keep the locks.
            share.close()

    def _free_now(self, need: Need, *, apart: bool) -> Share | None:
        if not apart:
            return self.taken_meanwhile(need)
        return devices.taken_now(need, self.devices, self._residents.idle())

    def _begin(self, job: Job, share: Share | None) -> "LocalJob":
        folder = WorkFolder(job.request.stage)
        try:
            request = folder.path / REQUEST
            request.write_text(job.request.model_dump_json(indent=1), encoding="utf-8")
            job.execution.write(request)
            return LocalJob(folder, self._start(job, request, folder.path / LOG, share))
        except BaseException:
            folder.remove()
            raise

    def _start(self, job: Job, request: Path, log: Path, share: Share | None) -> Watched | Gang:
        how = self._how_job(job)
        if how == "resident":
            return self._residents.start(job, request, log, share)
        if how == "cold":
            process = start_cold(job, request, log, self._config, share)
            if share is not None:
                # Now only the stage's processes hold the locks, which are freed when they end.
                share.close()
            return Watched(process)
        if self._warm is None or not self._warm.is_running:
            self._warm = WarmServer(self._config)
        return Watched(self._warm.start(job.request.stage, request, log, job.execution.parallelism.world_size))

    def replies(self) -> list[IO[bytes] | int]:
        """Return the pipes of the fork server and of processes that serve a Request."""
        served = self._residents.replies()
        return [*served, self._warm.replies] if self._warm is not None and self._warm.is_running else served

    def processes(self) -> Processes:
        """Return the processes that stay between jobs."""
        return self._residents.processes()

    def close(self) -> None:
        """End the processes that stay, and the fork server if there is one."""
        self._residents.close()
        if self._warm is not None:
            self._warm.close()


@dataclass
class LocalJob:
    """See :class:`flows.launchers._base.RunningJob`."""

    folder: WorkFolder
    process: Watched | Gang

    @property
    def directory(self) -> Path:
        """Return the folder in which the process writes."""
        return self.folder.path

    @property
    def served_before(self) -> bool:
        """Return whether one of its processes has served another Request before."""
        return isinstance(self.process, Gang) and self.process.served_before

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
        """Kill the processes and their descendants, including workers that torchrun left.

        Processes that stay and have ended their Request well are not killed.
        """
        self.process.end()

    def discard(self) -> None:
        """Delete the folder."""
        self.folder.remove()
