"""The processes of stages on one node of a cluster, started and watched as on a machine without a cluster.

The bridge makes an actor of :class:`Node` on each node of a gang. The processes end with the actor.
"""

import os
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ray.util

from cosmos_rl_core import outside_plugins
from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.errors import CosmosRLError, UnavailableError
from flows.launchers._base import Job, Part
from flows.launchers._resident import MEETING_FILE
from flows.launchers.local import JobLauncher, LocalJob
from flows.launchers.ray._relay import Relay
from stages.artifacts.request import Request
from stages.execution.execution import Execution
from stages.execution.outcome import STATUS


class Node:
    """The actor on a node. It has one job at a time; several threads call its methods."""

    def __init__(self, run_url: str, launch: str) -> None:
        self._local = JobLauncher(run_url, LaunchConfig.model_validate_json(launch))
        self._job: LocalJob | None = None
        self._served_before = False
        self._seen: dict[str, str] = {}
        self._read_bytes = 0
        self._relay: Relay | None = None

    def host(self) -> str:
        """Return the address of this node."""
        return ray.util.get_node_ip_address()

    def begin(self, request: str, execution: str, *, fresh: bool, part: tuple[int, int, str] | None) -> dict[str, str]:
        """Start a job. Return ``kind`` and ``message`` of the error; empty without one."""
        settings = Execution.model_validate_json(execution)
        self._seen, self._read_bytes = {}, 0
        try:
            outside_plugins.use(outside_plugins.named_in(request.encode()), verify=False)
            job = Job(Request.model_validate_json(request), settings, fresh, None if part is None else Part(*part))
            if settings.units is not None:
                self._relay = Relay()
                settings = settings.model_copy(update={"units": str(self._relay.folder)})
                job = replace(job, execution=settings)
            self._job = self._local.join(job)
            if self._job is None:
                raise UnavailableError(f"{os.uname().nodename}: another program has locked the devices of this node")
            self._served_before = self._job.served_before
        except CosmosRLError as error:
            return {"kind": error.kind, "message": str(error)}
        return {}

    def poll(self) -> dict[str, Any]:
        """Return the state of the job, with files and lines of the log that are new since the last call."""
        job = self._job
        if job is None:
            return {}
        state = job.poll()
        told: dict[str, Any] = {"phase": state.phase, "exit_code": state.exit_code, "files": {}, "log": ""}
        for path in (job.directory / STATUS, *job.directory.glob("error.*.json"), job.directory / MEETING_FILE):
            with suppress(FileNotFoundError, UnicodeDecodeError):
                text = path.read_text(encoding="utf-8")
                if self._seen.get(path.name) != text:
                    self._seen[path.name] = told["files"][path.name] = text
        log = (job.log() or b"")[self._read_bytes :]
        self._read_bytes += len(log)
        return told | {"log": log.decode(errors="surrogateescape"), "served_before": self._served_before}

    def meet_at(self, address: str) -> None:
        """Tell the ranks here where they meet."""
        if self._job is not None:
            temporary = self._job.directory / f"{MEETING_FILE}.tmp"
            temporary.write_text(address, encoding="utf-8")
            temporary.replace(self._job.directory / MEETING_FILE)

    def accept(self) -> int | None:
        """Return the number of a new connection to the units of an elastic stage; None if there is none yet."""
        return None if self._relay is None else self._relay.accept()

    def receive(self, number: int) -> bytes | None:
        """Return bytes from a connection: ``b""`` if none come for a moment, None at its end."""
        return None if self._relay is None else self._relay.receive(number)

    def send(self, number: int, data: bytes) -> None:
        """Send bytes to a connection; ``b""`` ends it."""
        if self._relay is not None:
            self._relay.send(number, data)

    def show_stacks(self) -> None:
        """Let the processes of the job write their stacks to its log."""
        if self._job is not None:
            self._job.show_stacks()

    def end(self) -> None:
        """End the job if it has not ended, and delete its files."""
        if self._job is not None:
            self._job.cancel()
            self._job.discard()
        if self._relay is not None:
            self._relay.close()
        self._job = self._relay = None

    def close(self) -> None:
        """End everything that runs here."""
        self.end()
        self._local.close()

    def processes(self) -> str:
        """Return the JSON of the processes that stay here."""
        return self._local.processes().model_dump_json()
