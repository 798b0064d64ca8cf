"""Runs that begin with what another run, or a folder, has trained."""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.conformance.models.adapters import load_model
from cosmos_rl_core.models._conditioning import stack
from cosmos_rl_core.pipelines import directories
from cosmos_rl_core.weights.policy_weights import prepare
from flows.planning import requests
from flows.planning.run import Run
from stages.artifacts.artifact import Artifact
from stages.artifacts.manifest import Manifest
from stages.artifacts.slots import input_of
from stages.contracts import METRICS
from stages.formats.policies import read_part
from stages.formats.tables import read_table
from tests.hand_made import rewards
from tests.stages import small_video
from tests.stages.conftest import FEW_PROMPTS, make, make_on_ranks, make_run

CPU = torch.device("cpu")
BASE = "package:tiny-sd3"
SFT_LORA: dict[str, Any] = {"r": 4, "lora_alpha": 12, "target_modules": ["to_q", "net.2"]}
"""A scale that is no power of two, and modules of which another adapter has some."""
OTHER_LORA: dict[str, Any] = {"r": 2, "lora_alpha": 3, "target_modules": ["to_q", "to_v"]}


def recipe(train_policy: dict[str, Any], **policy: Any) -> dict[str, Any]:
    diffusers: dict[str, Any] = {"inference_size": [32, 64], "max_prompt_length": 12}
    rewarded = train_policy["type"] != "sft"
    return {
        "policy": {"model_name_or_path": BASE, "diffusers": diffusers | ({"sample": SAMPLE} if rewarded else {})}
        | policy,
        "train": {
            "num_iterations": 1,
            "train_batch_per_replica": 4,
            "optm_lr": 1e-2,
            "train_policy": {"mini_batch": 2} | train_policy,
        },
        **({"rollout": {"n_generation": 2, "n_generation_mini_batch": 4}} if rewarded else {}),
        "rewards": [{"fn": {"name": "jpeg"}}] if rewarded else [],
    }


