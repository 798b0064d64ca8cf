"""Prefect's server is killed while a run with GPUs of a limit is at work, and comes back."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.operations.pools import GPUS
from tests.e2e.deployed import Deployed
from tests.e2e.flow_process import ITERATIONS, eventually
from tests.e2e.prefect_server import LASTING_LEASES, PrefectServer

pytestmark = pytest.mark.slow
AWAY_S = 20.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PrefectServer]:
    """As docs/prefect.md starts it: its leases outlive it."""
    server = PrefectServer(tmp_path, LASTING_LEASES)
    try:
        server.start()
        yield server
    finally:
        server.stop()


@pytest.fixture
def deployed(server: PrefectServer, tmp_path: Path) -> Iterator[Deployed]:
    """Pools, deployments, a worker."""
    deployed = Deployed(tmp_path / "deployed", server.environment)
    deployed.set_up(gpus=1)
    yield deployed
    deployed.close()


def test_a_server_that_is_killed_and_comes_back_ends_no_run_and_keeps_no_gpu(
    server: PrefectServer, deployed: Deployed, tmp_path: Path
) -> None:
    def in_use() -> int:
        return deployed.ask("GET", f"/v2/concurrency_limits/{GPUS}")["active_slots"]

    cluster = tmp_path / "cluster.toml"
    cluster.write_text(f'[launch]\nmode = "warm"\ndevice = "cpu"\ngpu_limit = "{GPUS}"\n', encoding="utf-8")
    flow_run = deployed.schedule("nft/tiny-nft", deployed.parameters(cluster=str(cluster)))
    assert eventually(lambda: in_use() and deployed.markers("iterations/0000/rollout", 0), 120), deployed.said
    server.kill()
    # Stages end and others begin meanwhile.
    time.sleep(AWAY_S)
    server.start()
    deployed.wait(flow_run, "COMPLETED")
    assert deployed.planned.recipe.train.num_iterations == ITERATIONS
    assert eventually(lambda: in_use() == 0, 10)
    shown = deployed.ask("POST", "/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [flow_run]}}})
    assert {one["data"] for one in shown if one["type"] == "progress"} == {100.0}
