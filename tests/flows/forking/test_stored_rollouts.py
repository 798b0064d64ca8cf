"""Forks that train on the rollouts of their origin: what they refer to, what their updates read, what is refused."""

from pathlib import Path
from typing import Any

import pytest

from cosmos_rl_core.algorithms._foreign import Foreign
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.storage import store
from cosmos_rl_core.weights.parts import OLD
from flows.forking.plan import plan_of_fork
from flows.forking.references import refer_to_origin
from flows.lineage.forks import EVERY, forks_of, note
from flows.lineage.origin import StoredRollouts
from flows.planning.base import AnyRun
from flows.planning.plan import ForkOf, Settings, freeze
from flows.planning.run import Run, run_of
from stages import contracts
from stages.artifacts.generations import invalidate
from stages.artifacts.records import place_of
from stages.artifacts.request import Request
from stages.artifacts.slots import current_of, drop, input_of
from tests.flows.by_hand import MONITORED, make_all, planned_run, validated
from tests.flows.forking.forked import made
from tests.flows.forking.test_fork_plans import contents, faults
from tests.hand_made import planned

LR = ("train.optm_lr=2e-3",)


@pytest.fixture
def origin(recipe: Any, tmp_path: Path) -> Run:
    """A finished run of two iterations."""
    run = planned_run(recipe, tmp_path)
    make_all(run)
    return run


def begun(origin: AnyRun, *overrides: str, at: int = 0, until: int = 2, **stored: Any) -> AnyRun:
    """A fork on stored rollouts that has its plan and its references."""
    settings = Settings("", origin.store_url, iterations=until, overrides=overrides)
    wanted = ForkOf(origin.plan.run_id, at, stored=StoredRollouts.model_validate(stored))
    run = run_of(freeze(plan_of_fork(wanted, settings), origin.store_url), origin.store_url)
    refer_to_origin(run)
    return run


def refusal(origin: AnyRun, *overrides: str, **options: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        begun(origin, *overrides, **options)
    return str(refused.value)


def updates(run: AnyRun) -> list[Request]:
    return [one for one in make_all(run).values() if one.stage == "update" and one.slot.startswith(run.url)]


def foreign_of(update: Request) -> Foreign | None:
    return update.settings(contracts.Update).foreign


@pytest.mark.parametrize("at", [0, 1])
def test_a_fork_on_stored_rollouts_without_changes_equals_its_origin(origin: Run, at: int) -> None:
    fork = begun(origin, at=at)
    own = [slot for slot in make_all(fork) if slot.startswith(fork.url) and made(slot).slot == slot]
    assert own == [fork.slots.report]
    assert contents(fork) == {slot: one for slot, one in contents(origin).items() if slot in contents(fork)}
    assert faults(fork) == faults(origin)


def test_a_fork_on_stored_rollouts_makes_no_rollout_and_no_score(origin: Run) -> None:
    fork = begun(origin, *LR)
    asked = make_all(fork)
    own = {slot.removeprefix(fork.url) for slot in asked if slot.startswith(fork.url) and made(slot).slot == slot}
    assert {slot for slot in own if "iterations" in slot} == {"/iterations/0000/update", "/iterations/0001/update"}
    assert not any(one.stage == "rollout" for one in asked.values())
    for k in (0, 1):
        assert made(fork.slots.iteration(k, "rollout")).slot == origin.slots.iteration(k, "rollout")
    assert faults(fork) == faults(origin)


def test_only_the_first_update_trains_on_rollouts_of_its_own_policy(origin: Run) -> None:
    first, second = updates(begun(origin, *LR))
    assert foreign_of(first) is None
    found = foreign_of(second)
    assert found is not None
    assert found.anchor == "own"
    assert found.lora == origin.recipe.policy.lora
    (behaviour,) = second.inputs["behaviours"]
    assert behaviour == input_of(origin.slots.policy(1), OLD)
    assert second.one("policy").url != origin.slots.policy(1)


def test_a_fork_with_another_lora_rank_begins_with_its_own_policy(origin: Run) -> None:
    fork = begun(origin, "policy.lora.r=3")
    first, second = updates(fork)
    assert made(fork.slots.policy(0)).slot == fork.slots.policy(0)
    assert origin.recipe.policy.lora is not None
    for update in (first, second):
        found = foreign_of(update)
        assert found is not None
        assert found.lora == origin.recipe.policy.lora
        assert update.settings(contracts.Update).lora != found.lora


@pytest.mark.parametrize(
    ("at", "changes", "referred"), [(0, (), True), (0, ("policy.lora.r=3",), False), (1, (), True)]
)
def test_a_fork_refers_to_its_origins_first_policy_unless_its_own_differs(
    origin: Run, at: int, changes: tuple[str, ...], referred: bool
) -> None:
    first = current_of(begun(origin, *changes, at=at).slots.policy(0))[1]
    assert (None if first is None else first.slot) == (origin.slots.policy(0) if referred else None)


def test_with_staleness_the_anchor_is_the_policy_that_made_the_rollout(recipe: Any, tmp_path: Path) -> None:
    stale = ("train_batch_per_replica = 8", "train_batch_per_replica = 8\nstaleness = 1")
    origin = planned(validated(recipe, tmp_path, MONITORED, stale), tmp_path, run_id="hand", iterations=3)
    make_all(origin)
    unchanged = begun(origin, until=3)
    assert contents(unchanged) == {slot: one for slot, one in contents(origin).items() if "rollout" not in slot}
    # Rollout 1 was made by policy 0 too, with which both begin.
    first, second, third = map(foreign_of, updates(begun(origin, *LR, until=3)))
    assert first is second is None
    assert third is not None
    assert third.anchor == "behaviour"


@pytest.mark.parametrize("named", ["own", "behaviour"])
def test_a_named_anchor_is_taken(origin: Run, named: str) -> None:
    _, second = updates(begun(origin, *LR, anchor=named, max_drift=0.25))
    found = foreign_of(second)
    assert found is not None
    assert (found.anchor, found.max_drift) == (named, 0.25)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (("policy.diffusers.sample.num_steps=7",), "sampler (policy.diffusers.sample)"),
        (("rollout.n_generation=2",), "samples a prompt (rollout.n_generation)"),
        (("train.seed=7",), "prompts, their order"),
        (("policy.lora.lora_alpha=3", "policy.diffusers.inference_size=[48, 48]"), "size or frames"),
    ],
)
def test_settings_that_would_need_other_rollouts_are_refused_by_name(
    origin: Run, changes: tuple[str, ...], expected: str
) -> None:
    assert expected in refusal(origin, *changes)


