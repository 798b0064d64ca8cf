"""Stages on a real Ray cluster of two nodes: gangs, workers, what is lost, and what cannot be had."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from importlib import import_module
from pathlib import Path

import psutil
import pytest

from cosmos_rl_core.errors import ConfigError, StageError, UnavailableError
from tests.flows.launchers.ray.at_work import COUNT, ROOT, Work, at_work, config, eventually
from tests.flows.launchers.ray.cluster import Cluster, needs_ray

pytestmark = [needs_ray, pytest.mark.xdist_group("ray"), pytest.mark.processes]


@pytest.fixture(scope="module")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes, whose processes take the stage from a folder."""
    with at_work(tmp_path_factory.mktemp("ray"), (0, 1)) as found:
        yield found


@pytest.fixture
def work(ray_cluster: Cluster, tmp_path: Path) -> Work:
    return Work(ray_cluster, tmp_path)


def test_ranks_on_two_nodes_meet_where_rank_0_says_and_stay_for_the_next_stage(work: Work) -> None:
    work.asks(gang=True, facts=True)
    with closing(work.waves(processes=4, ray={"nodes": 2})) as waves:
        for name in "ab":
            waves.make(name, [work.request(name)])
        first, second = (work.artifact(name).json("all.json") for name in "ab")
        assert sorted(devices for devices, *_ in first) == [*work.cluster.gpus(0), *work.cluster.gpus(1)]
        assert len({host for _, host, *_ in first}) == 1
        assert len({parent for *_, parent in first}) == 2
        assert first == second
        eventually(lambda: [one.served for one in waves.processes().stay] == [2] * 4)
        assert len({one.device.split()[0] for one in waves.processes().stay}) == 2
        pids = [one.pid for one in waves.processes().stay]
    assert pids == [pid for pid in pids if not psutil.pid_exists(pid)]


def test_a_lost_rank_ends_its_gang_and_the_stage_is_repeated(work: Work) -> None:
    work.asks(gang=True, kill=3)
    with closing(work.waves(processes=4, ray={"nodes": 2})) as waves:
        with pytest.raises(StageError) as raised:
            waves.make("first", [work.request()])
        assert (raised.value.kind, raised.value.retryable) == ("killed", True), raised.value.in_full()
        waves.make("second", [work.request()])
    assert work.artifact().json("all.json") == 4


def test_workers_are_on_all_nodes_a_lost_node_costs_its_units_and_a_new_one_gets_some(work: Work) -> None:
    work.asks(wait=True)
    elastic = {"elastic": {"max": 4}, "max_attempts": 1}
    with closing(work.waves(**elastic)) as waves, ThreadPoolExecutor() as pool:
        making = pool.submit(work.cluster.inside(waves.make), "elastic", [work.request()])
        eventually(lambda: len({device for _, device, _ in work.made()}) == 4)
        lost = [pid for _, device, pid in work.made() if device in work.cluster.gpus(1)]
        work.cluster.lose_node(1)
        eventually(lambda: not any(psutil.pid_exists(int(pid)) for pid in lost))
        work.cluster.start_node(1)
        eventually(lambda: len({device for _, device, pid in work.made() if pid not in lost}) == 4)
        (work.cluster.folder / "go on").touch()
        making.result()
    assert work.artifact().json("all.json") == list(range(COUNT))
    again = Work(work.cluster, f"{work.store}/again")
    again.asks()
    with closing(again.waves(elastic={"max": 1})) as waves:
        waves.make("one worker", [again.request()])
    assert again.artifact().json("all.json") == list(range(COUNT))
    assert again.artifact().manifest.content == work.artifact().manifest.content


def test_a_gang_that_the_cluster_can_never_hold_is_refused_with_its_resources(work: Work) -> None:
    work.asks(gang=True)
    with closing(work.waves(processes=6, ray={"nodes": 3, "nodes_timeout_s": 1})) as waves:
        with pytest.raises(StageError, match="needs 3 nodes with 1 CPU, 2 GPU each") as raised:
            waves.make("wave", [work.request()])
        assert raised.value.kind == "config"
        assert "2 GPU" in str(raised.value)


def test_a_gang_whose_nodes_were_lost_is_tried_again(work: Work) -> None:
    work.asks(gang=True)
    work.cluster.lose_node(1)
    try:
        with closing(work.waves(processes=4, ray={"nodes": 2, "nodes_timeout_s": 1})) as waves:
            with pytest.raises(StageError, match=r"needs 2 nodes with 1 CPU, 2 GPU each.* it lost 127") as raised:
                waves.make("wave", [work.request()])
            assert (raised.value.kind, raised.value.retryable) == ("unavailable", True)
            work.cluster.start_node(1)
            waves.make("again", [work.request()])
    finally:
        if 1 not in work.cluster.nodes:
            work.cluster.start_node(1)
    assert work.artifact().json("all.json") == 4


@pytest.mark.parametrize(("reason", "error"), [(2, UnavailableError), (1, ConfigError)], ids=["lost", "withdrawn"])
def test_a_node_that_was_withdrawn_is_not_lost(reason: int, error: type[Exception]) -> None:
    gang = import_module("flows.launchers.ray._gang")
    kind = gang.Kind(nodes=2, cpus=1, gpus=0, accelerator_type=None, labels=())
    here = {"Alive": True, "NodeManagerAddress": "10.0.0.1", "Resources": {"CPU": 4.0}, "Labels": {}}
    gone = {"Alive": False, "NodeManagerAddress": "10.0.0.2", "Resources": {}, "DeathReason": reason}
    assert type(kind.missing([here, gone], "1 node")) is error
    back = here | {"NodeManagerAddress": "10.0.0.2", "Resources": {"CPU": 0.0}}
    assert type(kind.missing([here, gone, back], "2 nodes")) is ConfigError


def test_a_cluster_that_does_not_answer_is_unavailable(work: Work) -> None:
    with closing(work.waves(ray={"address": "127.0.0.1:6390", "head_timeout_s": 1})) as waves:
        with pytest.raises(StageError, match=r"no Ray cluster answers at 127\.0\.0\.1:6390") as raised:
            waves.make("wave", [work.request()])
        assert raised.value.exit_code == 75


def test_nothing_of_a_killed_flow_is_left(work: Work) -> None:
    work.asks(wait=True)
    code = "import sys; from tests.flows.allocated import main; main(*sys.argv[1:])"
    settings = config(elastic={"max": 4}).model_dump_json()
    command = [sys.executable, "-c", code, f"{work.store}/run", settings, work.request().model_dump_json()]
    flow = subprocess.Popen(command, cwd=ROOT)
    try:
        eventually(lambda: len(work.made()) == 4)
    finally:
        flow.kill()
        flow.wait()
    eventually(lambda: not any(psutil.pid_exists(int(pid)) for *_, pid in work.made()))
    work.asks()
    (work.cluster.folder / "go on").touch()
    with closing(work.waves(elastic={"max": 2})) as waves:
        waves.make("again", [work.request()])
    assert work.artifact().json("all.json") == list(range(COUNT))


def test_the_flow_imports_no_ray() -> None:
    code = "import sys, flows.launchers.ray; assert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_settings_that_contradict_ray_are_refused() -> None:
    for options, why in (
        ({"mode": "cold"}, "needs mode = 'warm'"),
        ({"stage_gpus": {"rollout": [0]}}, "stage_gpus needs launcher = 'local'"),
        ({"processes": 3, "ray": {"nodes": 2}}, "cannot share 2 nodes evenly"),
    ):
        with pytest.raises(ValueError, match=why):
            config(**options)
