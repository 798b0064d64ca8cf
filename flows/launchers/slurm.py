"""Slurm: an allocation is a batch job, and a stage is a step of it.

The agent runs on the job's first node and starts each stage with ``srun``. The ranks meet by torchrun's rendezvous.
Slurm restarts nothing: a retry is a new attempt. Accounting is optional, because the queue still lists a job for some
minutes after its end.
"""

import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace

from cosmos_rl_core.config.clusters import SlurmResources
from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.errors import ConfigError, UnavailableError
from cosmos_rl_core.storage import store
from flows.launchers import variables
from flows.launchers._allocations import AllocatedJobs, Allocation, agent_command, wait_until_gone
from flows.launchers._base import Job, JobState
from flows.launchers._processes import stage_command
from stages.execution.mailbox import Mailbox
from stages.registry import STAGES

COMMAND_TIMEOUT_S = 120.0
SITE_EXPORT = "SBATCH_EXPORT"
"""Environment variable of ``sbatch``: what batch jobs inherit from the environment that submits them."""
STATES = {
    "PENDING CONFIGURING": JobState("waiting"),
    "REQUEUED REQUEUE_HOLD REQUEUE_FED SPECIAL_EXIT RESV_DEL_HOLD": JobState("waiting"),
    "RUNNING SUSPENDED STOPPED RESIZING": JobState("running"),
    "COMPLETING SIGNALING STAGE_OUT": JobState("ending"),
    "TIMEOUT DEADLINE NODE_FAIL BOOT_FAIL": JobState("ended", kind="killed"),
    "PREEMPTED CANCELLED REVOKED UNKNOWN": JobState("ended", kind="killed"),
    "OUT_OF_MEMORY": JobState("ended", kind="out_of_memory"),
}
"""Slurm's states of jobs. In any other state the job has crashed."""
AWAY = re.compile(
    "unable to contact|socket timed out|connection refused|temporarily|communication|not responding", re.IGNORECASE
)
"""Words in error messages of Slurm's commands when the controller does not answer."""


class JobLauncher(AllocatedJobs):
    """See :class:`flows.launchers._base.JobLauncher`."""

    def __init__(self, run_url: str, config: LaunchConfig) -> None:
        work_dir = config.slurm.work_dir
        root = store.join(store.absolute(work_dir or run_url), "allocations")
        if not Mailbox(root).is_shared:
            advice = "set launch.slurm.work_dir to a directory that all nodes share"
            raise ConfigError(f"{root} is not a directory; {advice}")
        super().__init__(store.absolute(run_url), config, root, Slurm(config))


