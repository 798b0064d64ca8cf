"""Nodes of a Ray cluster on which a stage cannot run are named before any of their GPUs is reserved."""

import importlib.metadata
import platform
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from cosmos_rl_core import tiny
from cosmos_rl_core.errors import StageError
from tests.flows.launchers.ray.at_work import ROOT, Work, all_gpus_taken, at_work
from tests.flows.launchers.ray.cluster import Cluster, needs_ray

pytestmark = [needs_ray, pytest.mark.xdist_group("ray"), pytest.mark.processes]
MODEL = Path(tiny.__file__).parent / "pipelines" / "sd3"
HIDE = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"')
"""A command that sees an empty folder, named next, and nothing of what others have there."""
OTHER_PYTHON = """
import platform

platform.python_version = lambda: "3.9.9"
"""
KINDS = ("flows", "library", "python", "weights", "store")


@pytest.fixture(scope="module")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A sound node, and one for each thing that it may not have as the flow has it. Their GPUs are taken."""
    folder = tmp_path_factory.mktemp("ray")
    (folder / "store").mkdir()
    (folder / "python").mkdir()
    (folder / "python" / "sitecustomize.py").write_text(OTHER_PYTHON, encoding="utf-8")
    first = {
        "flows": other_version(folder, "cosmos-rl-flows"),
        "library": other_version(folder, "transformers"),
        "python": folder / "python",
    }
    hidden = {"weights": MODEL / "transformer", "store": folder / "store"}
    with at_work(folder, ()) as cluster:
        for number, kind in enumerate(KINDS):
            path = {"PYTHONPATH": f"{first[kind]}:{folder}:{ROOT}"} if kind in first else {}
            before = (*HIDE, str(hidden[kind])) if kind in hidden else ()
            cluster.start_node(number, f"--labels={kind}=any", before=before, **path)
        # Last, so that Ray names it last, too.
        cluster.start_node(len(KINDS), f"--labels={','.join(f'{kind}=any' for kind in KINDS)}")
        with all_gpus_taken(cluster):
            yield cluster


def other_version(folder: Path, package: str) -> Path:
    """A folder in which a package has another version."""
    found = folder / package / f"{package.replace('-', '_')}-9.9.dist-info"
    found.mkdir(parents=True)
    (found / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 9.9\n", encoding="utf-8")
    return found.parent


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("flows", f"cosmos-rl-flows 9.9, expected {importlib.metadata.version('cosmos-rl-flows')}"),
        ("library", f"transformers 9.9, expected {importlib.metadata.version('transformers')}"),
        ("python", f"Python 3.9.9, expected {platform.python_version()}"),
        ("weights", f"{MODEL}/transformer/config.json is missing"),
        ("store", "{store}/run is another folder there than where the flow runs"),
    ],
)
def test_a_node_that_cannot_run_a_stage_is_named_though_no_gpu_is_free(
    ray_cluster: Cluster, kind: str, why: str
) -> None:
    folder = ray_cluster.folder / "store"
    work = Work(ray_cluster, folder)
    work.asks(gang=True)
    settings = {"processes": 4, "ray": {"nodes": 2, "labels": {kind: "any"}}}
    with closing(work.waves(**settings)) as waves, pytest.raises(StageError) as raised:
        waves.make("wave", [work.request(model=str(MODEL))])
    assert raised.value.kind == "config"
    message = str(raised.value)
    host = f"127.0.0.{10 + KINDS.index(kind)}"
    assert f"cannot run embed: {host}: {why.format(store=folder)}" in message
    assert message.endswith("Mend them, or choose others by launch.ray.labels)")
    assert message.count("127.0.0.") == 1
