"""The interface of launchers: a stage is submitted, polled, read, cancelled; what a dead flow left is re-attached."""

import signal
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, Protocol

from cosmos_rl_core.canonical import digest
from cosmos_rl_core.config.launch import LaunchConfig
from stages.artifacts.request import Request
from stages.execution.execution import Execution

KILLING = (signal.SIGKILL, signal.SIGTERM)


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

    phase: Literal["waiting", "running", "ending", "ended"]
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
        return self.exit_code is not None and (-self.exit_code in KILLING or self.exit_code - 128 in KILLING)


NOT_BEGUN = JobState("waiting")


class JobLauncher(Protocol):
    """Runs jobs somewhere. The ids are its own."""

    def __init__(self, run_url: str, config: LaunchConfig) -> None: ...

    def reserve(
        self, requests: Sequence[Request], note: Callable[[str], None], check: Callable[[], None]
    ) -> AbstractContextManager[None]:
        """Wait until there are devices for jobs that are to run side by side, and keep them for :meth:`submit`.

        Schedulers have devices of their own, and need no wait here. ``check`` is asked whether to go on waiting.
        """
        ...

    def submit(self, job: Job) -> str:
        """Have it run, now or when there is room; returns its id."""
        ...

    def reattach(self, job: Job) -> str | None:
        """The id of this job if an earlier flow submitted it and it has not ended, else None."""
        ...

    def poll(self, job_id: str) -> JobState:
        """How it is; cheap enough to ask many times a second."""
        ...

    def outcome(self, job_id: str) -> Path:
        """Directory with the job's status and error files, as far as :meth:`poll` has seen them."""
        ...

    def logs(self, job_id: str) -> bytes | None:
        """What the job said so far, on all its nodes; None before it began."""
        ...

    def cancel(self, job_id: str) -> None:
        """End it, if it has not ended, and whatever it left; returns when all that is gone."""
        ...

    def discard(self, job_id: str) -> None:
        """Forget a job that has ended, and its files."""
        ...

    def close(self) -> None:
        """Give back what is held between jobs."""
        ...
