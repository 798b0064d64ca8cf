"""The shipped cluster profiles on nodes that are unlike, and a light stage that runs on another node each time."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cosmos_rl_core.storage import store
from stages.artifacts.slots import standing
from tests.e2e.flow_process import RUN_ID, Flows
from tests.flows import fake_kubernetes, fake_slurm, machines

pytestmark = pytest.mark.slow

SMALL = ("launch.device=cpu", "launch.processes=1", "launch.threads=1", f"launch.python={sys.executable}")
SLURM = ("launch.slurm.nodes=1", "launch.slurm.query_s=1", "launch.stage_processes={rollout=1, evaluate=1}")
KUBERNETES = ("launch.kubernetes.nodes=1", "launch.kubernetes.query_s=1")
SECOND_REWARD = "iterations/0001/reward-ocr"


class FlowsOnS3(Flows):
    """The commands, on a prefix of a bucket."""

    def __init__(self, folder: Path, environment: dict[str, str], url: str) -> None:
        super().__init__(folder, environment)
        self.store = url


@pytest.fixture
def on_slurm(prefect_environment: dict[str, str], tmp_path: Path) -> Iterator[Flows]:
    """A partition ``l40s`` whose nodes compute otherwise than those of ``h100``."""
    flows = Flows(tmp_path / "flows", prefect_environment | fake_slurm.install(tmp_path))
    yield flows
    flows.kill_all()


@pytest.fixture
def on_kubernetes(
    prefect_environment: dict[str, str], s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Flows]:
    """Pods without a GPU are on a node of their own each; pods are processes of this one."""
    monkeypatch.setenv("PYTHONPATH", machines.install(tmp_path))
    with fake_kubernetes.running(tmp_path) as (cluster, kubeconfig):
        has_gpus = "nvidia.com/gpu"
        cluster.node = lambda container: (
            machines.node("a") if has_gpus in container["resources"]["limits"] else machines.next_node(tmp_path)
        )
        flows = FlowsOnS3(tmp_path / "flows", prefect_environment | {"KUBECONFIG": str(kubeconfig)}, f"{s3_url}/unlike")
        yield flows
        flows.kill_all()


def run(flows: Flows, profile: str, iterations: int, *settings: str) -> str:
    """One command to its end, with a shipped profile made small; what ran on a light node has another at the next."""
    options = [word for setting in (*SMALL, *settings) for word in ("--set", setting)]
    cluster = ("--cluster", f"deployments/clusters/{profile}.toml")
    return flows.start(*cluster, "--iterations", str(iterations), *options).finish(timeout_s=1200)


def numerics_of(flows: Flows, slot: str) -> dict[str, Any]:
    """What an artifact of the run was made under."""
    _, manifest = standing(store.join(flows.store, "runs", RUN_ID, slot))
    assert manifest is not None
    return manifest.numerics


def light_nodes(folder: Path) -> int:
    return len((folder / machines.COUNT).read_text(encoding="utf-8").splitlines())


def test_slurm_samples_on_one_kind_of_node_and_trains_on_another(on_slurm: Flows, tmp_path: Path) -> None:
    for iterations in (1, 2):
        run(on_slurm, "slurm", iterations, *SLURM)
    rollout, update = (numerics_of(on_slurm, f"iterations/0001/{stage}") for stage in ("rollout", "update"))
    assert (rollout["cpu"], update["cpu"]) == ("CPU of node b", "CPU of node a")
    assert rollout["cpu_capability"] == "DEFAULT" != update["cpu_capability"]
    assert numerics_of(on_slurm, SECOND_REWARD).keys() == {"python", "packages"}
    assert light_nodes(tmp_path) == 2


def test_kubernetes_scores_in_pods_without_a_gpu_on_any_node(on_kubernetes: Flows, tmp_path: Path) -> None:
    for iterations in (1, 2):
        run(on_kubernetes, "kubernetes", iterations, *KUBERNETES)
    assert numerics_of(on_kubernetes, "iterations/0001/update")["cpu"] == "CPU of node a"
    assert numerics_of(on_kubernetes, SECOND_REWARD).keys() == {"python", "packages"}
    assert light_nodes(tmp_path) == 2
