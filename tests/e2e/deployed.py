"""A worker and the deployments of ``deployments/prefect.yaml``, as people use them: Prefect's command line and API."""

import os
import secrets
import signal
import subprocess
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import psutil

from tests.e2e.flow_process import RECIPE, RUN_ID, Flows

FILE = "deployments/prefect.yaml"
NAMES = {
    "ddrl": {"2b", "14b", "tiny-ddrl"},
    "nft": {"sd3-nft", "sd3-nft-pickscore", "sana-image-nft", "sana-video-nft", "cosmos-2b-nft"}
    | {"z-image-nft", "tiny-nft"}
    | {f"{name}-nft" for name in ("flux2-klein-edit", "qwen-image-edit", "wan2-2-i2v", "wan2-1-i2v")},
    "grpo": {"2b-grpo", "2b-grpo-mock", "tiny-grpo"},
    "sft": {f"{name}-sft" for name in ("sd3", "sana-image", "sana-video", "tiny")}
    | {f"{name}-sft-lora" for name in ("sd3", "sana-image", "sana-video", "wan", "wan2-2", "flux2-klein", "cosmos-2b")}
    | {"flux2-klein-edit-sft-lora"},
    "vlm_sft": {"llava", "llava-8b", "hf", "hf-8b-lora", "tiny-vlm-sft"},
    "preprocess": {"local", "tiny", "web"},
    "train": {"tiny-dpo"},
    "stage": {"run"},
    "fork": {"runs"},
    "rescore": {"runs"},
    "what-if": {"runs"},
    "study": {"recipes"},
    "audit": {"runs"},
    "infra": {"check"},
}
TIMEOUT_S = 300.0
"""For what takes seconds on a machine that does nothing else."""
ENDED = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}


