"""The tiny run as steps of a job of a real Slurm: killed in a stage, an update on two nodes; the same bytes."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.flow_process import AFTER_LAST_UPDATE, Flows, require_same_run
from tests.flows import slurm

pytestmark = [slurm.needs_slurm, pytest.mark.slow, pytest.mark.usefixtures("with_prefect")]
PROFILE = """
[launch]
launcher = "slurm"
threads = 1
retry_delay_s = 0.1
[launch.slurm.stages.update]
nodes = 2
"""
LAST_ROLLOUT = "iterations/0002/rollout"
ON_TWO_NODES = ("--set", "launch.stage_processes={update=2}")


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Commands find Slurm, and the job in which they run, by the environment."""
    with slurm.running(tmp_path_factory.mktemp("slurm")) as conf, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(conf))
        with slurm.allocation(2) as variables:
            for name, value in variables.items():
                patch.setenv(name, value)
            yield


def test_a_killed_run_with_an_update_on_two_nodes_has_the_bytes_of_two_ranks_on_one(
    reference_on_two_ranks: Flows, copy_of: Callable[[Flows], Flows], tmp_path: Path
) -> None:
    profile = tmp_path / "slurm.toml"
    profile.write_text(PROFILE, encoding="utf-8")
    options = ("--cluster", str(profile), *ON_TWO_NODES)
    flows = copy_of(reference_on_two_ranks)
    flows.forget("policy", LAST_ROLLOUT, "iterations/0002/update", *AFTER_LAST_UPDATE)
    run = flows.start(*options)
    run.wait_until(lambda: flows.markers(LAST_ROLLOUT, 0), timeout_s=300)
    run.kill()
    flows.run(*options)
    require_same_run(flows, reference_on_two_ranks)
    assert flows.nothing_is_left()
