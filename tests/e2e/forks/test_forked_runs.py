"""Forks as processes: the bits of their origin for every algorithm, killed once, audited while they work."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli.app import app
from flows.planning.steps import read_run
from flows.post_train import post_train
from stages.artifacts.slots import current_of
from tests.e2e.flow_process import NO_PREFECT, RUN_ID, Flows, Started, eventually
from tests.e2e.talks import write_recipe

pytestmark = pytest.mark.slow
SMALL = (
    "validation.n_generation=1",
    "train.train_batch_per_replica=16",
    "train.train_policy.mini_batch=4",
    "train.train_policy.batch_size_per_optimize=8",
    "rollout.n_generation=4",
    "rollout.n_generation_mini_batch=4",
    "rollout.samples_per_shard=4",
    "launch.processes=2",
)
SUPERVISED = (
    "train.train_policy.dataset.num_items=16",
    "train.train_policy.steps_per_iteration=2",
    "train.train_batch_per_replica=8",
    "validation.n_generation=1",
    "launch.processes=2",
)
STALE = ("train.staleness=1",)
RUNS = {
    "nft": ("nft", SMALL),
    "nft, stale": ("nft", (*SMALL, *STALE)),
    "grpo": ("grpo", SMALL),
    "ddrl, stale": ("ddrl", (*SMALL, *STALE)),
    "sft": ("sft", SUPERVISED),
    "vlm": ("vlm", ("train.train_policy.steps_per_iteration=4",)),
}
FORK = "fork"


@pytest.fixture
def new_flows(tmp_path: Path) -> Iterator[Callable[[str], Flows]]:
    """Makes a store for a recipe."""
    made: list[Flows] = []

    def new(algorithm: str) -> Flows:
        recipe = write_recipe(tmp_path) if algorithm == "vlm" else f"configs/tiny/{algorithm}.toml"
        made.append(Flows(tmp_path / "flows", {}, recipe))
        made[-1].program = NO_PREFECT
        return made[-1]

    yield new
    for flows in made:
        flows.kill_all()


def fork(flows: Flows, *options: str, run_id: str = FORK) -> Started:
    """``cosmos-flows fork`` of the run in the store."""
    return flows.start_command(NO_PREFECT, "fork", RUN_ID, "--store", flows.store, "--run-id", run_id, *options)


def contents(flows: Flows, run_id: str, *, own: bool = False) -> dict[str, str]:
    """Contents of a run's artifacts by the end of their slots; with ``own`` those that it made itself."""
    run = read_run(flows.store, run_id)
    slots = [step.slot for wave in post_train(run) for step in wave.steps if step.slot.startswith(f"{run.url}/")]
    found = {slot.removeprefix(run.url): current_of(slot)[1] for slot in slots if slot != run.slots.report}
    return {slot: one.content for slot, one in found.items() if one and (not own or one.slot == run.url + slot)}


def audit(flows: Flows, run_id: str) -> str:
    """What an audit says; it finds nothing."""
    ended = CliRunner(env=flows.given).invoke(app, ["audit", run_id, "--store", flows.store])
    assert ended.exit_code == 0, ended.output
    return ended.output


@pytest.mark.parametrize("name", RUNS)
def test_a_fork_that_goes_on_has_the_bits_of_its_origin_going_on(name: str, new_flows: Callable[[str], Flows]) -> None:
    algorithm, settings = RUNS[name]
    flows = new_flows(algorithm)
    options = [word for one in settings for word in ("--set", one)]
    flows.start(*options, "--iterations", "2").finish(timeout_s=900)

    killed = fork(flows, "--at", "1", "--iterations", "3")
    last = f"iterations/0002/{'finetune' if algorithm in ('sft', 'vlm') else 'update'}"
    folder = Path(flows.store) / "runs" / FORK / last
    killed.wait_until(lambda: (folder / "layout.1.json").exists(), timeout_s=600)
    killed.kill()
    assert eventually(lambda: not flows.processes(), 60)
    audit(flows, FORK)
    run, audits = fork(flows, "--at", "1", "--iterations", "3"), 0
    while run.process.poll() is None:
        audit(flows, FORK)
        audits += 1
        time.sleep(2)
    run.finish(timeout_s=900)
    assert audits

    flows.start(*options, "--iterations", "3").finish(timeout_s=900)
    ours, theirs = contents(flows, FORK), contents(flows, RUN_ID)
    assert ours == {slot: theirs[slot] for slot in ours}
    assert f"/{last}" in contents(flows, FORK, own=True)
    assert not [slot for slot in contents(flows, FORK, own=True) if "/iterations/0001/" in slot]
    for run_id in (FORK, RUN_ID):
        assert "nothing is wrong" in audit(flows, run_id)
    assert flows.nothing_is_left()


def test_the_origin_is_killed_while_a_fork_refers_to_it(new_flows: Callable[[str], Flows]) -> None:
    flows = new_flows("nft")
    options = [word for one in SMALL for word in ("--set", one)]
    origin = flows.start(*options, "--iterations", "3", "--set", "rollout.keep={ tensors = 1, media = 1 }")
    origin.wait_until(lambda: (flows.root / "iterations/0001/rollout/manifest.1.json").exists(), timeout_s=600)
    begun = fork(flows, "--at", "1", "--set", "train.optm_lr=3e-4", "--iterations", "2")
    plan = Path(flows.store) / "runs" / FORK / "iterations/0001/update/layout.1.json"
    begun.wait_until(plan.exists, timeout_s=600)
    origin.kill()
    assert begun.finish(timeout_s=900)
    flows.start(*options, "--iterations", "3", "--set", "rollout.keep={ tensors = 1, media = 1 }").finish(timeout_s=900)
    for run_id in (FORK, RUN_ID):
        audit(flows, run_id)
    assert "/iterations/0001/rollout" not in contents(flows, FORK, own=True)
