"""``cosmos-flows`` as people run it, in processes that a test can find again whatever became of their parents."""

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from typer.testing import CliRunner

from cosmos_rl_core.storage import store
from flows.cli.app import app
from flows.planning.plan import METRICS_FILE, read_plan
from flows.planning.run import Run
from stages.artifacts.artifact import Artifact
from stages.artifacts.manifest import Manifest
from stages.artifacts.slots import current_of, input_of

ROOT = Path(__file__).parents[2]
RECIPE = "tests/e2e/tiny.toml"
RUN_ID = "tiny"
MARK = "COSMOS_FLOWS_TEST"
FORK_SERVER, RESIDENT = "stages.execution.warm.fork_server", "stages.execution.warm.resident"
COLD = ("--set", "launch.mode=cold")
PREFECT, NO_PREFECT = "flows", "tests.e2e.without_prefect"
"""Modules that take the command `run`."""
POLICY_PARTS = ("current/", "old/", "ema/", "optimizer/", "schedule/")
ITERATIONS = 3
AFTER_LAST_UPDATE = (f"exports/{ITERATIONS:04d}", "report")
GONE_TIMEOUT_S = 10.0


def reference_root(folder: Path) -> Path:
    """Where the files of the run in ``folder`` are."""
    return folder / "store" / "runs" / RUN_ID


class Flows:
    """One store and the commands that work on it; all their processes carry a mark in their environment."""

    def __init__(
        self,
        folder: Path,
        environment: dict[str, str],
        recipe: str = RECIPE,
        python: str = sys.executable,
        directory: Path = ROOT,
    ) -> None:
        self.folder = folder
        self.directory = directory
        self.python = python
        self.recipe = recipe
        self.program = PREFECT
        self.given = environment
        self.store = str(folder / "store")
        self.root = reference_root(folder)
        self.mark = secrets.token_hex(8)
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True, exist_ok=True)
        self.environment = os.environ | environment | {MARK: self.mark, "TMPDIR": str(self.temporary)}

    def use_prefect(self, environment: dict[str, str]) -> None:
        """From here on run ``cosmos-flows``, which needs Prefect, with these variables."""
        self.program, self.given = PREFECT, self.given | environment
        self.environment |= environment

    def start(self, *options: str, process_group: int | None = None) -> "Started":
        """``cosmos-flows run`` on this store."""
        command = ("run", self.recipe, "--store", self.store, "--run-id", RUN_ID, *options)
        return self.start_command(self.program, *command, process_group=process_group)

    def start_command(self, module: str, *arguments: str, process_group: int | None = None) -> "Started":
        """Any of our modules, as a process; in a process group of its own if that is 0."""
        log = self.folder / f"{secrets.token_hex(4)}.txt"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [self.python, "-m", module, *arguments],
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=self.environment,
                process_group=process_group,
                # A shell that starts the tests in the background has them ignore Ctrl-C, and every child with them.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        return Started(process, log)

    def run(self, *options: str, expect: int = 0) -> str:
        """``cosmos-flows run`` to its end; returns what it said."""
        return self.start(*options).finish(expect)

    def command(self, name: str, *options: str, expect: int = 0) -> str:
        """Another command on the run, in this process: it starts at once."""
        ended = CliRunner(env=self.given).invoke(app, [name, RUN_ID, "--store", self.store, *options])
        assert ended.exit_code == expect, ended.output
        return ended.output

    def forget(self, *slots: str) -> None:
        """Remove slots or files, as if they had not been made yet."""
        for slot in slots:
            path = self.root / slot
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def processes(self) -> list[psutil.Process]:
        """Everything that these commands started and that still runs, orphans too."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self.mark:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def running(self, word: str) -> list[psutil.Process]:
        """Those with a word in their command line; forks have their server's."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                if word in process.cmdline():
                    found.append(process)
        return found

    def fork_servers(self, run: "Started") -> list[psutil.Process]:
        """List the fork servers that a run's own process started, without their forks, which may end meanwhile."""
        found = []
        for process in self.running(FORK_SERVER):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.ppid() == run.process.pid:
                    found.append(process)
        return found

    def ranks(self) -> dict[int, psutil.Process]:
        """Torchrun's workers by rank."""
        found = {}
        for process in self.processes():
            try:
                rank = process.environ().get("RANK")
            except psutil.NoSuchProcess:
                continue
            if rank is not None:
                found[int(rank)] = process
        return found

    def staying(self, stage: str) -> list[psutil.Process]:
        """Processes that stay between stages and serve this one now: its log is their output."""
        found = []
        for process in self.running(RESIDENT):
            with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
                if f"cosmos-flows-{stage}-" in os.readlink(f"/proc/{process.pid}/fd/1"):
                    found.append(process)
        return found

    def torchrun(self) -> psutil.Process:
        """The launcher of the workers."""
        return psutil.Process(self.ranks()[0].ppid())

    def worker(self, stage: str) -> psutil.Process:
        """The process that computes a stage of one rank, cold or warm: of those that hold its log, the one without
        children."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                holds_log = any(f"cosmos-flows-{stage}-" in file.path for file in process.open_files())
                if holds_log and not process.children():
                    found.append(process)
        (worker,) = found
        return worker

    def phases(self, stage: str, phase: str) -> list[Path]:
        """Outcome folders of a stage's attempts that say that they are in a phase."""
        paths = self.temporary.glob(f"cosmos-flows-{stage}-*/status.json")
        return [path.parent for path in paths if f'"phase":"{phase}"' in path.read_text(encoding="utf-8")]

    def markers(self, slot: str, index: int) -> list[Path]:
        """Markers of a finished shard."""
        return list((self.root / slot).glob(f"shards/*/{index:05d}.json"))

    def manifests(self) -> dict[str, bytes]:
        """Every manifest of the run, all generations, by path."""
        return {str(path.relative_to(self.root)): path.read_bytes() for path in self.root.rglob("manifest.*.json")}

    def nothing_is_left(self) -> bool:
        """Whether no process of ours is alive, a moment after the last one was killed."""
        return eventually(lambda: not self.processes(), GONE_TIMEOUT_S)

    def kill_all(self) -> None:
        """Leave nothing behind after a failed test."""
        for process in self.processes():
            process.kill()

    @property
    def planned(self) -> Run:
        """The run, as its plan says."""
        return Run(read_plan(self.store, RUN_ID), self.store)


