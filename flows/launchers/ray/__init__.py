"""Stages on the nodes of a Ray cluster. Needs ``pip install '.[ray]'``.

The flow does not import Ray: a bridge, a process of its own, is the cluster's driver. It reserves nodes together (a
placement group for a stage, or for each worker of an elastic one) and lets an actor on each start the processes that
would run on a machine without Ray. They stay between stages. If flow or bridge ends, all of them end.
"""

import importlib.util
import itertools
import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import Any

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.process_trees import KILLED, kill_tree
from cosmos_rl_core.processes import PARENT
from cosmos_rl_core.storage import store
from flows.devices.devices import Need
from flows.devices.staying import Processes
from flows.devices.waiting import Waiting
from flows.devices.work_folders import WorkFolder
from flows.launchers import variables
from flows.launchers._base import NOT_BEGUN, Job, JobState
from flows.launchers._processes import PROCESSES, module
from flows.launchers.ray._orders import Line, Order, Settings, Told, line
from stages.artifacts.request import Request
from stages.registry import STAGES

HEAD_TIMEOUT_S = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""Variable with the seconds after which Ray ends a driver whose head node does not answer."""
CANCEL_S = 90.0
"""Wait for nodes to end a job, in seconds; then the bridge is ended, and everything on the nodes with it."""
CLOSE_S = 60.0
"""Wait for the bridge to free all nodes, in seconds."""


class JobLauncher:
    """See :class:`flows.launchers._base.JobLauncher`."""

    devices: Sequence[str] = ()

    def __init__(self, run_url: str, config: LaunchConfig) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ConfigError("launcher = 'ray' needs Ray: pip install '.[ray]'")
        self._config, self._run_url = config, store.absolute(run_url)
        self._bridge: Bridge | None = None
        self._numbers = itertools.count()

    def reserve(self, requests: Sequence[Request], waiting: Waiting) -> nullcontext[None]:
        """Return at once: Ray gives each job nodes when it has some."""
        return nullcontext()

    def taken_meanwhile(self, need: Need) -> None:
        """Return None: here nothing runs at the same time as a wave."""

    def give_back(self) -> None:
        """Free the nodes that serve no job."""
        if self._bridge is not None and self._bridge.runs:
            self._bridge.say(give_back=True)

    def submit(self, job: Job) -> "RayJob":
        """Ask the cluster for nodes, and start the job when it has them."""
        stage = STAGES[job.request.stage]
        if self._bridge is None or not self._bridge.runs:
            self._bridge = Bridge(self._run_url, self._config)
        nodes = self._config.ray.resources_of(stage.name)
        order = Order(
            id=f"{next(self._numbers)}",
            request=job.request.model_dump_json(indent=1),
            execution=job.execution.model_dump_json(indent=1),
            fresh=job.fresh,
            ranks=job.ranks_here if stage.torch else 0,
            nodes=nodes.model_copy(update={"nodes": self._config.nodes_of(stage.name) if stage.distributed else 1}),
        )
        return RayJob(job, order, self._bridge)

    def join(self, job: Job) -> "RayJob":
        """Ask the cluster for a node for another worker."""
        return self.submit(job)

    def replies(self) -> tuple[()]:
        """Return none: jobs are polled."""
        return ()

    def processes(self) -> Processes:
        """Return the processes that stay on the nodes between jobs."""
        return Processes() if self._bridge is None else self._bridge.processes

    def close(self) -> None:
        """Free all nodes, and end the bridge."""
        if self._bridge is not None:
            self._bridge.close()


class Bridge:
    """The process that speaks with the cluster, and its last news."""

    def __init__(self, run_url: str, launch: LaunchConfig) -> None:
        self.processes = Processes()
        self.jobs: dict[str, RayJob] = {}
        self.failed: dict[str, Any] | None = None
        """Kind and message of the error by which it ended."""
        self._head_timeout_s = launch.ray.head_timeout_s
        self._address = launch.ray.address
        # Ray itself resolves "auto" in the same way.
        if self._address == "auto":
            self._address = os.environ.get("RAY_ADDRESS") or self._address
        self._guard = threading.Lock()
        self._process = subprocess.Popen(
            [*module(sys.executable, PROCESSES), *module(sys.executable, "flows.launchers.ray.bridge")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=os.environ | {PARENT: str(os.getpid()), HEAD_TIMEOUT_S: str(math.ceil(self._head_timeout_s))},
            # Ctrl-C reaches the whole process group, but the launcher ends this process.
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._orders, self._lines = self._process.stdin, self._process.stdout
        settings = Settings(
            run_url=run_url,
            address=self._address,
            head_timeout_s=self._head_timeout_s,
            nodes_timeout_s=launch.ray.nodes_timeout_s,
            launch=_on_a_node(launch).model_dump_json(),
        )
        self._write(settings.model_dump_json().encode() + b"\n")
        self._reader = threading.Thread(target=self._read, name="bridge", daemon=True)
        self._reader.start()

    @property
    def runs(self) -> bool:
        """Return whether the bridge runs and its lines are read. If not, its nodes are lost."""
        return self._process.poll() is None and self._reader.is_alive()

    def say(self, **what: Any) -> None:
        """Send the bridge a line."""
        self._write(line(**what))

    def _write(self, data: bytes) -> None:
        # A bridge that has ended is noticed when its jobs are looked at.
        with self._guard, suppress(BrokenPipeError):
            self._orders.write(data)

    def _read(self) -> None:
        for each in self._lines:
            found = Line.model_validate_json(each)
            if found.told is not None and (job := self.jobs.get(found.told.id)) is not None:
                job.hear(found.told)
            if found.processes is not None:
                self.processes = Processes.model_validate(found.processes)
            if found.failed is not None:
                self.failed = found.failed

    def lost(self) -> JobState:
        """Return the state of the jobs of a bridge that has ended."""
        if self.failed is not None:
            return JobState("ended", KILLED, self.failed["kind"], self.failed["message"])
        return JobState(
            "ended",
            KILLED,
            "unavailable",
            f"the bridge to the Ray cluster at {self._address} ended, and its output is above. It ends if the head "
            f"node does not answer for {self._head_timeout_s:g} s, or is a new one; as soon as a cluster answers "
            "there, the same command continues",
        )

    def end(self) -> None:
        """Kill the bridge. Ray then ends its actors on the nodes."""
        kill_tree(self._process.pid)

    def close(self) -> None:
        """End the bridge when it has freed all nodes."""
        with suppress(BrokenPipeError, OSError):
            self._orders.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self.end()
        self._reader.join(1.0)
        self._lines.close()


class RayJob:
    """See :class:`flows.launchers._base.RunningJob`."""

    def __init__(self, job: Job, order: Order, bridge: Bridge) -> None:
        self._order, self._bridge = order, bridge
        self._folder = WorkFolder(job.request.stage)
        self.directory = self._folder.path
        self.served_before = False
        self._state = NOT_BEGUN
        self._logs: dict[int, bytes] = {}
        self._ended = threading.Event()
        bridge.jobs[order.id] = self
        bridge.say(order=order)

    def hear(self, told: Told) -> None:
        """Keep what the bridge told. Called by its thread."""
        if self._ended.is_set():
            return
        # The folder may be gone by now, because nobody waits for this job any more.
        with suppress(FileNotFoundError):
            for name, text in told.files.items():
                temporary = self.directory / f"{name}.tmp"
                temporary.write_text(text, encoding="utf-8")
                temporary.replace(self.directory / name)
        for place, text in told.log.items():
            self._logs[place] = self._logs.get(place, b"") + text.encode(errors="surrogateescape")
        self.served_before = self.served_before or told.served_before
        phase: Any = told.phase
        self._state = JobState(phase, told.exit_code, told.kind, told.reason, told.node_lost)
        if phase == "ended":
            self._ended.set()

    def poll(self) -> JobState:
        """Return the state."""
        if not self._ended.is_set() and not self._bridge.runs:
            self._state = self._bridge.lost()
            self._ended.set()
        return self._state

    def log(self) -> bytes | None:
        """Return the logs of all nodes, one after the other; None before the first line."""
        return b"".join(self._logs[place] for place in sorted(self._logs)) or None

    def show_stacks(self) -> None:
        """Let the processes of the job write their stacks to its log."""
        self._bridge.say(show_stacks=self._order.id)

    def cancel(self) -> None:
        """End the job if it has not ended; return when its processes are gone."""
        if self.poll().phase != "ended":
            self._bridge.say(cancel=self._order.id)
            if not self._ended.wait(CANCEL_S):
                self._bridge.end()

    def discard(self) -> None:
        """Delete the files of the job."""
        self._bridge.jobs.pop(self._order.id, None)
        self._folder.remove()


def _on_a_node(launch: LaunchConfig) -> LaunchConfig:
    """Return the profile by which a node starts processes. It holds no secret: a node has its own."""
    given = json.loads(launch.model_dump_json(exclude={"ray", "slurm", "kubernetes", "elastic", "prices"}))
    plain = variables.plain(os.environ)
    return LaunchConfig.model_validate(given | {"launcher": "local", "environment": plain | launch.environment})
