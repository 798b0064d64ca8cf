"""A flow whose Ray cluster loses its head: it ends as unavailable, and continues on a new cluster."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from cosmos_rl_core.errors import StageError
from tests.flows.launchers.ray.at_work import COUNT, Work, at_work, eventually
from tests.flows.launchers.ray.cluster import Cluster, needs_ray

pytestmark = [needs_ray, pytest.mark.xdist_group("ray"), pytest.mark.processes]


@pytest.fixture
def ray_cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Two nodes that end soon after their head."""
    with at_work(tmp_path, (0, 1), RAY_gcs_rpc_server_reconnect_timeout_s="2") as found:
        yield found


def test_a_lost_head_is_unavailable_and_the_same_command_continues_on_a_new_one(ray_cluster: Cluster) -> None:
    work = Work(ray_cluster, ray_cluster.folder)
    settings = {"elastic": {"max": 4}, "ray": {"head_timeout_s": 3}}
    work.asks(wait=True)
    with closing(work.waves(**settings)) as waves, ThreadPoolExecutor() as pool:
        making = pool.submit(ray_cluster.inside(waves.make), "first", [work.request()])
        eventually(lambda: len(work.made()) == 4)
        ray_cluster.lose_head()
        with pytest.raises(
            StageError, match=r"the head node does not answer for 3 s.*the same command continues"
        ) as raised:
            making.result()
    assert (raised.value.kind, raised.value.exit_code) == ("unavailable", 75)
    eventually(lambda: not any(psutil.pid_exists(int(pid)) for *_, pid in work.made()))

    ray_cluster.start_again()
    (ray_cluster.folder / "go on").touch()
    with closing(work.waves(**settings)) as waves:
        waves.make("second", [work.request()])
    undisturbed = Work(ray_cluster, ray_cluster.folder / "undisturbed")
    undisturbed.asks()
    with closing(undisturbed.waves(elastic={"max": 1})) as waves:
        waves.make("undisturbed", [undisturbed.request()])
    assert work.artifact().json("all.json") == list(range(COUNT))
    assert work.artifact().manifest.content == undisturbed.artifact().manifest.content
