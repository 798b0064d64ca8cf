"""Updates on rollouts of other policies: their drift in closed form, what the loss compares with, where they end."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmos_rl_core.algorithms._base import algorithm_of
from cosmos_rl_core.algorithms._foreign import Foreign
from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.errors import ArtifactError, OffPolicyError
from cosmos_rl_core.models._conditioning import stack
from cosmos_rl_core.sampling.solvers import kernel_of
from cosmos_rl_core.training.noise_levels import DrawKey, random_times, training_noise
from cosmos_rl_core.weights.parts import BEHAVIOUR, CURRENT, STATE
from cosmos_rl_core.weights.policy_weights import prepare
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.request import Request
from stages.artifacts.slots import input_of
from stages.formats.embeddings import Embeddings
from stages.formats.policies import read_part
from stages.formats.sample_tensors import SampleTensors
from stages.scoring.advantages import advantages
from stages.training.loading import load_model
from tests.stages.conftest import make, make_on_ranks
from tests.stages.training.test_forward_passes import scored
from tests.stages.training.test_transitions import CPU, recipe, started, table_of

WIDE = LoraConfig(r=4, lora_alpha=4, target_modules=("to_q", "to_k", "to_v"))
"""An adapter of another rank than the recipe's, on more modules, with another scale."""


def values(algorithm: str = "nft") -> dict[str, Any]:
    """Two prompts of four samples, one optimizer step at two noise levels, which moves the policy far."""
    found = recipe({"num_steps": 4, "solver": "euler", "guidance_scale": 1.0})
    policy: dict[str, Any] = {"type": algorithm, "dataset": found["train"]["train_policy"]["dataset"]}
    policy |= {"mini_batch": 2, "timesteps_fraction": 0.5}
    found["train"] |= {"train_policy": policy, "optm_lr": 3e-2}
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("foreign")


@pytest.fixture(scope="module")
def first(folder: Path) -> Request:
    """The update that takes policy 0 to 1, made."""
    request = scored(values(), folder)
    make(request, folder)
    return request


def again(first: Request, name: str, anchor: Any = "behaviour", max_drift: float = 100.0, **changes: Any) -> Request:
    """An update of policy 1 on the rollout that policy 0 made."""
    own = first.settings(contracts.Update)
    foreign = Foreign(anchor=anchor, lora=own.lora, max_drift=max_drift)
    steps = own.steps.model_copy(update={"first_step": 1})
    config = own.model_copy(update={"steps": steps, "foreign": foreign} | changes)
    inputs = first.inputs | {"policy": (input_of(first.slot, *STATE),)}
    moved = {"iteration": 1, "slot": f"{first.slot}-{name}", "config": config, "inputs": inputs}
    return first.model_copy(update=moved)


@pytest.fixture(scope="module")
def made(first: Request, folder: Path) -> dict[str, Request]:
    """Updates of policy 1 on the rollout of policy 0, by what their losses compare with."""
    requests = {anchor: again(first, anchor, anchor) for anchor in (BEHAVIOUR, "own")}
    for request in requests.values():
        make(request, folder)
    return requests


