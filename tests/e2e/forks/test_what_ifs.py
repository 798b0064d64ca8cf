"""What-ifs and studies as processes: the bits of the run where nothing changes, killed once, audited at work."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flows.forking.plan import plan_of_fork
from flows.forking.references import refer_to_origin
from flows.lineage.origin import StoredRollouts
from flows.planning.base import AnyRun
from flows.planning.plan import ForkOf, Settings, freeze
from flows.planning.run import run_of
from flows.planning.steps import read_run
from stages.artifacts.manifest import Manifest
from stages.artifacts.slots import current_of
from tests.e2e.flow_process import NO_PREFECT, PREFECT, RUN_ID, Flows, Started, eventually
from tests.e2e.forks.test_forked_runs import SMALL, STALE, SUPERVISED, audit, contents

pytestmark = pytest.mark.slow
RUNS = {
    "nft": ("nft", SMALL),
    "nft, stale": ("nft", (*SMALL, *STALE)),
    "grpo": ("grpo", SMALL),
    "ddrl": ("ddrl", SMALL),
    "ddrl, stale": ("ddrl", (*SMALL, *STALE)),
    "dpo": ("dpo", SMALL),
    "sft": ("sft", SUPERVISED),
}
FORK = "fork"


@pytest.fixture
def new_flows(tmp_path: Path) -> Iterator[Callable[[str], Flows]]:
    """Makes a store for a recipe."""
    made: list[Flows] = []

    def new(algorithm: str) -> Flows:
        made.append(Flows(tmp_path / "flows", {}, f"configs/tiny/{algorithm}.toml"))
        made[-1].program = NO_PREFECT
        return made[-1]

    yield new
    for flows in made:
        flows.kill_all()


def options(settings: tuple[str, ...]) -> list[str]:
    return [word for one in settings for word in ("--set", one)]


def on_rollouts(flows: Flows, *words: str, run_id: str = FORK) -> Started:
    """A setting of a what-if of the run in the store."""
    own = ("--stored", "--at", "0", "--store", flows.store, "--run-id", run_id)
    return flows.start_command(NO_PREFECT, "fork", RUN_ID, *own, *words)


def begun(flows: Flows) -> AnyRun:
    """A setting of a what-if that changes nothing, with its plan and its references."""
    settings = Settings("", flows.store, FORK, 3)
    plan = freeze(plan_of_fork(ForkOf(RUN_ID, 0, stored=StoredRollouts()), settings), flows.store)
    run = run_of(plan, flows.store)
    refer_to_origin(run)
    return run


@pytest.mark.parametrize("name", RUNS)
def test_without_changes_each_update_is_computed_to_the_bits_of_the_run(
    name: str, new_flows: Callable[[str], Flows]
) -> None:
    algorithm, settings = RUNS[name]
    flows = new_flows(algorithm)
    flows.start(*options(settings), "--iterations", "3").finish(timeout_s=900)
    run = begun(flows)
    expected = contents(flows, FORK)
    trained = [run.slots.policy(k) for k in (1, 2, 3)]
    for slot in trained:
        # Nothing but the references: the same updates are computed from the stored rollouts.
        Path(Manifest.url(slot, 1)).unlink()

    killed = on_rollouts(flows, "--iterations", "3")
    killed.wait_until(lambda: (Path(trained[1]) / "layout.1.json").exists(), timeout_s=600)
    killed.kill()
    assert eventually(lambda: not flows.processes(), 60)
    going, audits = on_rollouts(flows, "--iterations", "3"), 0
    while going.process.poll() is None:
        audit(flows, FORK)
        audits += 1
        time.sleep(2)
    going.finish(timeout_s=900)
    assert audits
    assert contents(flows, FORK) == expected
    own = {slot for slot in contents(flows, FORK, own=True) if "report" not in slot}
    assert {run.url + slot for slot in own} == set(trained)
    for run_id in (FORK, RUN_ID):
        assert "nothing is wrong" in audit(flows, run_id)
    assert flows.nothing_is_left()


@pytest.mark.parametrize(
    "changes",
    [("train.optm_lr=3e-3",), ("train.train_policy.type=dpo",), ("train.train_policy.type=rft",), ("policy.lora.r=8",)],
    ids=["learning rate", "dpo", "rft", "rank"],
)
def test_other_settings_train_on_the_rollouts_of_the_run(
    changes: tuple[str, ...], new_flows: Callable[[str], Flows]
) -> None:
    flows = new_flows("nft")
    flows.start(*options(SMALL), "--iterations", "2").finish(timeout_s=900)
    before = contents(flows, RUN_ID)
    on_rollouts(flows, "--iterations", "2", *options(changes)).finish(timeout_s=900)
    update = current_of(read_run(flows.store, FORK).slots.policy(2))[1]
    assert update is not None
    assert float(update.summary["drift"] or 0.0) > 0
    assert not [slot for slot in contents(flows, FORK, own=True) if "rollout" in slot or "reward" in slot]
    assert contents(flows, RUN_ID) == before
    for run_id in (FORK, RUN_ID):
        assert "nothing is wrong" in audit(flows, run_id)


def test_the_run_is_killed_while_a_setting_trains_on_its_rollouts(new_flows: Callable[[str], Flows]) -> None:
    flows = new_flows("nft")
    keeping = (*SMALL, "rollout.keep={ tensors = 3, media = 1 }", "train.ckpt.max_keep=3")
    run = flows.start(*options(keeping), "--iterations", "5")
    run.wait_until(lambda: (flows.root / "iterations/0001/update/manifest.1.json").exists(), timeout_s=600)
    going = on_rollouts(flows, "--iterations", "2", *options(("train.optm_lr=3e-3",)))
    # Its second update is on samples of a policy that is not its own.
    layout = Path(flows.store) / "runs" / FORK / "iterations/0001/update/layout.1.json"
    going.wait_until(layout.exists, timeout_s=600)
    run.kill()
    going.finish(timeout_s=900)
    update = current_of(read_run(flows.store, FORK).slots.policy(2))[1]
    assert update is not None
    assert float(update.summary["drift"] or 0.0) > 0
    flows.start(*options(keeping), "--iterations", "5").finish(timeout_s=900)
    for run_id in (FORK, RUN_ID):
        assert "nothing is wrong" in audit(flows, run_id)


def study_of(flows: Flows, name: str) -> dict[str, object]:
    return json.loads((Path(flows.store) / "studies" / name / "numbers.json").read_text(encoding="utf-8"))


def test_an_absurd_learning_rate_ends_itself(tmp_path: Path) -> None:
    flows = Flows(tmp_path / "flows", {}, "configs/tiny/nft.toml")
    flows.program = NO_PREFECT
    try:
        flows.start(*options(SMALL), "--iterations", "3").finish(timeout_s=900)
        words = ("what-if", RUN_ID, "--store", flows.store, "--controls", "0", "--name", "far")
        flows.start_command(PREFECT, *words, "--set", "train.optm_lr=1").finish(expect=78, timeout_s=900)
        rows = study_of(flows, "far")["settings"]
        assert isinstance(rows, list)
        assert [bool(row["ended"]) for row in rows] == [False, True]
        assert "ended at policy 1" in rows[1]["ended"]
        # The policy trained until then is evaluated.
        assert [*rows[1]["runs"][0]["figures"]] == ["0", "1"]
    finally:
        flows.kill_all()


def test_a_study_over_seeds_goes_on_after_a_kill(tmp_path: Path) -> None:
    flows = Flows(tmp_path / "flows", {}, "configs/tiny/nft.toml")
    words = ("study", "configs/tiny/nft.toml", "--seeds", "0-1", "--sweep", "train.optm_lr=1e-3,2e-3", "--name", "both")
    words = (*words, "--iterations", "1", "--store", flows.store, *options(SMALL))
    try:
        killed = flows.start_command(PREFECT, *words)
        runs = Path(flows.store) / "runs"
        killed.wait_until(lambda: len([*runs.glob("*/plan.json")]) > 2, timeout_s=900)
        killed.kill()
        assert eventually(lambda: not flows.processes(), 60)
        flows.start_command(PREFECT, *words).finish(timeout_s=900)
        settings = study_of(flows, "both")["settings"]
        assert isinstance(settings, list)
        assert [len(row["runs"]) for row in settings] == [2, 2]
        for row in settings:
            for one in row["runs"]:
                assert "nothing is wrong" in audit(flows, one["run"])
    finally:
        flows.kill_all()
