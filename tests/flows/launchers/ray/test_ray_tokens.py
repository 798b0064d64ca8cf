"""A Ray cluster that takes only who has its token, and a flow that finds the cluster as a Ray Job does."""

import secrets
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from cosmos_rl_core.errors import StageError
from tests.flows.launchers.ray.at_work import Work, at_work
from tests.flows.launchers.ray.cluster import HEAD, Cluster, needs_ray

pytestmark = [needs_ray, pytest.mark.xdist_group("ray"), pytest.mark.processes]
MODE, TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"
SECRET = secrets.token_hex(16)


@pytest.fixture(scope="module")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One node."""
    with at_work(tmp_path_factory.mktemp("ray"), (0,), **{MODE: "token", TOKEN: SECRET}) as found:
        yield found


def test_a_flow_with_the_token_finds_the_cluster_as_a_ray_job_does(
    ray_cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ((MODE, "token"), (TOKEN, SECRET), ("RAY_ADDRESS", HEAD)):
        monkeypatch.setenv(name, value)
    work = Work(ray_cluster, tmp_path)
    work.asks(gang=True)
    with closing(work.waves(processes=2, ray={"address": "auto"})) as waves:
        waves.make("wave", [work.request()])
    assert work.artifact().json("all.json") == 2


@pytest.mark.parametrize("given", [{}, {MODE: "token", TOKEN: "0" * 32}], ids=["none", "another"])
def test_a_flow_without_the_token_is_refused(
    ray_cluster: Cluster, given: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    work = Work(ray_cluster, tmp_path)
    with closing(work.waves()) as waves, pytest.raises(StageError, match="does not take this process") as raised:
        waves.make("wave", [work.request()])
    assert raised.value.kind == "config", raised.value.in_full()
    assert "RAY_AUTH_MODE=token" in str(raised.value)