def velocities(first: Request, lora: LoraConfig | None, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The velocity of each sample of the rollout at the drawn noise, one sample at a time."""
    config = first.settings(contracts.Update)
    model = load_model(config.model, ("transformer",), CPU)
    weights = prepare(model.transformer, lora, reference=False)
    weights.load(CURRENT, tensors)
    embeddings = Embeddings(first.inputs["embeddings"], prompts_of(first).values())
    found: dict[str, Tensor] = {}
    for name, prompt in prompts_of(first).items():
        x_0, noise, t = drawn(first, name)
        x_t = (1 - t) * x_0 + t * noise
        with torch.no_grad(), weights.use(CURRENT):
            conditioning = stack([embeddings[prompt]], CPU)
            found[name] = model.velocity(x_t[None], torch.tensor([t], device=CPU), conditioning)[0]
    return found


def prompts_of(first: Request) -> dict[str, str]:
    table = table_of(Artifact(input_of(first.slot)), contracts.Update.ADVANTAGES)
    return dict(zip(table["sample_id"], table["prompt_id"], strict=True))


def drawn(first: Request, name: str) -> tuple[Tensor, Tensor, float]:
    """Latents, noise and noise level of a sample, drawn for the drift of iteration 1."""
    config = first.settings(contracts.Update)
    key = DrawKey(first.seed, 1, -1, f"0/{name}")
    x_0 = SampleTensors(first.inputs["rollouts"], [f"0/{name}"])[f"0/{name}"]["latents"]
    schedule = load_model(config.model, (), CPU).schedule(config.sample.num_steps, size=(32, 64), frames=1)
    levels = kernel_of(config.sample, lambda: schedule).levels
    return x_0, training_noise(tuple(x_0.shape), key, 0), random_times(levels, 2, key)[0]


def weights_of(first: Request, version: int) -> dict[str, Tensor]:
    source = first.one("policy") if version == 0 else input_of(first.slot, CURRENT)
    return read_part(source, CURRENT)


def expected(first: Request, own: tuple[LoraConfig | None, dict[str, Tensor]]) -> float:
    """The drift of weights from policy 0, sample by sample."""
    lora = first.settings(contracts.Update).lora
    moved, missed = 0.0, 0.0
    made_by, trained = velocities(first, lora, weights_of(first, 0)), velocities(first, *own)
    for name, behaviour in made_by.items():
        x_0, noise, _ = drawn(first, name)
        moved += float((trained[name] - behaviour).double().square().mean())
        missed += float((behaviour - (noise - x_0)).double().square().mean())
    return moved / missed


def drift_of(request: Request) -> float:
    return float(Artifact(input_of(request.slot)).manifest.summary["drift"] or 0.0)


def made_drift(request: Request, folder: Path) -> float:
    make(request, folder)
    return drift_of(request)


def first_row(request: Request) -> Any:
    return table_of(Artifact(input_of(request.slot)), contracts.METRICS).iloc[0]


def test_drift_equals_the_drift_of_single_samples(first: Request, made: dict[str, Request]) -> None:
    lora = first.settings(contracts.Update).lora
    wanted = expected(first, (lora, weights_of(first, 1)))
    assert wanted > 0.01
    assert [drift_of(request) for request in made.values()] == [pytest.approx(wanted, rel=1e-5)] * 2


def test_two_ranks_find_the_drift_of_one(first: Request, folder: Path, made: dict[str, Request]) -> None:
    alone = drift_of(made[BEHAVIOUR])
    both = make_on_ranks(again(first, "two"), folder, 2)
    assert float(both.summary["drift"] or 0.0) == pytest.approx(alone, rel=1e-6)


def test_the_behaviour_may_have_an_adapter_of_another_shape(first: Request, folder: Path) -> None:
    run = started(folder, values() | {"policy": values()["policy"] | {"lora": WIDE.model_dump()}}, "wide")
    policy = input_of(run.slots.policy(0), *STATE)
    request = again(first, "wide", lora=WIDE)
    request = request.model_copy(update={"inputs": request.inputs | {"policy": (policy,)}, "iteration": 0})
    steps = first.settings(contracts.Update).steps
    config = request.settings(contracts.Update).model_copy(update={"steps": steps})
    # Both adapters begin as nothing.
    start = request.model_copy(update={"config": config})
    assert made_drift(start, folder) == 0
    assert first_row(start)["old_deviation_max"] == 0
    # One update on.
    moved = input_of(start.slot, *STATE)
    later = again(first, "wide-later", lora=WIDE)
    later = later.model_copy(update={"inputs": later.inputs | {"policy": (moved,)}})
    wanted = expected(first, (WIDE, read_part(moved, CURRENT)))
    assert wanted > 0
    assert made_drift(later, folder) == pytest.approx(wanted, rel=1e-5)


def test_the_loss_compares_with_the_chosen_anchor(made: dict[str, Request]) -> None:
    # The own copy equals the policy before the first step; the behaviour is policy 0.
    assert first_row(made["own"])["old_deviation_max"] == 0
    assert first_row(made[BEHAVIOUR])["old_deviation"] > 0.01


def test_nothing_is_trained_if_the_drift_exceeds_its_limit(first: Request, folder: Path) -> None:
    request = again(first, "far", max_drift=1e-3)
    with pytest.raises(OffPolicyError, match=r"before update 1 .* at most 0.001 is allowed"):
        make(request, folder)
    with pytest.raises(ArtifactError, match="has no artifact yet"):
        input_of(request.slot)


def test_pairs_have_a_drift_too(folder: Path) -> None:
    first = scored(values("dpo"), folder / "dpo")
    make(first, folder)
    assert made_drift(again(first, "again"), folder) > 0


@pytest.mark.parametrize("number", [1, 2])
def test_rewards_are_shuffled_within_groups(first: Request, number: int) -> None:
    own = first.settings(contracts.Update)
    config = own.model_copy(update={"algorithm": own.algorithm.model_copy(update={"shuffle_groups": number})})
    rollouts = [Artifact(source) for source in first.inputs["rollouts"]]
    plain, shuffled = (
        advantages(request, rollouts, algorithm_of(own.algorithm))
        for request in (first, first.model_copy(update={"config": config}))
    )
    assert list(plain["sample_id"]) == list(shuffled["sample_id"])
    assert list(plain["reward"]) != list(shuffled["reward"])
    for prompt, some in plain.groupby("prompt_id"):
        mixed = shuffled[shuffled["prompt_id"] == prompt]
        assert sorted(some["reward"]) == sorted(mixed["reward"])
        assert sorted(some["advantage"]) == pytest.approx(sorted(mixed["advantage"]))


def test_every_number_of_shuffle_groups_gives_another_order(first: Request) -> None:
    own = first.settings(contracts.Update)
    rollouts = [Artifact(source) for source in first.inputs["rollouts"]]
    orders = set[tuple[float, ...]]()
    for number in range(6):
        config = own.model_copy(update={"algorithm": own.algorithm.model_copy(update={"shuffle_groups": number})})
        table = advantages(first.model_copy(update={"config": config}), rollouts, algorithm_of(own.algorithm))
        orders.add(tuple(table["reward"]))
    assert len(orders) > 3
