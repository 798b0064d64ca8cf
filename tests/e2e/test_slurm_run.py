"""The tiny run through a real Slurm: killed and re-attached, a job a stage, an update on two nodes; the same bytes."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.flow_process import AFTER_LAST_UPDATE, Flows, require_same_run, require_untouched
from tests.flows import slurm

pytestmark = [slurm.needs_slurm, pytest.mark.slow, pytest.mark.usefixtures("with_prefect")]
PROFILE = """
[launch]
launcher = "slurm"
threads = 1
retry_delay_s = 0.1
[launch.slurm]
query_s = 0.5
"""
LAST_ROLLOUT = "iterations/0002/rollout"
REWARD = "iterations/0001/reward-ocr"


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Slurm's commands find it by the environment."""
    with slurm.running(tmp_path_factory.mktemp("slurm")) as conf, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(conf))
        yield
        slurm.cancel_all()


@pytest.fixture
def profile(tmp_path: Path) -> Callable[..., tuple[str, ...]]:
    """Options of a run with a cluster profile, and more lines of it."""

    def write(*lines: str) -> tuple[str, ...]:
        path = tmp_path / "slurm.toml"
        path.write_text("\n".join([PROFILE, *lines]), encoding="utf-8")
        return ("--cluster", str(path))

    return write


def test_a_flow_killed_in_a_stage_goes_on_with_the_stage_that_slurm_still_runs(
    flows: Flows, reference: Flows, profile: Callable[..., tuple[str, ...]]
) -> None:
    flows.forget("policy", LAST_ROLLOUT)
    run = flows.start(*profile())
    run.wait_until(lambda: flows.markers(LAST_ROLLOUT, 0), timeout_s=300)
    run.kill()
    (job,) = slurm.jobs()
    flows.run(*profile())
    assert [found[:2] for found in slurm.jobs("--states", "all")] == [job[:2]]
    # Whether it was watched again or had ended by then, it was not started again.
    assert len(list((flows.root / LAST_ROLLOUT / "attempts").iterdir())) == 1
    require_same_run(flows, reference)
    assert flows.nothing_is_left()


def test_a_job_a_stage_makes_the_same_bytes(
    flows: Flows, reference: Flows, profile: Callable[..., tuple[str, ...]]
) -> None:
    flows.forget(REWARD, LAST_ROLLOUT)
    before = flows.manifests()
    known = len(slurm.jobs("--states", "all"))
    flows.run(*profile("hold = false", "[launch.slurm.stages.rollout]", 'partition = "other"'))
    ours = {(name.partition("-")[0], partition) for _, name, partition, _ in slurm.jobs("--states", "all")[known:]}
    assert ours == {("rollout", "other"), ("reward", "main")}
    require_untouched(flows, before)
    require_same_run(flows, reference)
    assert flows.nothing_is_left()


def test_an_update_on_two_nodes_has_the_bytes_of_two_ranks_on_one(
    reference_on_two_ranks: Flows,
    copy_of: Callable[[Flows], Flows],
    profile: Callable[..., tuple[str, ...]],
) -> None:
    flows = copy_of(reference_on_two_ranks)
    flows.forget("iterations/0002/update", *AFTER_LAST_UPDATE)
    flows.run(*profile("[launch.slurm.stages.update]", "nodes = 2"), "--set", "launch.stage_processes={update=2}")
    require_same_run(flows, reference_on_two_ranks)
    assert flows.nothing_is_left()