def test_iterations_without_a_rollout_are_named(origin: Run) -> None:
    assert "has no rollout of iterations 2 to 4; it has 0 to 1" in refusal(origin, until=5)


def test_dropped_tensors_are_named(origin: Run) -> None:
    drop(origin.slots.iteration(1, "rollout"), "tensors")
    assert "the tensors of rollouts 1 were deleted" in refusal(origin, *LR)


def test_deleted_behaviour_weights_are_named_unless_nothing_changes(origin: Run) -> None:
    drop(origin.slots.policy(1), OLD)
    assert "the weights that made rollouts 1 were deleted (train.ckpt.max_keep)" in refusal(origin, *LR)
    begun(origin)
    begun(origin, *LR, until=1)


def test_retention_of_the_origin_keeps_the_parts_that_a_fork_will_read(origin: Run) -> None:
    begun(origin, *LR)
    before = store.listed(origin.url)
    for slot in (origin.slots.iteration(0, "rollout"), origin.slots.iteration(1, "rollout"), origin.slots.policy(1)):
        assert any(slot.removeprefix(f"{origin.url}/") in name for name in before)
    rollout, train = origin.recipe.rollout, origin.recipe.train
    kept = rollout.model_copy(update={"keep": rollout.keep.model_copy(update={"tensors": 1})})
    train = train.model_copy(update={"ckpt": train.ckpt.model_copy(update={"max_keep": 1})})
    recipe = origin.recipe.model_copy(update={"rollout": kept, "train": train})
    small = Run(origin.plan.model_copy(update={"recipe": recipe}), origin.store_url)
    for newest in range(1, 3):
        small.drop_old_state(newest)
    assert store.listed(origin.url) == before