class Started:
    """A command that runs."""

    def __init__(self, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self.process = process
        self.log = log

    @property
    def said(self) -> str:
        """What it said so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def wait_until(self, happened: Callable[[], object], timeout_s: float = 120.0) -> None:
        """Wait for something that the command brings about."""
        ended_or_happened = eventually(lambda: happened() or self.process.poll() is not None, timeout_s)
        assert ended_or_happened, f"it did not happen within {timeout_s} s:\n{self.said}"
        assert self.process.poll() is None, f"the command ended before it happened:\n{self.said}"

    def kill(self) -> None:
        """SIGKILL the process alone."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def finish(self, expect: int = 0, timeout_s: float = 300.0) -> str:
        """Wait for the end and check the exit code."""
        assert self.process.wait(timeout_s) == expect, self.said
        return self.said


def eventually(happened: Callable[[], object], timeout_s: float) -> bool:
    """Whether it happens in time; looks often, because some moments are short, with a tenth of a core at most."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        began_s = time.monotonic()
        if happened():
            return True
        ended_s = time.monotonic()
        if ended_s > deadline_s:
            return False
        time.sleep(max(0.002, 9 * (ended_s - began_s)))


def files_with(word: str, *folders: Path) -> list[Path]:
    """Files, databases too, that hold a word. A worker that lives deletes some while they are searched."""
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert files
    found = []
    for path in files:
        with contextlib.suppress(FileNotFoundError):
            if word.encode() in path.read_bytes():
                found.append(path)
    return found


def final_policy(flows: Flows) -> dict[str, bytes]:
    """The bytes of every part of the last policy, read and checked as a stage reads them."""
    artifact = Artifact(input_of(flows.planned.slots.policy(ITERATIONS)))
    return {name: artifact.read(name) for part in POLICY_PARTS for name in artifact.names(part)}


def metrics(flows: Flows) -> list[dict[str, object]]:
    """The lines of the run's ``metrics.jsonl``, without what took time."""
    lines = [json.loads(line) for line in (flows.root / METRICS_FILE).read_bytes().splitlines()]
    return [{name: value for name, value in line.items() if not name.endswith(("seconds", "_time"))} for line in lines]


def current_manifests(flows: Flows) -> dict[str, Manifest]:
    """The current manifest of every slot of the run."""
    slots = sorted({str(path.parent.relative_to(flows.root)) for path in flows.root.rglob("manifest.*.json")})
    found = {slot: current_of(str(flows.root / slot))[1] for slot in slots}
    return {slot: manifest for slot, manifest in found.items() if manifest is not None}


def require_same_run(flows: Flows, reference: Flows) -> None:
    """Every artifact has the reference's bytes, all of them whole; the final policy above all."""
    policy, expected = final_policy(flows), final_policy(reference)
    assert {name.partition("/")[0] for name in policy} == {"current", "old", "ema", "optimizer", "schedule"}
    assert policy == expected
    assert metrics(flows) == metrics(reference)
    ours, theirs = current_manifests(flows), current_manifests(reference)
    assert {slot: m.content for slot, m in ours.items()} == {slot: m.content for slot, m in theirs.items()}
    for slot in ours:
        artifact = Artifact(input_of(store.join(str(flows.root), slot)))
        for name in artifact.names():
            artifact.read(name)


def require_untouched(flows: Flows, before: dict[str, bytes]) -> None:
    """What was committed before is unchanged, and none of those slots has a newer generation."""
    after = flows.manifests()
    assert {path: after.get(path) for path in before} == before
    slots = {path.rpartition("/")[0] for path in before}
    assert sorted(path for path in after if path.rpartition("/")[0] in slots) == sorted(before)
