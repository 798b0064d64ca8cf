"""The interface of launchers: a stage is submitted, polled, read, cancelled; what a dead flow left is re-attached."""

import signal
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, Protocol

from cosmos_rl_core.canonical import digest
from cosmos_rl_core.config.launch import LaunchConfig
from flows.running.waiting import Waiting
from stages.artifacts.request import Request
from stages.execution.execution import Execution

KILLING = (signal.SIGKILL, signal.SIGTERM)


Phase = Literal["waiting", "running", "ending", "ended"]


@dataclass(frozen=True)
class Job:
    """One stage to run."""

    request: Request
    execution: Execution = field(default_factory=Execution)

    @cached_property
    def name(self) -> str:
        """From the Request's digest: the same in every flow that asks for the same, whatever it recorded."""
        return f"{self.request.stage}-{digest(self.request.model_dump(mode='json'))[:20]}"


@dataclass(frozen=True)
class JobState:
    """How a job, or an allocation, is."""

    phase: Phase
    exit_code: int | None = None
    """Of an ended job: the runner's or torchrun's, or the negative number of the signal."""
    kind: str | None = None
    """Why it ended, where the scheduler knows: a kind of :mod:`cosmos_rl_core.errors`."""
    reason: str = ""
    """The scheduler's own words."""

    @property
    def killed(self) -> bool:
        """Whether it ended by a signal that somebody else sends: a scheduler that wants its node, or the kernel."""
        # A shell, or srun, adds 128 to the signal.
        code = self.exit_code
        return code is not None and (-code in KILLING or code - 128 in KILLING)


NOT_BEGUN = JobState("waiting")


class RunningJob(Protocol):
    """A job that was submitted."""

    directory: Path
    """Where the job's status and error files are, as far as :meth:`poll` has seen them."""

    def poll(self) -> JobState:
        """How it is; cheap enough to ask many times a second."""
        ...

    def log(self) -> bytes | None:
        """What the job said so far, on all its nodes; None before it began."""
        ...

    def cancel(self) -> None:
        """End it, if it has not ended, and whatever it left; returns when all that is gone."""
        ...

    def discard(self) -> None:
        """Forget it when it has ended, and its files."""
        ...


class JobLauncher(Protocol):
    """Runs jobs somewhere."""

    def __init__(self, run_url: str, config: LaunchConfig) -> None: ...

    def reserve(self, requests: Sequence[Request], waiting: Waiting) -> AbstractContextManager[None]:
        """Wait until there are devices for jobs that are to run side by side, and keep them for :meth:`submit`.

        Schedulers have devices of their own, and need no wait here.
        """
        ...

    def submit(self, job: Job) -> RunningJob:
        """Have it run, now or when there is room."""
        ...

    def reattach(self, job: Job) -> RunningJob | None:
        """Return this job if an earlier flow submitted it and it has not ended, else None."""
        ...

    def close(self) -> None:
        """Give back what is held between jobs."""
        ...
