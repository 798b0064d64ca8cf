"""Stochastic rollouts, what is stored of them, and updates that train on it: for every sampler, LoRA and full."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load as load_tensors

from cosmos_rl_core.errors import ArtifactError, ConfigError, DriftError
from cosmos_rl_core.models._conditioning import stack
from cosmos_rl_core.models.sd3 import model as sd3
from cosmos_rl_core.pipelines.directories import resolve_path
from cosmos_rl_core.sampling.schedule import schedule_of
from cosmos_rl_core.sampling.solvers import kernel_of
from cosmos_rl_core.storage import shards
from cosmos_rl_core.weights.policy_weights import to_bytes
from flows.planning import requests
from flows.planning.run import Run
from flows.sizes import costs
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.generations import invalidate
from stages.artifacts.request import Request
from stages.artifacts.slots import input_of
from stages.formats.embeddings import NEGATIVE, Embeddings
from stages.formats.policies import read_part
from stages.formats.samples import read_samples
from stages.formats.tables import read_table
from tests import hand_made
from tests.hand_made import rewards
from tests.stages.conftest import FEW_PROMPTS, make, make_run

CPU = torch.device("cpu")
LORA = {"r": 2, "target_modules": ["to_q", "to_v"]}
SDE = {"num_steps": 4, "solver": "flow_sde"}
CLIP = 1e-4


def recipe(sample: dict[str, Any], lora: dict[str, Any] | None = LORA, **options: Any) -> dict[str, Any]:
    """FlowGRPO on the tiny SD3: 2 prompts of 4 samples, 2 optimizer steps."""
    policy = {"type": "grpo", "mini_batch": 2, "batch_size_per_optimize": 4, "train_on": [0, 2], "clip_ratio": CLIP}
    diffusers = {"inference_size": [32, 64], "max_prompt_length": 12, "sample": sample}
    return {
        "policy": {"model_name_or_path": "package:tiny-sd3", "diffusers": diffusers} | ({"lora": lora} if lora else {}),
        "train": {
            "num_iterations": 4,
            "train_batch_per_replica": 8,
            "optm_lr": 1e-3,
            "train_policy": policy | {"dataset": FEW_PROMPTS} | options,
        },
        "rollout": {"n_generation": 4, "n_generation_mini_batch": 4, "samples_per_shard": 4},
        "rewards": [{"fn": {"name": "jpeg"}}],
    }


def started(tmp_path: Path, values: dict[str, Any], name: str = "run") -> Run:
    run = make_run(tmp_path / name, values, name)
    for request in (requests.policy(run), run.prepared.embed):
        make(request, tmp_path)
    return run


def iterate(run: Run, tmp_path: Path, k: int = 0) -> Artifact:
    """One iteration; the update."""
    make(requests.rollout(run, k), tmp_path)
    for reward in rewards(run, run.slots.iteration(k, "rollout"), k):
        make(reward, tmp_path)
    return updated(requests.update(run, k), tmp_path)


def updated(request: Request, tmp_path: Path) -> Artifact:
    make(request, tmp_path)
    return Artifact(input_of(request.slot))


def table_of(update: Artifact, name: str = contracts.Update.TRANSITIONS) -> Any:
    """A table of an update; untyped, as pandas is."""
    return read_table(update, name)


def tensors_of(run: Run, k: int = 0) -> dict[str, tuple[dict[str, Any], dict[str, torch.Tensor]]]:
    artifact = Artifact(input_of(run.slots.iteration(k, "rollout")))
    stored = list(read_samples(artifact, contracts.TENSORS))
    return {s.sample_id: (s.row, load_tensors(s.tensors or b"")) for s in stored}


@pytest.mark.parametrize(
    ("sample", "lora"),
    [
        (SDE, LORA),
        pytest.param(SDE | {"guidance_scale": 2.0}, None, marks=pytest.mark.slow),
        pytest.param({"num_steps": 4, "solver": "cps"}, LORA, marks=pytest.mark.slow),
        pytest.param({"num_steps": 4, "solver": "edm"}, LORA, marks=pytest.mark.slow),
        ({"num_steps": 4, "solver": "edm", "solver_option": "1euler", "guidance_scale": 2.0}, LORA),
    ],
    ids=["sde", "sde-guided-full", "cps", "edm", "edm-euler-guided"],
)
def test_recorded_steps_are_replayed_exactly_and_then_trained_on(
    sample: dict[str, Any], lora: dict[str, Any] | None, tmp_path: Path
):
    run = started(tmp_path, recipe(sample, lora))
    update = iterate(run, tmp_path)
    stored = tensors_of(run)
    assert len(stored) == 8
    for about, tensors in stored.values():
        assert about["trained_steps"] == tensors["steps"].tolist() == [0, 2]
        recalled = {"history.2"} if sample["solver"] == "edm" and "solver_option" not in sample else set()
        states = {f"state.{i}" for i in (0, 1, 2, 3)}
        assert tensors.keys() == {"latents", "steps", "log_prob"} | states | recalled
        assert {tensors[name].dtype for name in states} == {torch.float32}
        assert tensors["log_prob"].dtype == torch.float64

        large = [tensor for name, tensor in tensors.items() if name not in {"steps", "log_prob"}]
        assert costs.sample_bytes(run.recipe) == sum(tensor.nbytes for tensor in large)
    policy = input_of(run.slots.policy(1))
    parts = [read_part(policy, part) for part in ("current", "optimizer")]
    sizes = [tensor.nbytes for part in parts for name, tensor in part.items() if not name.startswith("step.")]
    # Full fine-tuning counts the transformer's buffers too.
    assert sum(costs.policy_parts(run.recipe).values()) == pytest.approx(sum(sizes), rel=0.01 if lora is None else 0)

    table = table_of(update)
    assert len(table) == 16
    first = table[table["optimizer_step"] == 0]
    # The policy is the one that made the rollout until the first step moves it.
    assert first["ratio"].tolist() == [1.0] * 8
    assert first["log_ratio"].tolist() == [0.0] * 8
    assert table.loc[table["optimizer_step"] == 1, "log_ratio"].abs().min() > 0
    weights = np.exp(table.loc[table["optimizer_step"] == 1, "log_ratio"])
    sizes = table_of(update, contracts.METRICS)["effective_sample_size"].tolist()
    assert sizes == pytest.approx([1.0, weights.mean() ** 2 / (weights**2).mean()])
    # The update's batch is not the rollout's and rounds otherwise; cps divides the difference by a small deviation.
    assert table["logp_drift"].max() < (CLIP / 10 if sample["solver"] == "cps" else CLIP / 100)
    before = read_part(input_of(run.slots.policy(0)), "current")
    after = read_part(input_of(run.slots.policy(1)), "current")
    assert max(float((after[name] - before[name]).abs().max()) for name in before) > 1e-4
    advantages = table_of(update, contracts.Update.ADVANTAGES)
    pd.testing.assert_series_equal(advantages["reward"], advantages["reward.jpeg"], check_names=False)


def test_in_the_rollouts_batch_log_probabilities_equal_the_recorded_ones(tmp_path: Path):
    run = started(tmp_path, recipe({"num_steps": 4, "solver": "cps"}, LORA, mini_batch=4))
    assert table_of(iterate(run, tmp_path))["logp_drift"].max() == 0


@pytest.mark.parametrize(
    "solver", ["flow_sde", *(pytest.param(name, marks=pytest.mark.slow) for name in ("cps", "edm"))]
)
def test_in_the_rollouts_batches_stored_and_recomputed_densities_are_equal(solver: str, tmp_path: Path):
    values = recipe({"num_steps": 4, "solver": solver}, logp_old="stored", mini_batch=1)
    values["rollout"]["n_generation_mini_batch"] = 1
    table = table_of(iterate(started(tmp_path, values), tmp_path))
    first = table[table["optimizer_step"] == 0]
    assert first["ratio"].tolist() == [1.0] * 8
    assert first["logp_drift"].tolist() == [0.0] * 8


def test_a_step_that_is_not_taken_may_have_non_finite_gradients(tmp_path: Path):
    values = recipe(SDE, ratio_mode="sum_logp", max_drift=1e-3, max_logp_drift=1.0)
    values["train"]["optm_lr"] = 0.5
    update = iterate(started(tmp_path, values), tmp_path)
    metrics = table_of(update, "metrics.parquet")
    assert metrics["approx_kl"].iloc[1] > 1
    assert metrics["lr"].tolist() == [0.5, 0.0]
    assert metrics["grad_norm"].isna().tolist() == [False, True]
    assert update.manifest.summary["ended_before_step"] == 1
    assert update.manifest.summary["grad_norm"] is None


def test_planned_bytes_of_random_steps_are_the_most_that_they_can_take(tmp_path: Path):
    run = started(tmp_path, recipe({"num_steps": 10, "solver": "cps"}, train_on=[0, -1, -1]))
    make(requests.rollout(run, 0), tmp_path)
    cost = costs.sample_bytes(run.recipe)
    found = [
        sum(t.nbytes for name, t in tensors.items() if name not in {"steps", "log_prob"})
        for _, tensors in tensors_of(run).values()
    ]
    latents = next(iter(tensors_of(run).values()))[1]["latents"].nbytes
    assert cost == 7 * latents
    assert max(found) <= 7 * latents


def gradient_norm(run: Run, *, both: bool) -> float:
    """Compute by hand the norm of the first optimizer step on all samples, one solver step at a time.

    Every log-ratio is 0 there.
    """
    model = sd3.load(resolve_path("package:tiny-sd3"), ("transformer",), CPU)
    parameters = [parameter.requires_grad_() for parameter in model.transformer.parameters()]
    sample = run.recipe.policy.diffusers.sample.rollout
    kernel, scale = kernel_of(sample, lambda: schedule_of(model.scheduler, sample.num_steps)), sample.guidance_scale
    update = Artifact(input_of(run.slots.policy(1)))
    advantages = table_of(update, "advantages.parquet").set_index("sample_id")["advantage"]
    conditioning = Embeddings([input_of(run.prepared.embed.slot)], [*(p.id for p in run.plan.prompts), NEGATIVE])
    for sample_id, (about, tensors) in tensors_of(run).items():
        given, negative = (stack([conditioning[i]], CPU) for i in (about["prompt_id"], NEGATIVE))
        for i in tensors["steps"].tolist():
            step, x, x_next = kernel.steps[i], tensors[f"state.{i}"][None], tensors[f"state.{i + 1}"][None]
            t = torch.tensor([step.t], dtype=torch.float32, device=CPU)
            unconditional = model.velocity(x, t, negative)
            unconditional = unconditional if both else unconditional.detach()
            velocity = scale * model.velocity(x, t, given) + (1 - scale) * unconditional
            error = x_next - (step.keep * x + step.push * velocity)
            log_density = -error.square().mean() / (2 * step.std**2)
            (-10 * float(advantages[sample_id]) * log_density / (8 * 2)).backward()
    return float(torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])))


@pytest.mark.parametrize("both", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_guidance_trains_one_or_both_predictions_at_a_ratio_of_exactly_1(both: bool, tmp_path: Path):
    values = recipe(SDE | {"guidance_scale": 3.0}, None, batch_size_per_optimize=8, kl_beta=0.0)
    values["train"]["train_policy"]["train_unconditional"] = both
    run = started(tmp_path, values)
    update = iterate(run, tmp_path)
    assert table_of(update)["ratio"].tolist() == [1.0] * 16
    found = table_of(update, "metrics.parquet")["grad_norm"].iloc[0]
    assert found == pytest.approx(gradient_norm(run, both=both), rel=1e-3)
    assert found != pytest.approx(gradient_norm(run, both=not both), rel=1e-2)


def test_training_one_prediction_alone_is_refused_without_guidance(tmp_path: Path):
    with pytest.raises(ConfigError, match="train_unconditional = false leaves out a prediction that guidance_scale"):
        started(tmp_path, recipe(SDE, train_unconditional=False))


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, CLIP / 100), (torch.bfloat16, CLIP / 2)])
def test_rollout_and_update_agree_on_the_density_in_any_batch(
    dtype: torch.dtype, limit: float, tmp_path: Path, device: torch.device
):
    """Weights have moved. Batches have 1, 2 or all samples, in another order than they were sampled in."""
    drifts = []
    with torch.autocast(device.type, dtype=dtype, enabled=dtype is not torch.float32):
        for mini_batch in (1, 2, 4):
            run = started(tmp_path, recipe(SDE, mini_batch=mini_batch, max_logp_drift=limit), str(mini_batch))
            for k in range(2):
                table = table_of(iterate(run, tmp_path, k))
                drifts.append(table["logp_drift"].max())
                # Recomputed in the update's own batches: whatever the drift, nothing has changed before the first step.
                assert table.loc[table["optimizer_step"] == 0, "log_ratio"].tolist() == [0.0] * 8
                assert table.loc[table["optimizer_step"] == 1, "log_ratio"].abs().min() > 0
    assert max(drifts) < limit


def test_an_update_that_computes_otherwise_than_the_rollout_refuses_by_sample_and_step(
    tmp_path: Path, device: torch.device
):
    run = started(tmp_path, recipe(SDE, max_logp_drift=1e-6))
    make(requests.rollout(run, 0), tmp_path)
    for reward in rewards(run, run.slots.iteration(0, "rollout"), 0):
        make(reward, tmp_path)
    with (
        torch.autocast(device.type, dtype=torch.bfloat16),
        pytest.raises(DriftError, match=r"sample i0000-p-[0-9a-f]+-00\d, step [02]: .* at most 1e-06 is allowed"),
    ):
        make(requests.update(run, 0), tmp_path)


def broken(tensors: dict[str, torch.Tensor], name: str, value: float) -> dict[str, torch.Tensor]:
    """With another value at the second recorded step."""
    tensors[name][1] = value
    return tensors


@pytest.mark.parametrize(
    ("name", "value", "error", "expected"),
    [
        ("log_prob", math.nan, DriftError, ", step 2: .* is nan although"),
        ("steps", 3, ArtifactError, " was recorded at step 3, .*; expected one of the steps with noise: 0, 1, 2[.] "),
    ],
)
def test_a_stored_step_without_a_density_refuses_to_train_by_sample_and_step(
    name: str, value: float, error: type[Exception], expected: str, tmp_path: Path
):
    run = started(tmp_path, recipe({"num_steps": 4, "solver": "cps"}))
    make(requests.rollout(run, 0), tmp_path)
    slot = run.slots.iteration(0, "rollout")
    rollout = Artifact(input_of(slot))
    files = {path: rollout.read(path) for path in rollout.names()}
    members = shards.unpack(files["tensors/00000.tar"])
    first = min(path for path in members if path.endswith(".safetensors"))
    members[first] = to_bytes(broken(load_tensors(members[first]), name, value))
    invalidate(slot, 1, "its densities are another's")
    hand_made.make(requests.rollout(run, 0), files | {"tensors/00000.tar": shards.pack(members)})
    for reward in rewards(run, slot, 0):
        make(reward, tmp_path)
    with pytest.raises(error, match=f"sample {first.removesuffix('.safetensors')}{expected}"):
        make(requests.update(run, 0), tmp_path)


def test_with_stored_densities_the_ratio_contains_the_drift(tmp_path: Path, device: torch.device):
    run = started(tmp_path, recipe(SDE, logp_old="stored", max_logp_drift=1.0))
    make(requests.rollout(run, 0), tmp_path)
    for reward in rewards(run, run.slots.iteration(0, "rollout"), 0):
        make(reward, tmp_path)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        table = table_of(updated(requests.update(run, 0), tmp_path))
    first = table[table["optimizer_step"] == 0]
    assert first["log_ratio_per_dim"].abs().tolist() == first["logp_drift"].tolist()
    assert first["logp_drift"].max() > 0


@pytest.mark.slow
def test_a_random_step_is_drawn_for_each_prompt_among_those_with_noise(tmp_path: Path):
    values = recipe({"num_steps": 6, "solver": "cps"}, train_on=[1, -1])
    values["rollout"] |= {"n_generation": 2}
    run = started(tmp_path, values)
    iterate(run, tmp_path)
    by_prompt: dict[str, set[tuple[int, ...]]] = {}
    for about, _ in tensors_of(run).values():
        by_prompt.setdefault(about["prompt_id"], set()).add(tuple(about["trained_steps"]))
    assert all(len(steps) == 1 for steps in by_prompt.values())
    drawn = {step for steps in by_prompt.values() for step in next(iter(steps))} - {1}
    assert drawn <= {0, 2, 3, 4}
    assert len(drawn) > 1


@pytest.mark.slow
def test_samples_of_one_prompt_may_start_from_the_same_noise(tmp_path: Path):
    run = started(tmp_path, recipe(SDE, use_same_seed=True))
    make(requests.rollout(run, 0), tmp_path)
    starts: dict[str, list[torch.Tensor]] = {}
    ends: dict[str, list[torch.Tensor]] = {}
    for about, tensors in tensors_of(run).values():
        starts.setdefault(about["prompt_id"], []).append(tensors["state.0"])
        ends.setdefault(about["prompt_id"], []).append(tensors["latents"])
    one, other = starts.values()
    assert all(torch.equal(start, one[0]) for start in one)
    assert not torch.equal(one[0], other[0])
    assert not any(torch.equal(a, b) for group in ends.values() for a, b in pairwise(group))


@pytest.mark.slow
def test_several_passes_drift_and_end_early_at_a_limit(tmp_path: Path):
    free = iterate(started(tmp_path, recipe(SDE, mu_iterations=2), "free"), tmp_path)
    metrics = table_of(free, "metrics.parquet")
    assert metrics["step"].tolist() == [0, 1, 2, 3]
    assert metrics["approx_kl"].iloc[0] == 0
    assert metrics["approx_kl"].iloc[1:].min() > 0

    bound = started(tmp_path, recipe(SDE, mu_iterations=2, max_drift=1e-15), "bound")
    update = iterate(bound, tmp_path)
    metrics = table_of(update, "metrics.parquet")
    # One step moves the weights; the next finds them moved, and is not taken.
    assert metrics["step"].tolist() == [0, 1]
    assert metrics["lr"].tolist() == [1e-3, 0.0]
    assert update.manifest.summary["ended_before_step"] == 1
    assert update.json("schedule/clocks.json") == {"iteration": 1, "optimizer_step": 4}
    # The next iteration begins where this one was planned to end.
    assert table_of(iterate(bound, tmp_path, 1), "metrics.parquet")["step"].tolist()[0] == 4


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_renewed_reference_is_kept_in_the_policy_and_can_make_rollouts(tmp_path: Path):
    run = started(tmp_path, recipe(SDE, update_ref_every_iter=2, on_policy=False, kl_beta=0.01))
    updates = [iterate(run, tmp_path, k) for k in range(3)]
    current, reference = (
        [read_part(input_of(run.slots.policy(k)), part) for k in (1, 2, 3)] for part in ("current", "reference")
    )
    start = read_part(input_of(run.slots.policy(0)), "current")
    assert same(reference[0], start)
    assert same(reference[1], current[1])
    assert same(reference[2], current[1])
    assert requests.rollout(run, 1).one("policy").parts == ("reference",)
    # Rollouts by the reference: iteration 1 begins off-policy, by iteration 0; iteration 2 begins on-policy.
    first = [table_of(update, "metrics.parquet").iloc[0] for update in updates]
    assert first[0]["approx_kl"] == 0
    assert first[1]["approx_kl"] > 0
    assert first[2]["approx_kl"] == 0
    assert first[2]["kl"] == 0


def test_stale_rollouts_are_compared_with_the_policy_that_made_them(tmp_path: Path):
    values = recipe(SDE)
    values["train"] |= {"staleness": 1}
    run = started(tmp_path, values)
    for k in range(2):
        iterate(run, tmp_path, k)
    assert requests.rollout(run, 1).one("policy").content == requests.rollout(run, 0).one("policy").content
    request = requests.update(run, 1)
    assert request.inputs["behaviours"][0].url == run.slots.policy(0)
    metrics = table_of(Artifact(input_of(request.slot)), "metrics.parquet")
    assert metrics["approx_kl"].iloc[0] > 0
    assert metrics["logp_drift"].max() < CLIP / 100

    swapped = request.model_copy(update={"inputs": request.inputs | {"behaviours": (input_of(run.slots.policy(1)),)}})
    with pytest.raises(ConfigError, match="the rollouts were made by policies"):
        make(swapped.model_copy(update={"slot": f"{request.slot}-swapped"}), tmp_path)
