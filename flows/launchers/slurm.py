"""Slurm: an allocation is a batch job, a stage is a step of it, and torchrun's rendezvous joins its nodes.

The agent runs on the job's first node and starts each stage with ``srun``. Slurm itself never starts anything again: a
retry is a new attempt of ours. Accounting is not needed: the queue knows a job for some minutes after its end.
"""

import os
import shlex
import subprocess
import sys

from cosmos_rl_core.config.clusters import SlurmResources
from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.errors import ConfigError, UnavailableError
from cosmos_rl_core.storage import store
from flows.launchers import variables
from flows.launchers._allocated import AllocatedJobs, Allocation, rendezvous_port, wait_until_gone
from flows.launchers._base import Job, JobState
from flows.launchers._processes import module, stage_command
from stages.contracts import STAGES
from stages.execution.agent import is_shared

COMMAND_TIMEOUT_S = 120.0
END_TIMEOUT_S = 300.0
SITE_EXPORT = "SBATCH_EXPORT"
"""Variable by which a site says what batch jobs have of the environment that they are submitted in."""
WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
RUNNING = {"RUNNING", "SUSPENDED", "STOPPED", "RESIZING"}
ENDING = {"COMPLETING", "SIGNALING", "STAGE_OUT"}
KIND_OF_STATE = {
    "TIMEOUT": "killed",
    "DEADLINE": "killed",
    "NODE_FAIL": "killed",
    "BOOT_FAIL": "killed",
    "PREEMPTED": "killed",
    "CANCELLED": "killed",
    "REVOKED": "killed",
    "UNKNOWN": "killed",
    "OUT_OF_MEMORY": "out_of_memory",
}
"""Why a job of Slurm's ended, in our words; any other state is a crash."""
AWAY = ("unable to contact", "socket timed out", "connection refused", "temporarily", "communication", "not responding")
"""In what Slurm's commands say when it is the controller that does not answer."""


class JobLauncher(AllocatedJobs):
    """See :class:`flows.launchers._base.JobLauncher`."""

    def __init__(self, run_url: str, config: LaunchConfig) -> None:
        work_dir = config.slurm.work_dir
        root = store.join(store.absolute(work_dir or run_url), "allocations")
        if not is_shared(root):
            raise ConfigError(
                f"{root} is not a directory; set launch.slurm.work_dir to one on a file system that all nodes share"
            )
        super().__init__(store.absolute(run_url), config, root, Slurm(config))