def test_rollouts_that_came_later_are_taken_by_the_next_command(recipe: Any, tmp_path: Path) -> None:
    origin = planned_run(recipe, tmp_path)
    make_all(origin)
    fork = begun(origin, *LR, until=1)
    make_all(fork)
    first = made(fork.slots.policy(1))
    longer = begun(origin, *LR, until=2)
    assert longer.plan.run_id == fork.plan.run_id
    assert made(longer.slots.iteration(1, "rollout")).slot == origin.slots.iteration(1, "rollout")
    make_all(longer)
    assert made(longer.slots.policy(1)).digest == first.digest
    assert made(longer.slots.policy(2)).slot == longer.slots.policy(2)
    assert faults(longer) == faults(origin)


DATA = 'data = { name = "rendered_text", split = "train", num_items = 4, size = [32, 64] }'
SIZE = "inference_size = [32, 64]"
DDRL = (
    ('type = "nft"', f'type = "ddrl"\n{DATA}'),
    ("timesteps_fraction = 1.0", "train_on = [0]"),
    (f"diffusers = {{ {SIZE} }}", f'diffusers = {{ {SIZE}, sample = {{ solver = "flow_sde" }} }}'),
)


def test_policy_gradients_are_refused_once_policies_differ(recipe: Any, tmp_path: Path) -> None:
    origin = planned(validated(recipe, tmp_path, MONITORED, *DDRL), tmp_path, run_id="hand")
    make_all(origin)
    said = refusal(origin, *LR)
    assert "ddrl compares the policy with the one that made the rollouts, which must be the run's own" in said
    begun(origin)
    # The first update is on its own policy.
    alone = begun(origin, *LR, until=1)
    assert [foreign_of(update) for update in updates(alone)] == [None]
    assert isinstance(alone, Run)
    (encoded,) = alone.prepared.data.encodes
    store.remove(store.join(encoded.slot, "manifest.1.json"))
    assert "ddrl reads encoded data: 1 of 1 sets of latents are not there" in refusal(origin, *LR, until=1)


def test_recorded_steps_that_the_rollouts_lack_are_named(recipe: Any, tmp_path: Path) -> None:
    # NFT on the sampler of policy gradients: equal samples, and no step of them is recorded.
    origin = planned(validated(recipe, tmp_path, MONITORED, DDRL[2]), tmp_path, run_id="hand")
    make_all(origin)
    said = refusal(origin, "train.train_policy.type=grpo", "train.train_policy.train_on=[0]", until=1)
    assert "grpo trains on recorded steps [0], the rollouts have none" in said


def test_an_extended_fork_keeps_its_artifacts_although_its_origin_has_others_by_now(origin: Run) -> None:
    fork = begun(origin, *LR, until=1)
    make_all(fork)
    own = made(fork.slots.policy(1)).digest
    # Another score of the origin's first rollout: the fork refers to the earlier one.
    slot = next(slot for slot in contents(origin) if slot.startswith("/iterations/0000/reward"))
    earlier = made(fork.url + slot).digest
    invalidate(origin.url + slot, 1, "test")
    make_all(origin)
    assert made(origin.url + slot).generation == 2
    longer = begun(origin, *LR, until=2)
    assert made(longer.slots.policy(1)).digest == own
    assert made(longer.url + slot).digest == earlier
    (record,) = forks_of(origin.url)
    assert record.references[place_of(origin.url + slot)] == (1,)
    assert not {EVERY} & {*record.holds}


def test_a_killed_extension_is_finished_by_the_next_command(origin: Run) -> None:
    fork = begun(origin, *LR, until=1)
    make_all(fork)
    (before,) = forks_of(origin.url)
    begun(origin, *LR, until=2)
    (whole,) = forks_of(origin.url)
    # Killed after its references, before its record.
    note(origin.url, before.model_copy(update={"holds": (*before.holds, EVERY)}))
    begun(origin, *LR, until=2)
    (again,) = forks_of(origin.url)
    assert again.references == whole.references
    assert not {EVERY} & {*again.holds}


def test_media_that_retention_deleted_are_not_needed_unless_a_new_reward_reads_them(origin: Run) -> None:
    drop(origin.slots.iteration(1, "rollout"), "media")
    begun(origin, *LR)
    said = refusal(origin, 'rewards=[{ fn = { name = "ocr", line_width = 64 } }]')
    assert "the media of rollouts 1 were deleted (rollout.keep.media); ocr reads them" in said


def test_the_record_names_the_policies_that_made_the_rollouts(origin: Run) -> None:
    begun(origin, *LR)
    (record,) = forks_of(origin.url)
    assert place_of(origin.slots.policy(1)) in record.references
