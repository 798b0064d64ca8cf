"""Stages as steps of the Slurm job in which the flow runs: the commands of one machine behind ``srun``.

For several nodes and for containers, without Ray. The flow runs on the first node; its end ends its steps.
"""

import os
import secrets
import shutil
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.process_trees import Watched
from cosmos_rl_core.processes import PARENT
from cosmos_rl_core.storage import store
from flows.devices.devices import Need
from flows.devices.staying import Processes
from flows.devices.waiting import Waiting
from flows.launchers._base import Job, JobState
from flows.launchers._processes import environment_here, python_of, stage_command, start
from stages.artifacts.request import REQUEST, Request
from stages.registry import STAGES

STEPS, LOG = "steps", "log.txt"
"""Folder of a run for the Requests, logs and error files of its steps; name of a log."""
END_GRACE_S = 30.0
"""Wait in seconds for ``srun`` to end its step on every node."""
JOB, NODES, NODE = "SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_NODEID"
"""Variables that Slurm sets for a batch script."""


class JobLauncher:
    """See :class:`flows.launchers._base.JobLauncher`."""

    devices: Sequence[str] = ()

    def __init__(self, run_url: str, config: LaunchConfig) -> None:
        self._config = config
        self._root = store.join(store.absolute(config.slurm.work_dir or run_url), STEPS)
        if "://" in self._root:
            raise ConfigError(f"{self._root}: set launch.slurm.work_dir to a directory that all nodes share")
        job, node, asked = os.environ.get(JOB), os.environ.get(NODE), max(map(config.nodes_of, STAGES))
        if job is None or node != "0":
            raise ConfigError(
                "launcher = 'slurm' needs a flow on the first node of a Slurm job; this one is not on such a node "
                f"({JOB} = {job}, {NODE} = {node}). Submit a batch script: cosmos-flows cluster render slurm"
            )
        if asked > (has := int(os.environ[NODES])):
            raise ConfigError(f"a stage needs {asked} nodes, the Slurm job {job} has {has}; mend launch.slurm.nodes")

    def reserve(self, requests: Sequence[Request], waiting: Waiting) -> nullcontext[None]:
        """Return at once: the job has its nodes."""
        return nullcontext()

    def taken_meanwhile(self, need: Need) -> None:
        """Return None: here nothing runs at the same time as a wave."""

    def give_back(self) -> None:
        """Do nothing: the job keeps its nodes."""

    def replies(self) -> tuple[()]:
        """Return none: steps are polled."""
        return ()

    def submit(self, job: Job) -> "Step":
        """Start torchrun on every node of a stage, or one process on the first."""
        config, stage = self._config, job.request.stage
        nodes = str(config.nodes_of(stage) if STAGES[stage].distributed else 1)
        step = ["srun", "--overlap", "--nodes", nodes, "--ntasks", nodes, "--ntasks-per-node", "1", "--relative", "0"]
        step += ["--export=ALL", "--job-name", job.name, "--kill-on-bad-exit=1", "--cpu-bind=none"]
        step += config.slurm.resources_of(stage).srun_options
        folder = Path(self._root, f"{job.name}-{secrets.token_hex(4)}")
        folder.mkdir(parents=True)
        (request := folder / REQUEST).write_text(job.request.model_dump_json(indent=1), encoding="utf-8")
        job.execution.write(request)
        here, python, environment = os.uname().nodename, python_of(config), environment_here(config, alone=nodes == "1")
        # On the nodes Slurm's daemon is the parent. If srun is killed, that ends the step.
        command = ["env", "-u", PARENT, *step, *stage_command(stage, str(request), python, config, here, folder.name)]
        return Step(folder, Watched(start(command, sys.executable, folder / LOG, environment)))

    def join(self, job: Job) -> None:
        """Raise ``NotImplementedError``: elastic stages need processes of one machine, or Ray."""
        raise NotImplementedError

    def processes(self) -> Processes:
        """Return nothing: no process stays between stages."""
        return Processes()

    def close(self) -> None:
        """Do nothing: the job ends with the batch script."""


@dataclass
class Step:
    """See :class:`flows.launchers._base.RunningJob`."""

    directory: Path
    process: Watched
    served_before = False

    def poll(self) -> JobState:
        """Return the state of ``srun``."""
        code = self.process.poll()
        return JobState("running") if code is None else JobState("ended", code)

    def log(self) -> bytes:
        """Return the log of all ranks."""
        return (self.directory / LOG).read_bytes()

    def show_stacks(self) -> None:
        """Do nothing: Slurm would send the signal to torchrun too, and end it."""

    def cancel(self) -> None:
        """End the step on all nodes by SIGTERM, and ``srun`` if that takes too long."""
        self.process.end(END_GRACE_S)

    def discard(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.directory, ignore_errors=True)