class Slurm:
    """See :class:`flows.launchers._allocated.Scheduler`; an id is a job's number."""

    agents_per_node = False

    def __init__(self, config: LaunchConfig) -> None:
        self._config, self._settings = config, config.slurm

    def find(self, allocation: Allocation) -> str | None:
        """By name, among our own."""
        states = "PENDING,CONFIGURING,RUNNING,SUSPENDED"
        options = ["--me", "--noheader", "--name", allocation.name, "--states", states, "--format", "%A"]
        found = sorted(_slurm("squeue", *options).split(), key=int)
        return found[0] if found else None

    def start(self, allocation: Allocation) -> str:
        """``sbatch``."""
        # --parsable adds the cluster's name where there are several.
        return _slurm("sbatch", "--parsable", script=self.script(allocation)).strip().partition(";")[0]

    def script(self, allocation: Allocation) -> str:
        """The batch script of an allocation."""
        resources = allocation.resources
        assert isinstance(resources, SlurmResources)
        log = store.join(allocation.mailbox, "allocation.log")
        options = {
            "job-name": allocation.name,
            "output": log,
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
        agent = [
            *module(self._python, "stages.execution.agent"),
            allocation.mailbox,
            "--idle-s",
            str(self._settings.idle_s),
        ]
        agent += [] if self._settings.hold else ["--once"]
        directives = "\n".join(f"#SBATCH {line}" for line in lines)
        return "\n".join(["#!/bin/bash", directives, *self._settings.setup, f"exec {shlex.join(agent)}", ""])

    def command(self, job: Job, allocation: Allocation, order: str) -> list[str]:
        """``srun`` of torchrun on every node, or of one process on the first."""
        resources = self._settings.resources_of(job.request.stage)
        nodes = str(allocation.resources.nodes if STAGES[job.request.stage].distributed else 1)
        step = ["srun", "--overlap", "--nodes", nodes, "--ntasks", nodes, "--ntasks-per-node", "1"]
        # What the agent has, whatever the batch job was given.
        step += ["--export=ALL", "--job-name", job.name, "--kill-on-bad-exit=1", "--cpu-bind=none"]
        step += resources.srun_options
        request = "{directory}/request.json"
        # The agent is on the first node, and the rendezvous with it.
        rendezvous = (f"{{host}}:{rendezvous_port(order)}", order)
        return [*step, *stage_command(job.request.stage, request, self._python, self._config, rendezvous)]

    def state(self, allocation_id: str) -> JobState:
        """From the queue, or from accounting where the queue has forgotten it."""
        found = _queue(allocation_id) or _accounting(allocation_id) or ("UNKNOWN", "")
        name, why = found
        reason = f"Slurm job {allocation_id} is {name}" + (f" ({why})" if why not in ("", "None") else "")
        if name in WAITING:
            return JobState("waiting", reason=reason)
        if name in RUNNING:
            return JobState("running", reason=reason)
        if name in ENDING:
            return JobState("ending", reason=reason)
        return JobState("ended", kind=KIND_OF_STATE.get(name, "crash"), reason=reason)

    def end(self, allocation_id: str) -> None:
        """``scancel``, until no node has it any more."""
        _slurm("scancel", "--quiet", allocation_id, unless="Invalid job id")
        wait_until_gone(lambda: self.state(allocation_id).phase == "ended", f"Slurm job {allocation_id}", END_TIMEOUT_S)

    @property
    def _python(self) -> str:
        return self._config.python or sys.executable


def _exported() -> list[str]:
    """The names of what a batch job has of the flow's environment: what stages read, beside what the site lets pass."""
    site = os.environ.get(SITE_EXPORT, "ALL")
    return [*([] if site in ("NONE", "NIL") else [site]), *variables.passed(os.environ)] or [site]


def _queue(allocation_id: str) -> tuple[str, str] | None:
    said = _slurm(
        "squeue", "--noheader", "--jobs", allocation_id, "--states", "all", "--format", "%T|%r", unless="Invalid job id"
    )
    if not said.strip():
        return None
    name, _, why = said.strip().partition("|")
    return name, why


def _accounting(allocation_id: str) -> tuple[str, str] | None:
    said = _slurm(
        "sacct", "--noheader", "--parsable2", "--allocations", "--jobs", allocation_id, "--format", "State",
        unless="disabled",
    )  # fmt: skip
    # "CANCELLED by 1000"
    return (said.split()[0], "") if said.split() else None


def _slurm(*command: str, script: str | None = None, unless: str | None = None) -> str:
    """What one of Slurm's commands prints; nothing if it fails with ``unless`` in its words."""
    try:
        done = subprocess.run(
            command,
            input=script,
            # It would outrank the script's line.
            env={name: value for name, value in os.environ.items() if name != SITE_EXPORT},
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError as error:
        raise ConfigError(f"launcher = 'slurm' needs the command {command[0]}, which this machine has not") from error
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(f"{command[0]} did not answer within {COMMAND_TIMEOUT_S:g} s") from error
    if done.returncode == 0 or (unless is not None and unless in done.stderr):
        return done.stdout
    message = f"{shlex.join(command)}: {done.stderr.strip()}"
    if any(word in done.stderr.lower() for word in AWAY) or command[0] != "sbatch":
        raise UnavailableError(message)
    raise ConfigError(f"{message}. The batch script was:\n{script}")