SAMPLE = {"num_steps": 3, "guidance_scale": 1.0}
SFT = {"type": "sft", "steps_per_iteration": 2, "dataset": {"name": "rendered_text", "num_items": 4}}
NFT = {"type": "nft", "timesteps_fraction": 0.34, "kl_beta": 0.1, "batch_size_per_optimize": 2, "dataset": FEW_PROMPTS}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with two finished runs of supervised training: ``sft`` with adapters, ``full`` without."""
    folder = tmp_path_factory.mktemp("inits")
    for name, lora in (("sft", {"lora": SFT_LORA}), ("full", {})):
        run = make_run(folder, recipe(SFT, **lora), name)
        for request in (requests.policy(run), run.prepared.embed, run.prepared.encode):
            make(request, folder)
        make(requests.finetune(run, 0), folder)
    return folder


def iteration(run: Run, folder: Path, *, k: int = 0, update: bool = True) -> None:
    if k == 0:
        make(requests.policy(run), folder)
        make(run.prepared.embed, folder)
    make(requests.rollout(run, k), folder)
    for reward in rewards(run, run.slots.iteration(k, "rollout"), k):
        make(reward, folder)
    if update:
        make(requests.update(run, k), folder)


def part(run: Run, k: int, name: str = "current") -> dict[str, Tensor]:
    return read_part(input_of(run.slots.policy(k), name), name)


def losses(run: Run, k: int = 0) -> Any:
    return read_table(Artifact(input_of(run.slots.policy(k + 1))), METRICS)


def require_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def require_close(found: Tensor, expected: Tensor) -> None:
    """Equal but for the rounding of float32: a millionth of the largest number."""
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))


@cache
def text_model() -> tuple[Any, Any]:
    model = load_model(directories.resolve_path(BASE), ("text", "vae"), CPU)
    return model, stack(model.encode_prompts(["a cat"], 12), CPU)


def velocity(transformer: Any) -> Tensor:
    """One prediction, by our own model around a transformer."""
    model, conditioning = text_model()
    model.pipeline.transformer = transformer
    shape = (1, *model.latent_shape((32, 64), 1))
    x_t = torch.linspace(-2, 2, torch.Size(shape).numel(), device=CPU).reshape(shape)
    with torch.no_grad():
        return model.velocity(x_t, torch.tensor([0.6], device=CPU), conditioning)


def fresh() -> Any:
    return load_model(directories.resolve_path(BASE), ("transformer",), CPU).transformer


def with_lora(lora: dict[str, Any], tensors: dict[str, Tensor]) -> Tensor:
    """The prediction of one adapter on the base."""
    transformer = fresh()
    weights = prepare(transformer, LoraConfig.model_validate(lora), reference=False)
    weights.load("current", tensors)
    return velocity(transformer)


def stacked(run: Run, k: int) -> Tensor:
    """The prediction of a policy version on its frozen adapter."""
    transformer = fresh()
    weights = prepare(transformer, run.recipe.policy.lora, below=run.plan.below, reference=False)
    weights.load("current", part(run, k))
    weights.load_below(part(run, 0, "init"))
    return velocity(transformer)


def exported(run: Run, k: int, folder: Path) -> Path:
    make(requests.export(run, k), folder)
    target = Path(tempfile.mkdtemp(dir=folder))
    Artifact(input_of(run.slots.version(k, "export"))).bring_to(target)
    return target


def stock(folder: Path) -> Tensor:
    """The prediction of the stock pipeline with an export loaded as users load it."""
    pipeline = diffusers.DiffusionPipeline.from_pretrained(directories.resolve_path(BASE), local_files_only=True)
    pipeline.load_lora_weights(folder / "lora", weight_name="model.safetensors", adapter_name="default")
    return velocity(pipeline.transformer)


@pytest.mark.parametrize("reference", [pytest.param("base", marks=pytest.mark.slow), "init"])
def test_an_adapter_of_another_run_goes_on_training(store: Path, reference: str):
    values = recipe(NFT, lora=SFT_LORA, init_from="sft", reference=reference)
    run = make_run(store, values, f"continue-{reference}")
    iteration(run, store)
    trained = part(make_run(store, recipe(SFT, lora=SFT_LORA), "sft"), 1)
    require_equal(part(run, 0), trained)
    kl = losses(run)["kl"].tolist()
    # The first step finds the policy where its init is; the base model is elsewhere.
    assert (kl[0] == 0) == (reference == "init")
    assert kl[1] > 0
    if reference == "init":
        require_equal(part(run, 1, "reference"), trained)
    manifest = Artifact(input_of(run.slots.policy(0))).manifest
    assert run.plan.init is not None
    assert manifest.config["init"]["digest"] == manifest.inputs["init"][0].manifest == run.plan.init.digest
    assert manifest.summary["init"] == f"sft@1 ({run.plan.init.digest[:12]})"
    require_close(stock(exported(run, 1, store)), with_lora(SFT_LORA, part(run, 1)))


@pytest.mark.parametrize("reference", [pytest.param("base", marks=pytest.mark.slow), "init"])
def test_a_new_adapter_is_trained_on_a_frozen_one(store: Path, reference: str):
    values = recipe(NFT, lora=OTHER_LORA, init_from="sft@1", init_mode="stack", reference=reference)
    run = make_run(store, values, f"stack-{reference}")
    iteration(run, store)
    trained = part(make_run(store, recipe(SFT, lora=SFT_LORA), "sft"), 1)
    require_equal(part(run, 0, "init"), trained)
    assert torch.equal(stacked(run, 0), with_lora(SFT_LORA, trained))
    kl = losses(run)["kl"].tolist()
    assert (kl[0] == 0) == (reference == "init")
    assert kl[1] > 0
    moved = stacked(run, 1)
    assert not torch.equal(moved, stacked(run, 0))
    require_close(stock(exported(run, 1, store)), moved)


@pytest.mark.slow
def test_stacked_and_continued_adapters_begin_equally_far_from_the_base(store: Path):
    found: list[float] = []
    for name, policy in (
        ("kl-stack", {"lora": OTHER_LORA, "init_mode": "stack"}),
        ("kl-continue", {"lora": SFT_LORA}),
    ):
        run = make_run(store, recipe(NFT, init_from="sft", **policy), name)
        iteration(run, store)
        found.append(losses(run)["kl"][0])
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    assert found[0] > 0


@pytest.mark.slow
def test_a_run_that_begins_with_a_stacked_run_takes_it_as_one_adapter(store: Path):
    values = recipe(NFT, lora=OTHER_LORA, init_from="sft", init_mode="stack")
    run = make_run(store, values, "stack-once")
    iteration(run, store)
    again = make_run(store, recipe(NFT, lora=OTHER_LORA, init_from="stack-once@1", init_mode="stack"), "stack-twice")
    make(requests.policy(again), store)
    require_close(stacked(again, 0), stacked(run, 1))
    assert {len(tensor) for name, tensor in part(again, 0, "init").items() if "to_q.lora_A" in name} == {6}


@pytest.mark.slow
def test_training_of_all_weights_continues_from_a_run_or_a_folder(store: Path):
    run = make_run(store, recipe(NFT, init_from="full", reference="init"), "full-nft")
    iteration(run, store)
    trained = part(make_run(store, recipe(SFT), "full"), 1)
    require_equal(part(run, 0), trained)
    require_equal(part(run, 1, "reference"), trained)
    kl = losses(run)["kl"].tolist()
    assert (kl[0], kl[1] > 0) == (0, True)

    target = exported(make_run(store, recipe(SFT), "full"), 1, store)
    values = recipe(NFT, init_from=str(target / "pipeline"))
    of_folder = make_run(store, values, "full-folder")
    make(requests.policy(of_folder), store)
    # Exports have the types of the base's files.
    stored = load_file(target / "pipeline/transformer/diffusion_pytorch_model.safetensors")
    require_equal(part(of_folder, 0), {name: stored[name].float() for name in trained})
    iteration(of_folder, store)
    assert losses(of_folder)["kl"][0] > 0


GRPO: dict[str, Any] = {"type": "grpo", "dataset": FEW_PROMPTS, "on_policy": False, "kl_beta": 0.1, "train_on": [0, 1]}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["continue", "stack"])
def test_rollouts_of_the_reference_equal_the_base(store: Path, mode: str):
    """Off-policy rollouts are made by the reference: with the base as reference, all adapters are off."""
    lora = SFT_LORA if mode == "continue" else OTHER_LORA
    plain, begun = (
        make_run(store, grpo(lora=OTHER_LORA if not policy else lora, **policy), f"grpo-{mode}-{len(policy)}")
        for policy in ({}, {"init_from": "sft", "init_mode": mode})
    )
    for run in (plain, begun):
        iteration(run, store, update=run is begun)
    latents = [Artifact(input_of(run.slots.iteration(0, "rollout"), "tensors")).manifest for run in (plain, begun)]
    assert latents[0].part_content("tensors") == latents[1].part_content("tensors")
    ratio = losses(begun)["ratio"][0]
    assert ratio != 1  # against the base, not against itself


def grpo(**policy: Any) -> dict[str, Any]:
    values = recipe(GRPO, **policy)
    values["policy"]["diffusers"] = values["policy"]["diffusers"] | {
        "sample": SAMPLE | {"solver": "flow_sde", "num_steps": 2}
    }
    return values


@pytest.mark.parametrize("stated", ["in the file", "by the recipe"])
def test_an_exported_folder_gives_the_same_policy_as_its_run(store: Path, stated: str, tmp_path: Path):
    source = make_run(store, recipe(SFT, lora=SFT_LORA), "sft")
    folder = exported(source, 1, store) / "lora"
    policy: dict[str, Any] = {"init_from": str(folder)}
    if stated == "by the recipe":
        # cosmos-rl's files: names without a prefix, nothing about alpha.
        tensors = {name.removeprefix("transformer."): t for name, t in load_file(folder / "model.safetensors").items()}
        (tmp_path / "lora").mkdir()
        save_file(tensors, tmp_path / "lora" / "model.safetensors")
        policy = {"init_from": str(tmp_path / "lora"), "init_alpha": 12}
    run = make_run(store, recipe(NFT, lora=SFT_LORA, **policy), f"folder-{stated.replace(' ', '-')}")
    make(requests.policy(run), store)
    require_equal(part(run, 0), part(source, 1))

    by_run = make_run(store, recipe(NFT, lora=OTHER_LORA, init_from="sft", init_mode="stack"), "by-run")
    by_folder = make_run(store, recipe(NFT, lora=OTHER_LORA, **policy, init_mode="stack"), f"by-{stated[:2]}")
    for each in (by_run, by_folder):
        make(requests.policy(each), store)
    assert torch.equal(stacked(by_folder, 0), stacked(by_run, 0))


@pytest.mark.slow
@pytest.mark.processes
def test_ranks_that_share_weights_stack_like_one(store: Path, wan_path: str, prompt_dir: str, tmp_path: Path):
    first = make_run(tmp_path, small_video.recipe(wan_path, prompt_dir, small_video.LORA), "first")
    small_video.one_iteration(first, tmp_path, 1)
    values = small_video.recipe(wan_path, prompt_dir, {"r": 2, "target_modules": ["to_q", "to_k"]})
    values["policy"] |= {"init_from": "first", "init_mode": "stack"}
    run = make_run(tmp_path, values, "second")
    iteration(run, tmp_path, update=False)
    update = requests.update(run, 0)
    shared = update.model_copy(update={"slot": f"{update.slot}-shared"})
    manifests: list[Manifest] = [make(update, tmp_path), make_on_ranks(shared, tmp_path, 2, dp_shard_size=2)]
    alone, both = (read_part(input_of(m.slot, "current"), "current") for m in manifests)
    assert max(float((alone[name] - both[name]).abs().max()) for name in alone) < 2e-4
