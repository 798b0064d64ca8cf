"""Scoring on this machine while a rollout is made. It is no stage: the reward stage scores the samples it leaves."""

from collections.abc import Callable
from typing import Self

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.errors import first_line
from cosmos_rl_core.process_trees import Watched
from flows.devices.devices import Share
from flows.devices.work_folders import WorkFolder
from flows.launchers._base import Job, JobState
from flows.launchers._processes import start_ahead
from flows.launchers.endings import kind_of
from stages.artifacts.request import REQUEST, ROLLOUT, Request
from stages.execution.outcome import read_failures, read_status

LOG = "log.txt"


class EarlyScoring:
    """The process, or several, that score one rollout by one reward. They end with this context, if not before.

    ``share`` are the devices of a reward with torch, which stay locked while they run.
    """

    def __init__(
        self,
        rollout: Request,
        reward: Job,
        launch: LaunchConfig,
        note: Callable[[str], None],
        share: Share | None = None,
    ) -> None:
        self._name, self._launch, self._note = reward.request.slot.rpartition("/")[2], launch, note
        self._reward, self._share = reward, share
        self._requests = {ROLLOUT: rollout, REQUEST: reward.request}
        self._process: Watched | None = None

    def __enter__(self) -> Self:
        self._folder = WorkFolder("ahead")
        try:
            for name, request in self._requests.items():
                (self._folder.path / name).write_text(request.model_dump_json(indent=1), encoding="utf-8")
            self._reward.execution.write(self._folder.path / REQUEST)
            log = self._folder.path / LOG
            self._process = Watched(start_ahead(self._folder.path, log, self._launch, self._reward, self._share))
        except OSError as error:
            self._say(str(error))
        finally:
            if self._share is not None:
                # Now only the processes hold the locks, which are freed when they end.
                self._share.close()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._process is not None:
            self._process.end()
        self._folder.remove()

    @property
    def pid(self) -> int | None:
        """Return the id of the process, or of the first of several; None after its end."""
        return None if self._process is None else self._process.pid

    @property
    def has_begun(self) -> bool:
        """Return whether it has loaded the scorer. Before that, it has scored nothing."""
        return read_status(self._folder.path) is not None

    def is_running(self) -> bool:
        """Return whether it runs. Note once why it failed."""
        if self._process is None or (code := self._process.poll()) is None:
            return self._process is not None
        # Ranks that a killed torchrun left would keep their devices.
        self._process.end()
        self._process = None
        if code:
            failures = read_failures(self._folder.path)
            why = f"{failures[0].kind}: {first_line(failures[0].message)}" if failures else self._ending(code)
            self._say(why)
        return False

    def _ending(self, code: int) -> str:
        """Return in words how a process without an error file ended."""
        lines = (self._folder.path / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
        return f"{kind_of(JobState('ended', code), lines)}, exit code {code}"

    def _say(self, why: str) -> None:
        self._note(f"{self._name}: scoring while the rollout runs ended ({why}); the stage scores the rest")
