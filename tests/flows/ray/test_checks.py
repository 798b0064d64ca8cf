"""Nodes of a Ray cluster on which a stage cannot run are named before any of their GPUs is reserved."""

import importlib.metadata
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from cosmos_rl_core import tiny
from cosmos_rl_core.errors import StageError
from tests.flows.ray.at_work import ROOT, Work, at_work
from tests.flows.ray.cluster import HEAD, Cluster, needs_ray

pytestmark = [needs_ray, pytest.mark.xdist_group("ray"), pytest.mark.processes]
MODEL = Path(tiny.__file__).parent / "pipelines" / "sd3"
HIDE = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"')
"""A command that sees an empty folder, named next, and nothing of what others have there."""
HOLD = f"""
import sys
import ray
from ray.util.placement_group import placement_group
ray.init(address={HEAD!r}, log_to_driver=False)
assert placement_group([{{"GPU": 2}}] * 4, strategy="STRICT_SPREAD").wait(60)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A sound node, and others with another version, without weights, and without the store. Their GPUs are taken."""
    folder = tmp_path_factory.mktemp("ray")
    other = folder / "other" / "cosmos_rl_flows-9.9.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: cosmos-rl-flows\nVersion: 9.9\n", encoding="utf-8")
    (folder / "store").mkdir()
    with at_work(folder, ()) as cluster:
        cluster.start_node(0, "--labels=version=any,weights=any,store=any")
        path = f"{other.parent}:{folder}:{ROOT}"
        cluster.start_node(1, "--labels=version=any", PYTHONPATH=path)
        cluster.start_node(2, "--labels=weights=any", before=(*HIDE, str(MODEL / "transformer")))
        cluster.start_node(3, "--labels=store=any", before=(*HIDE, str(folder / "store")))
        command = [sys.executable, "-c", HOLD]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holding:
            assert holding.stdout is not None
            assert holding.stdout.readline() == b"held\n"
            yield cluster
            holding.communicate()


@pytest.mark.parametrize(
    ("label", "host", "why"),
    [
        ("version", 1, f"cosmos-rl-flows 9.9, expected {importlib.metadata.version('cosmos-rl-flows')}"),
        ("weights", 2, f"{MODEL}/transformer/config.json is missing"),
        ("store", 3, "{store}/run is another folder there than where the flow runs"),
    ],
)
def test_a_node_that_cannot_run_a_stage_is_named_though_no_gpu_is_free(
    ray_cluster: Cluster, label: str, host: int, why: str
) -> None:
    folder = ray_cluster.folder / "store"
    work = Work(ray_cluster, folder)
    work.asks(gang=True)
    settings = {"processes": 4, "ray": {"nodes": 2, "labels": {label: "any"}}}
    with closing(work.waves(**settings)) as waves, pytest.raises(StageError) as raised:
        waves.make("wave", [work.request(model=str(MODEL))])
    assert raised.value.kind == "config"
    message = str(raised.value)
    assert f"cannot run embed: 127.0.0.{10 + host}: {why.format(store=folder)}" in message
    assert message.count("127.0.0.") == 1
