"""Whatever of a Ray cluster is killed, and whenever: the same command ends with equal bytes, and nothing is left."""

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any, Literal

import psutil
import pytest

from cosmos_rl_core.errors import StageError
from tests.flows.launchers.ray.at_work import PATIENCE_S, Work, at_work, eventually
from tests.flows.launchers.ray.cluster import Cluster, needs_ray

pytestmark = [needs_ray, pytest.mark.xdist_group("ray"), pytest.mark.slow]
Victim = Literal["worker", "raylet", "head"]
KILLS = 20
"""Kills of each victim on each cluster."""
UNIT_S, RANK_S = 1.0, 3.0
"""Time that a unit of an elastic stage takes, and a rank of a gang."""
ACTOR = "ray::Node"


@pytest.fixture(scope="module", params=[2, 4], ids=["two nodes", "four nodes"])
def ray_cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Nodes that end soon after their head."""
    folder = tmp_path_factory.mktemp("ray")
    with at_work(folder, range(request.param), RAY_gcs_rpc_server_reconnect_timeout_s="2") as found:
        yield found


@pytest.mark.parametrize("victim", ["worker", "raylet", "head"])
def test_a_kill_at_any_moment_leaves_equal_bytes(ray_cluster: Cluster, victim: Victim) -> None:
    campaign(ray_cluster, victim, KILLS)


def campaign(cluster: Cluster, victim: Victim, kills: int) -> list[str]:
    """Kill a victim at seeded moments, in elastic stages and gangs in turn; return how the attempts ended."""
    moments = random.Random(f"{victim} {len(cluster.nodes)}")
    expected = {gang: _undisturbed(cluster, gang) for gang in (False, True)}
    return [_killed(cluster, victim, number, moments, expected) for number in range(kills)]


def _settings(cluster: Cluster, gang: bool) -> dict[str, Any]:
    count = len(cluster.nodes)
    if gang:
        # Shorter than the patience of the test: a node that is lost before a gang has its nodes comes back afterwards.
        return {"processes": 2 * count, "ray": {"nodes": count, "head_timeout_s": 3, "nodes_timeout_s": 10}}
    return {"elastic": {"max": 2 * count}, "ray": {"head_timeout_s": 3}}


def _work(cluster: Cluster, name: str, gang: bool) -> Work:
    work = Work(cluster, cluster.folder / name)
    work.asks(gang=gang, seconds=RANK_S if gang else UNIT_S)
    return work


def _undisturbed(cluster: Cluster, gang: bool) -> str:
    work = _work(cluster, f"undisturbed-{time.monotonic_ns()}", gang)
    with closing(work.waves(**_settings(cluster, gang))) as waves:
        waves.make("undisturbed", [work.request()])
    return work.artifact().manifest.content


def _killed(cluster: Cluster, victim: Victim, number: int, moments: random.Random, expected: dict[bool, str]) -> str:
    gang, count = bool(number % 2), len(cluster.nodes)
    work, settings = _work(cluster, f"{victim}-{time.monotonic_ns()}", gang), _settings(cluster, gang)
    at, later_s = moments.randint(0, 4), moments.uniform(0, 1)
    with closing(work.waves(**settings)) as waves, ThreadPoolExecutor() as pool:
        making = pool.submit(cluster.inside(waves.make), "killed", [work.request()])
        eventually(lambda: len(work.made()) >= at or making.done())
        time.sleep(later_s)
        killed = _kill(cluster, victim, moments) if not making.done() else "nothing, as it was over"
        error = making.exception(2 * PATIENCE_S)
    if error is not None:
        assert isinstance(error, StageError)
        assert error.retryable, error.in_full()
    if victim == "raylet" and len(cluster.nodes) < count:
        (lost,) = {*range(count)} - cluster.nodes.keys()
        cluster.start_node(lost)
    elif victim == "head" and cluster.head.poll() is not None:
        cluster.start_again()
    if error is not None:
        with closing(work.waves(**settings)) as waves:
            waves.make("again", [work.request()])
    assert work.artifact().manifest.content == expected[gang]
    eventually(lambda: not _stage_processes(cluster))
    return f"{'gang' if gang else 'elastic'}, {at} begun, {killed}: {'finished' if error is None else error.kind}"


def _kill(cluster: Cluster, victim: Victim, moments: random.Random) -> str:
    """Kill a random one, and return which. A new head is there at once, or later."""
    if victim == "worker":
        eventually(lambda: _stage_processes(cluster))
        with suppress(psutil.NoSuchProcess, IndexError):
            one = moments.choice(_stage_processes(cluster))
            words = " ".join(one.cmdline())
            one.kill()
            return next((name for name in (ACTOR, "resident", "fork_server") if name in words), "stage")
        return "nothing, as it ended by itself"
    if victim == "raylet":
        cluster.lose_node(node := moments.choice([*cluster.nodes]))
        return f"node {node}"
    cluster.lose_head()
    if again := moments.random() < 0.5:
        cluster.start_again()
    return "head, there again at once" if again else "head"


def _stage_processes(cluster: Cluster) -> list[psutil.Process]:
    """Return the actors on the nodes, and all that they started, by age."""
    found = dict[int, psutil.Process]()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            ours = process.environ().get("PYTHONPATH", "").startswith(f"{cluster.folder}:")
            words = " ".join(process.cmdline())
            if ours and (ACTOR in words or "cosmos_rl_core.processes" in words or "stages." in words):
                found[process.pid] = process
    return [found[pid] for pid in sorted(found)]
