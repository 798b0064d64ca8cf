"""The interface of launchers: submit, poll, read and cancel jobs. No job outlives its flow."""

import signal
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Literal, Protocol

from cosmos_rl_core.canonical import digest
from cosmos_rl_core.config.launch import LaunchConfig
from flows.devices.devices import Need, Share
from flows.devices.staying import Processes
from flows.devices.waiting import Waiting
from stages.artifacts.request import Request
from stages.execution.execution import Execution

KILLING = {code for number in (signal.SIGKILL, signal.SIGTERM) for code in (-number, 128 + number)}
"""Exit codes of processes that a scheduler or the kernel ended. A shell, or srun, adds 128 to the signal."""

Phase = Literal["waiting", "running", "ended"]


@dataclass(frozen=True)
class Part:
    """The ranks of a job on one of several nodes."""

    first: int
    """The first rank on this node."""
    count: int
    """Number of ranks on this node."""
    host: str
    """Address of the node of rank 0, at which all ranks meet."""


@dataclass(frozen=True)
class Job:
    """One stage to run."""

    request: Request
    execution: Execution = field(default_factory=Execution)
    fresh: bool = False
    """Whether its processes must not have served another Request before."""
    part: Part | None = None
    """The ranks on this node, if others run on other nodes; else None."""

    @cached_property
    def name(self) -> str:
        """Return the stage and the Request's digest."""
        return f"{self.request.stage}-{digest(self.request.model_dump(mode='json'))[:20]}"

    @property
    def ranks_here(self) -> int:
        """Return the number of ranks on this machine."""
        return self.execution.parallelism.world_size if self.part is None else self.part.count


@dataclass(frozen=True)
class JobState:
    """State of a job."""

    phase: Phase
    exit_code: int | None = None
    """Exit code of an ended job, the runner's or torchrun's; the negative number of a signal that ended it."""
    kind: str | None = None
    """Why it ended, if the launcher knows it: a kind of :mod:`cosmos_rl_core.errors`."""
    reason: str = ""
    """The launcher's own message."""
    node_lost: bool = False
    """Whether the job ended because its node was lost, perhaps without a fault of its own."""

    @property
    def killed(self) -> bool:
        """Return whether SIGKILL or SIGTERM ended it."""
        return self.exit_code in KILLING


NOT_BEGUN = JobState("waiting")


class RunningJob(Protocol):
    """A submitted job."""

    directory: Path
    """Local directory of the job's status and error files, current at the last :meth:`poll`."""

    @property
    def served_before(self) -> bool:
        """Return whether one of its processes has served another Request before."""
        ...

    def poll(self) -> JobState:
        """Return the state. Cheap enough to call many times a second."""
        ...

    def log(self) -> bytes | None:
        """Return the log of all nodes so far; None before the job began."""

    def show_stacks(self) -> None:
        """Let all processes of a job that hangs write their stacks to its log."""

    def cancel(self) -> None:
        """End the job if it has not ended; return when all its processes are gone."""

    def discard(self) -> None:
        """Delete the files of a job that has ended."""


class JobLauncher(Protocol):
    """A place where jobs run: this machine, the nodes of a Slurm job, or a Ray cluster."""

    devices: Sequence[str]
    """Devices of this machine that stages get; empty if a scheduler assigns devices."""

    def __init__(self, run_url: str, config: LaunchConfig) -> None: ...

    def reserve(self, requests: Sequence[Request], waiting: Waiting) -> AbstractContextManager[None]:
        """Wait for devices for jobs that run side by side, and keep them for :meth:`submit`.

        Launchers with a scheduler return at once.
        """
        ...

    def taken_meanwhile(self, need: Need) -> Share | None:
        """Lock devices of this machine for work during a wave; return None if not enough are free."""

    def give_back(self) -> None:
        """Free the devices that are kept between jobs, because the flow is about to wait."""

    def submit(self, job: Job) -> RunningJob:
        """Start a job, now or when the scheduler has room."""
        ...

    def join(self, job: Job) -> RunningJob | None:
        """Start another worker of an elastic stage on devices that are free now; return None if there are not enough.

        Launchers without elastic stages raise ``NotImplementedError``.
        """
        ...

    def replies(self) -> Sequence[IO[bytes] | int]:
        """Return pipes that can be read once a job may have ended; none where only :meth:`RunningJob.poll` tells."""
        ...

    def processes(self) -> Processes:
        """Return the processes that stay between jobs on this machine."""
        ...

    def close(self) -> None:
        """Release the processes and devices that are kept between jobs."""
