"""Whole runs by the command line on a Ray cluster whose two nodes compute otherwise: killed once, audited at work."""

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from stages.artifacts.slots import current_of
from tests.e2e.flow_process import RESIDENT, Flows, eventually
from tests.flows import machines
from tests.flows.launchers.ray import cluster
from tests.flows.launchers.ray.cluster import HEAD, Cluster, needs_ray

pytestmark = [needs_ray, pytest.mark.slow, pytest.mark.xdist_group("ray"), pytest.mark.processes]
PROFILE = f"""
[launch]
launcher = "ray"
device = "cpu"
resident_gb = 1
processes = 2
retry_delay_s = 0.1
elastic = {{ min = 1, max = 2, stages = ["rollout"] }}
environment = {{ GLOO_SOCKET_IFNAME = "lo" }}
[launch.ray]
address = "{HEAD}"
gpus_per_node = 2
labels = {{ kind = "a" }}
[launch.ray.stages.rollout]
labels = {{ kind = "b" }}
"""
"""Updates by a gang of two ranks, rollouts by workers on the other kind of node."""
SMALL = [
    "validation.n_generation=1",
    "train.train_batch_per_replica=24",
    "train.train_policy.mini_batch=8",
    "train.train_policy.batch_size_per_optimize=8",
    "rollout.n_generation=6",
    "rollout.n_generation_mini_batch=4",
    "rollout.samples_per_shard=4",
]
WAIT_S = 300.0


@pytest.fixture(scope="module")
def unlike_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("ray")
    with cluster.running(folder, (), PYTHONPATH=machines.install(folder)) as found, found.entered():
        for number, kind in enumerate("ab"):
            found.start_node(number, f"--labels=kind={kind}", **machines.node(kind))
        yield found


def at_work() -> list[int]:
    """Processes of stages on the nodes."""
    found: list[int] = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        if RESIDENT in (process.info["cmdline"] or ()) and machines.CPU in (process.info["environ"] or {}):
            found.append(process.pid)
    return found


@pytest.mark.parametrize("algorithm", ["nft", "ddrl", "grpo"])
def test_a_killed_run_on_two_kinds_of_nodes_continues_and_every_audit_is_clean(
    algorithm: str, unlike_nodes: Cluster, tmp_path: Path
) -> None:
    profile = tmp_path / "ray.toml"
    profile.write_text(PROFILE, encoding="utf-8")
    home = {"PREFECT_HOME": str(tmp_path / "prefect"), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    flows = Flows(tmp_path / "flows", home, f"configs/tiny/{algorithm}.toml")
    options = ("--cluster", str(profile), "--iterations", "1", *(word for one in SMALL for word in ("--set", one)))
    rollout = "iterations/0000/rollout"
    killed = flows.start(*options)
    killed.wait_until(lambda: flows.markers(rollout, 0), timeout_s=WAIT_S)
    killed.kill()
    assert eventually(lambda: not at_work(), WAIT_S)
    flows.command("audit")
    run = flows.start(*options)
    audits = 0
    while run.process.poll() is None:
        flows.command("audit")
        audits += 1
        time.sleep(2.0)
    run.finish()
    assert audits
    assert "nothing is wrong" in flows.command("audit")
    manifests = {slot: current_of(f"{flows.root}/{slot}")[1] for slot in (rollout, "iterations/0000/update")}
    found = {slot: manifest and manifest.numerics["cpu"] for slot, manifest in manifests.items()}
    assert [*found.values()] == ["CPU of node b", "CPU of node a"]
    assert eventually(lambda: not at_work(), WAIT_S)
    assert flows.nothing_is_left()
