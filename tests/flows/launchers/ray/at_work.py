"""A stage of gangs and of workers on a Ray cluster, and the Requests of a test."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cosmos_rl_core.config.launch import LaunchConfig
from flows.running.display import Display
from flows.running.wave import Waves
from stages.artifacts.artifact import Artifact
from stages.artifacts.request import Request
from stages.artifacts.slots import input_of
from stages.contracts import Embed, ModelRef
from tests.flows.launchers.ray.cluster import HEAD, Cluster, running
from tests.run_first import ONCE

ROOT = Path(__file__).parents[4]
COUNT = 6
PATIENCE_S = 300.0
"""On a busy machine, where eight ranks take more than two minutes to start."""
STAGE = (
    ONCE
    + """
import json, os, signal, sys, time, types


def run(request, context):
    work = json.loads((HERE / "work").read_text())
    # A rank on the CPU hides the device that it was given.
    given = dict(each.split("=", 1) for each in Path("/proc/self/environ").read_text().split("\\0") if "=" in each)
    facts = [given["CUDA_VISIBLE_DEVICES"], os.environ.get("COSMOS_RL_MEETING_HOST"), os.getpid(), os.getppid()]
    if work.get("gang"):
        everyone = context.ranks.gather(facts)
        (HERE / f"made.rank.{facts[0]}.{os.getpid()}").touch()
        time.sleep(work.get("seconds", 0))
        if context.ranks.rank == work.get("kill") and once("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        context.ranks.gather(0)
        if context.ranks.rank == 0:
            context.attempt.put_json("all.json", everyone if work.get("facts") else len(everyone))
        return
    layout = context.layout({"items": [[str(n)] for n in range(6)]})["items"]
    for n in context.units(len(layout)):
        context.progress("making", n, len(layout))
        if context.attempt.adopt(n):
            continue
        (HERE / f"made.{n}.{facts[0]}.{os.getpid()}").touch()
        time.sleep(work.get("seconds", 0))
        while work.get("wait") and not (HERE / "go on").exists():
            time.sleep(0.05)
        context.attempt.finish(n, {f"items/{n}.json": json.dumps(n).encode()})
    values = [json.loads(context.attempt.read(f"items/{n}.json")) for n in context.own(len(layout))]
    if context.ranks.rank == 0:
        context.attempt.put_json("all.json", values)


stage = types.ModuleType("stage")
stage.run = run
sys.modules["stages.embed"] = stage
"""
)

HOLD = f"""
import sys
import ray
from ray.util.placement_group import placement_group
ray.init(address={HEAD!r}, log_to_driver=False)
assert placement_group([{{"GPU": 2}}] * int(sys.argv[1]), strategy="STRICT_SPREAD").wait(120)
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def at_work(folder: Path, nodes: Sequence[int], **environment: str) -> Iterator[Cluster]:
    """Have a cluster whose processes take the stage from a folder, and be in its network."""
    (folder / "sitecustomize.py").write_text(STAGE, encoding="utf-8")
    given = {"PYTHONPATH": f"{folder}:{ROOT}"} | environment
    with running(folder, nodes, **given) as found, found.entered():
        yield found


@contextmanager
def all_gpus_taken(cluster: Cluster) -> Iterator[None]:
    """Have another program reserve the GPUs of all nodes, so that nothing else can."""
    command = [sys.executable, "-c", HOLD, f"{len(cluster.nodes)}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as taking:
        assert taking.stdout is not None
        assert taking.stdout.readline() == b"held\n"
        yield
        taking.communicate()


class Work:
    """Requests in a store of one test."""

    def __init__(self, cluster: Cluster, store: Path | str) -> None:
        self.cluster, self.store = cluster, str(store)
        for left in (*cluster.folder.glob("made.*"), *(cluster.folder / name for name in ("killed", "go on"))):
            left.unlink(missing_ok=True)

    def waves(self, **options: Any) -> Waves:
        """A flow's waves."""
        return Waves(f"{self.store}/run", config(**options), Display())

    def request(self, name: str = "one", model: str = "none") -> Request:
        """A stage that imports no model."""
        embed = Embed(model=ModelRef(path=model, adapter="none", digest="none"), prompts=(), max_prompt_length=1)
        return Request(stage="embed", slot=f"{self.store}/run/{name}", seed=0, config=embed)

    def asks(self, **work: Any) -> None:
        """What the stage shall do."""
        (self.cluster.folder / "work").write_text(json.dumps(work), encoding="utf-8")

    def artifact(self, name: str = "one") -> Artifact:
        return Artifact(input_of(self.request(name).slot))

    def made(self) -> list[list[str]]:
        """Unit, device and process of each beginning of a unit."""
        return [path.name.split(".")[1:] for path in self.cluster.folder.glob("made.*")]


def config(**options: Any) -> LaunchConfig:
    """Ranks on the CPU, each with a pretended GPU."""
    ray = {"address": HEAD, "gpus_per_node": 2} | options.pop("ray", {})
    fixed = {"launcher": "ray", "device": "cpu", "resident_gb": 1, "ray": ray, "retry_delay_s": 0}
    return LaunchConfig.model_validate(fixed | {"environment": {"GLOO_SOCKET_IFNAME": "lo"}} | options)


def eventually(happened: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