class Deployed(Flows):
    """One store, and flow runs of deployments that work on it."""

    def __init__(self, folder: Path, environment: dict[str, str], **place: Any) -> None:
        settings = {"PREFECT_WORKER_QUERY_SECONDS": "1", "PREFECT_CLI_PROMPT": "false"}
        super().__init__(folder, environment | settings, **place)
        self.api = httpx.Client(base_url=environment["PREFECT_API_URL"], timeout=60.0)
        self.prefect_worker: subprocess.Popen[bytes] | None = None

    def prefect(self, *arguments: str, expect: int = 0) -> str:
        """A command of Prefect, to its end."""
        ended = subprocess.run(
            [self.python, "-m", "prefect", *arguments],
            cwd=self.directory,
            env=self.environment | {"COLUMNS": "200"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
        assert ended.returncode == expect, ended.stdout
        return ended.stdout

    def set_up(self, gpus: int, file: str = FILE) -> None:
        """The commands of docs/prefect.md: pools, all deployments, a worker."""
        self.start_command("flows", "infra", "init", "--gpus", str(gpus)).finish()
        self.prefect("--no-prompt", "deploy", "--all", "--prefect-file", file)
        self.start_worker()

    def start_worker(self) -> None:
        """One that takes up what is scheduled."""
        with (self.folder / "worker.txt").open("ab") as log:
            self.prefect_worker = subprocess.Popen(
                [self.python, "-m", "prefect", "worker", "start", "--pool", "cosmos"],
                cwd=self.directory,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    def parameters(self, **changes: object) -> dict[str, object]:
        """Return the parameters of a small run in this store."""
        return {"recipe": RECIPE, "store": self.store, "run_id": RUN_ID} | changes

    def schedule(self, deployment: str, parameters: dict[str, object]) -> str:
        """A flow run of a deployment, as the UI makes it; returns its id."""
        path = f"/deployments/{self.deployment(deployment)['id']}/create_flow_run"
        # One flow run, also where the server made it and its answer was lost.
        body = {"parameters": parameters, "idempotency_key": secrets.token_hex(8)}
        return self.ask("POST", path, body)["id"]

    def deployment(self, name: str) -> dict[str, Any]:
        """What the server has of a deployment."""
        return self.ask("GET", f"/deployments/name/{name}")

    def state(self, flow_run: str) -> dict[str, Any]:
        """The flow run's state now."""
        return self.ask("GET", f"/flow_runs/{flow_run}")["state"]

    def wait(self, flow_run: str, *types: str, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        """The flow run's state, once it is of one of these types; fails if it ends otherwise."""
        end_s = time.monotonic() + timeout_s
        while (state := self.state(flow_run))["type"] not in {*types} | ENDED:
            assert time.monotonic() < end_s, f"{state}\n{self.said}"
            # The server has one process for all.
            time.sleep(0.3)
        assert state["type"] in types, f"{state}\n{self.said}"
        return state

    def task_states(self, flow_run: str) -> Counter[str]:
        """How many tasks of the flow run are in which state, all tries together."""
        return Counter(task["state_name"] for task in self._tasks(flow_run))

    def task_names(self, flow_run: str, state: str) -> set[str]:
        """Names of the tasks of the flow run that are in a state in one of its tries."""
        return {task["name"] for task in self._tasks(flow_run) if task["state_name"] == state}

    def _tasks(self, flow_run: str) -> list[dict[str, Any]]:
        return self.ask("POST", "/task_runs/filter", {"flow_runs": {"id": {"any_": [flow_run]}}})

    def halt(self, flow_run: str, name: str) -> None:
        """Suspend or pause a flow run, as the UI does; ``name`` is the state's name."""
        until = datetime.now(UTC) + timedelta(seconds=TIMEOUT_S)
        details = {"pause_timeout": until.isoformat(), "pause_reschedule": name == "Suspended"}
        state = {"type": "PAUSED", "name": name, "state_details": details}
        answer = self.ask("POST", f"/flow_runs/{flow_run}/set_state", {"state": state})
        assert answer["status"] == "ACCEPT", answer

    def emit(self, event: str, resource: str) -> None:
        """An event, as other programs send theirs."""
        sent = {"id": str(uuid4()), "occurred": datetime.now(UTC).isoformat()}
        self.ask("POST", "/events", [sent | {"event": event, "resource": {"prefect.resource.id": resource}}])

    def resume(self, flow_run: str, **form: str) -> str:
        """Resume a flow run, with what its form asks for; returns what the server made of it."""
        answer = self.ask("POST", f"/flow_runs/{flow_run}/resume", {"run_input": form} if form else None)
        return answer["status"]

    def events(self, flow_run: str, prefix: str) -> list[dict[str, Any]]:
        """Events of a flow run whose names begin so, in order, as far as they have arrived."""
        related = {"id": [f"prefect.flow-run.{flow_run}"]}
        wanted = {"event": {"prefix": [prefix]}, "any_resource": related, "order": "ASC"}
        return self.ask("POST", "/events/filter", {"filter": wanted, "limit": 50})["events"]

    def logs(self, flow_run: str) -> str:
        """What the flow run logged so far, as people read it."""
        query = {"logs": {"flow_run_id": {"any_": [flow_run]}}, "sort": "TIMESTAMP_ASC"}
        return "\n".join(line["message"] for line in self.ask("POST", "/logs/filter", query))

    def flow_process(self) -> psutil.Process:
        """The one that runs the flow: the worker's child."""
        (process,) = psutil.Process(self.prefect_worker.pid if self.prefect_worker else 0).children()
        return process

    def leftovers(self) -> list[psutil.Process]:
        """What runs besides the worker."""
        worker = self.prefect_worker.pid if self.prefect_worker and self.prefect_worker.poll() is None else 0
        return [process for process in self.processes() if process.pid != worker]

    def environments(self) -> list[Path]:
        """Private folders by which Prefect's worker gives a flow its environment, and which it removes when the flow
        has ended; a worker that was killed leaves its own."""
        found = list(self.temporary.glob("prefect-workspace-attempt-*"))
        assert all(folder.stat().st_mode & 0o077 == 0 for folder in found)
        return found

    @property
    def said(self) -> str:
        """What the worker and its flows said."""
        log = self.folder / "worker.txt"
        return log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""

    def close(self) -> None:
        """End the worker, as Ctrl-C does, and whatever else there is."""
        self.api.close()
        if self.prefect_worker is not None:
            os.kill(self.prefect_worker.pid, signal.SIGINT)
            end_s = time.monotonic() + 15
            while self.prefect_worker.poll() is None and time.monotonic() < end_s:
                time.sleep(0.1)
        self.kill_all()

    def ask(self, method: str, path: str, body: object = None) -> Any:
        """The server's answer; one that is too busy, or silent, is asked again, as Prefect's own client does."""
        end_s = time.monotonic() + TIMEOUT_S
        while True:
            try:
                response = self.api.request(method, path, json=body)
            except httpx.TransportError:
                if time.monotonic() > end_s:
                    raise
            else:
                if response.status_code != httpx.codes.SERVICE_UNAVAILABLE or time.monotonic() > end_s:
                    assert response.is_success, response.text
                    return response.json() if response.content else None
            time.sleep(1.0)