class Slurm:
    """See :class:`flows.launchers._allocations.Scheduler`. An id is a job's number."""

    agents_per_node = False

    def __init__(self, config: LaunchConfig) -> None:
        self._config, self._settings = config, config.slurm
        self._python = config.python or sys.executable

    def find(self, allocation: Allocation) -> str | None:
        """Return the number of the job of this name, among those of this user."""
        options = "--me --noheader --states PENDING,CONFIGURING,RUNNING,SUSPENDED --format %A"
        found = sorted(_slurm(f"squeue {options} --name {allocation.name}").split(), key=int)
        return found[0] if found else None

    def start(self, allocation: Allocation) -> str:
        """Submit the job with ``sbatch``."""
        # With several clusters, --parsable adds the cluster's name.
        printed = _slurm("sbatch --parsable", script=self.script(allocation))
        return printed.strip().partition(";")[0]

    def script(self, allocation: Allocation) -> str:
        """Return the batch script of an allocation."""
        resources = allocation.resources
        assert isinstance(resources, SlurmResources)
        options = {
            "job-name": allocation.name,
            "output": allocation.mailbox.path("allocation.log"),
            "partition": resources.partition,
            "nodes": resources.nodes,
            "ntasks-per-node": 1,
            "cpus-per-task": resources.cpus_per_node,
            "gres": f"gpu:{resources.gpus_per_node}" if resources.gpus_per_node else None,
            "time": resources.time_limit_min,
        }
        lines = [f"--{name}={value}" for name, value in options.items() if value is not None]
        lines.append(f"--export={','.join(_exported())}")
        lines += ["--open-mode=append", "--no-requeue", *resources.options]
        agent = agent_command(self._python, allocation)
        directives = [f"#SBATCH {line}" for line in lines]
        commands = [*self._settings.setup, f"exec {shlex.join(agent)}"]
        return "\n".join(["#!/bin/bash", *directives, *commands, ""])

    def command(self, job: Job, allocation: Allocation, order: str) -> list[str]:
        """Return ``srun`` of torchrun on every node, or of one process on the first."""
        resources = self._settings.resources_of(job.request.stage)
        nodes = str(allocation.resources.nodes if STAGES[job.request.stage].distributed else 1)
        step = ["srun", "--overlap", "--nodes", nodes, "--ntasks", nodes, "--ntasks-per-node", "1"]
        # A step gets the agent's whole environment.
        step += ["--export=ALL", "--job-name", job.name, "--kill-on-bad-exit=1", "--cpu-bind=none"]
        step += resources.srun_options
        # The rendezvous is on the first node, where the agent is.
        stage, request = job.request.stage, "{directory}/request.json"
        return [*step, *stage_command(stage, request, self._python, self._config, "{host}", order)]

    def state(self, allocation: Allocation) -> JobState:
        """Return the state in the queue, or in accounting if the queue no longer lists the job."""
        queue = f"squeue --noheader --jobs {allocation.id} --states all --format %T|%r"
        name, _, why = _slurm(queue, unless="Invalid job id").strip().partition("|")
        if not name:
            accounting = f"sacct --noheader --parsable2 --allocations --jobs {allocation.id}"
            # "CANCELLED by 1000"
            words = _slurm(f"{accounting} --format State", unless="disabled").split()
            name = words[0] if words else "UNKNOWN"
        because = f" ({why})" if why not in ("", "None") else ""
        found = (state for names, state in STATES.items() if name in names.split())
        state = next(found, JobState("ended", kind="crash"))
        return replace(state, reason=f"Slurm job {allocation.id} is {name}{because}")

    def end(self, allocation: Allocation) -> None:
        """Cancel the job and wait until no node runs it."""
        _slurm(f"scancel --quiet {allocation.id}", unless="Invalid job id")
        job = f"Slurm job {allocation.id}"
        wait_until_gone(lambda: self.state(allocation).phase == "ended", job)


def _exported() -> list[str]:
    """Return what a batch job inherits of the flow's environment: what the site chose, and what stages need."""
    site = os.environ.get(SITE_EXPORT, "ALL")
    return [*([] if site in ("NONE", "NIL") else [site]), *variables.passed(os.environ)] or [site]


def _slurm(command: str, script: str | None = None, unless: str | None = None) -> str:
    """Return what a Slurm command prints; nothing if it fails with ``unless`` in its message."""
    program, *options = command.split()
    # This variable would override the script's own line.
    environment = {name: value for name, value in os.environ.items() if name != SITE_EXPORT}
    try:
        done = subprocess.run(
            [program, *options],
            input=script,
            env=environment,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError as error:
        raise ConfigError(f"launcher = 'slurm' needs {program}, which is not installed") from error
    except subprocess.TimeoutExpired as error:
        why = f"{program} did not answer within {COMMAND_TIMEOUT_S:g} s"
        raise UnavailableError(why) from error
    if done.returncode == 0 or (unless is not None and unless in done.stderr):
        return done.stdout
    message = f"{command}: {done.stderr.strip()}"
    if AWAY.search(done.stderr) or program != "sbatch":
        raise UnavailableError(message)
    raise ConfigError(f"{message}. The batch script was:\n{script}")
