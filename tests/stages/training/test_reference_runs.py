"""Runs whose prompts refer to pictures, of unequal sizes: from the prompt file to what evaluations show."""

import base64
import io
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image

from cosmos_rl_core import seeds
from cosmos_rl_core.canonical import sha256
from cosmos_rl_core.config.train import RewardConfig
from cosmos_rl_core.conformance.kinds.hf_folder import media, save
from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.errors import DatasetError
from cosmos_rl_core.models._base import Model, guided_velocity
from cosmos_rl_core.models._conditioning import Conditioning, stack
from cosmos_rl_core.rewards import pixel_similarity, remote
from cosmos_rl_core.rewards._base import Sample
from cosmos_rl_core.sampling.rollout import sample
from cosmos_rl_core.sampling.solvers import kernel_of
from flows.library.opened_run import OpenedRun
from flows.planning import requests
from flows.planning.run import Run
from flows.reporting.report import page_now
from flows.sizes import costs
from stages.artifacts.artifact import Artifact
from stages.artifacts.slots import input_of
from stages.contracts import TENSORS, Rollout
from stages.formats.embeddings import Embeddings
from stages.formats.policies import read_part
from stages.formats.samples import read_samples
from stages.formats.tables import read_table
from stages.training.loading import load_model
from tests import running_service
from tests.hand_made import rewards
from tests.stages.conftest import make, make_on_ranks, make_run
from tests.stages.training.test_sharded_training import aside, require_close

CPU = torch.device("cpu")
SIZE, LENGTH, SCALE, GENERATED = (32, 64), 40, 2.0, 3
PICTURES = [(64, 64), (64, 96), (64, 64), (64, 96)]
"""Heights and widths, one a prompt: forward passes of one shape have few samples."""
TEXTS = ["make it red", "make it red", "add a hat", "turn it"]


def values(folder: Path) -> dict[str, Any]:
    """NFT on klein with LoRA: three samples of each of four prompts in two optimizer steps."""
    rows: list[dict[str, Any]] = []
    for number, (size, text) in enumerate(zip(PICTURES, TEXTS, strict=True)):
        pixels = np.random.default_rng(number).integers(0, 256, (*size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        rows.append({"prompt": text, "references": [f"{number}.png"]})
    for name, some in {"train": rows, "held": rows[1:2]}.items():
        held = [row | {"prompt": f"{row['prompt']} now"} for row in some] if name == "held" else some
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, held)), encoding="utf-8")
    diffusers = {
        "inference_size": [*SIZE],
        "max_prompt_length": LENGTH,
        "sample": {"num_steps": 3, "eval_num_steps": 3, "guidance_scale": SCALE},
    }
    return {
        "policy": {
            "model_name_or_path": str(tiny_pipelines.save("flux2_klein", folder / "klein")),
            "lora": {"r": 2, "lora_alpha": 4.0, "target_modules": ["to_q", "to_v"]},
            "diffusers": diffusers,
        },
        "train": {
            "num_iterations": 1,
            "train_batch_per_replica": 12,
            "optm_lr": 1e-3,
            "train_policy": {
                "type": "nft",
                "mini_batch": 4,
                "batch_size_per_optimize": 6,
                "timesteps_fraction": 0.67,
                "dataset": {"name": "prompts", "path": str(folder / "train.jsonl")},
            },
        },
        "rollout": {"n_generation": GENERATED, "n_generation_mini_batch": 4, "samples_per_shard": 4},
        "validation": {"dataset": {"name": "prompts", "path": str(folder / "held.jsonl")}, "n_generation": 2},
        "rewards": [{"fn": {"name": "pixel_similarity"}}],
    }


def rewarded(folder: Path) -> Run:
    """A run until its first rewards."""
    (inputs := folder / "inputs").mkdir()
    run = make_run(folder, values(inputs))
    make(requests.policy(run), folder)
    for request in run.prepared.steps().values():
        make(request, folder)
    make(requests.rollout(run, 0), folder)
    for request in rewards(run, run.slots.iteration(0, "rollout"), 0):
        make(request, folder)
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run until its update."""
    folder = tmp_path_factory.mktemp("references")
    run = rewarded(folder)
    make(requests.update(run, 0), folder)
    return run


def test_a_prompt_is_embedded_in_as_many_bytes_as_planned(run: Run):
    ids = [prompt.id for prompt in run.plan.prompts]
    stored = Embeddings([input_of(run.prepared.embed.slot)], ids)
    written = [sum(tensor.nbytes for tensor in stored[one].values()) for one in ids]
    assert written == [costs.embedding_bytes(run.recipe, [size]) for size in PICTURES]
    assert len({*written}) == 2
    assert run.plan.basis.pictures == ((64, 96),)


def pixels_of(number: int, run: Run) -> np.ndarray:
    folder = Path(run.recipe.train.train_policy.dataset.model_dump()["path"]).parent
    return np.asarray(Image.open(folder / f"{number}.png"))[None]


def test_equal_texts_with_other_pictures_are_other_prompts_and_pictures_are_kept_once(run: Run):
    ids = [prompt.id for prompt in run.plan.prompts]
    assert len({*ids}) == 4
    kept = Path(run.store_url, "dataset", "references")
    assert len([*kept.iterdir()]) == 4
    assert [*run.prepared.steps()] == ["references", "embed"]
    # A prompt of evaluations has the picture of one that is trained on.
    assert run.plan.validation_prompts[0].references == run.plan.prompts[1].references


def velocity(
    model: Model, own: Conditioning, negative: Conditioning, x_t: torch.Tensor, t: torch.Tensor
) -> torch.Tensor:
    return guided_velocity(model, x_t, t, own, negative, SCALE)


def test_samples_equal_samples_of_their_own_pictures_computed_alone(run: Run):
    request = requests.rollout(run, 0)
    config = request.settings(Rollout)
    model = load_model(config.model, ("text", "vae", "transformer"), CPU)
    negative = stack([model.encode_negative(model.negative_prompt, LENGTH)], CPU)
    kernel = kernel_of(config.sample, lambda: model.schedule(3, SIZE, 1))
    number_of = {prompt.id: number for number, prompt in enumerate(run.plan.prompts)}
    rows = [*read_samples(Artifact(input_of(request.slot)), TENSORS)]
    assert len(rows) == 12
    worst = 0.0
    for stored in rows:
        number = number_of[stored.row["prompt_id"]]
        assert stored.row["references"] == [run.plan.prompts[number].references[0].digest]
        own = model.encode_with(TEXTS[number], [pixels_of(number, run)], LENGTH, SIZE, 1)
        drawn = seeds.normal(model.latent_shape(SIZE, 1), stored.row["noise_seed"], "initial noise", 0)
        asked = model, stack([own], CPU), negative
        noise = torch.from_numpy(drawn)[None]
        with torch.no_grad():
            expected = sample(partial(velocity, *asked), noise, kernel).latents[0]
        found = torch.as_tensor(stored.final_latents)
        worst = max(worst, float((found - expected).abs().max()))
    assert worst < 1e-4


def test_rewards_get_the_references_of_each_samples_prompt(run: Run):
    names = "rollout", "reward-pixel_similarity"
    rollout, scores = (Artifact(input_of(run.slots.iteration(0, name))) for name in names)
    rows = read_table(scores, "scores.parquet")
    score_of = dict(zip(rows["sample_id"], rows["score"], strict=True))
    number_of = {prompt.id: number for number, prompt in enumerate(run.plan.prompts)}
    reward = pixel_similarity.Reward(pixel_similarity.Options())
    for stored in read_samples(rollout):
        shown = (pixels_of(number_of[stored.row["prompt_id"]], run),)
        (expected,) = reward.score([Sample("s", "p", "", stored.pixels, references=shown)])
        assert isinstance(expected, dict)
        assert score_of[stored.sample_id] == pytest.approx(expected["pixel_similarity"])
    assert len({*score_of.values()}) > 1


def test_the_report_shows_each_sample_after_its_picture(run: Run, tmp_path: Path):
    make(requests.fragment(run, 0), tmp_path)
    opened = OpenedRun(run)
    page, table = page_now(opened).decode(), opened.samples(0)
    number_of = {prompt.id: number for number, prompt in enumerate(run.plan.prompts)}
    digests = [prompt.references[0].digest for prompt in run.plan.prompts]
    assert [*table["references"]] == [[digests[number_of[one]]] for one in table["prompt_id"]]
    found = re.findall(
        r'base64,([^"]*)"[^>]*alt="reference 1">(?:(?!<img).)*<a class="shot"[^>]* seed (\d+) ', page, re.S
    )
    assert len(found) > 4
    prompt_of = dict(zip(table["seed"].astype(str), table["prompt_id"], strict=True))
    for thumb, seed in found:
        pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(thumb))))
        assert np.array_equal(pixels, pixels_of(number_of[prompt_of[seed]], run)[0])


def test_a_reward_service_gets_references_and_gives_the_same_scores(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = running_service.write(tmp_path, running_service.settings(tmp_path, {"reward_type": "pixel_similarity"}))
    served = remote.Options(reward_fn="pixel_similarity", references="needed")
    rollout = run.slots.iteration(0, "rollout")
    with running_service.in_thread(path) as client:
        running_service.name_to_clients(client, monkeypatch)
        made = make(requests.reward(run, RewardConfig(fn=served), rollout, 0), tmp_path)
    own = Artifact(input_of(run.slots.iteration(0, "reward-pixel_similarity")))
    tables = [read_table(one, "scores.parquet") for one in (own, Artifact(input_of(made.slot)))]
    columns = [[*zip(table["sample_id"], table["score"], strict=True)] for table in tables]
    assert columns[0] == columns[1]
    assert len(columns[0]) == 12


def test_two_ranks_make_the_same_samples_and_take_the_same_steps(run: Run, tmp_path: Path):
    rollout = aside(requests.rollout(run, 0), "two")
    make_on_ranks(rollout, tmp_path, 2)
    samples = [[(s.sample_id, s.media, s.tensors) for s in read_samples(Artifact(input_of(slot)))] for slot in (
        rollout.slot, run.slots.iteration(0, "rollout"))]  # fmt: skip
    assert samples[0] == samples[1]
    update = aside(requests.update(run, 0), "two")
    make_on_ranks(update, tmp_path, 2)
    require_close(requests.update(run, 0), update, dict.fromkeys(("current", "old"), 1e-5))
    before, after = (read_part(input_of(slot), "current") for slot in (run.slots.policy(0), update.slot))
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_evaluations_run_the_stock_pipeline_with_the_pictures(run: Run, tmp_path: Path):
    make(requests.export(run, 1), tmp_path)
    make(requests.evaluate(run, 1), tmp_path)
    one, another = read_samples(Artifact(input_of(run.slots.version(1, "evaluate"))))
    assert one.row["references"] == [run.plan.prompts[1].references[0].digest]
    assert not np.array_equal(one.pixels, another.pixels)
    for request in rewards(run, run.slots.version(1, "evaluate"), 1):
        assert make(request, tmp_path).summary["scored"] == 2


def test_rows_of_a_dataset_give_the_prompts_and_the_bytes_of_a_file(tmp_path: Path):
    (inputs := tmp_path / "inputs").mkdir()
    recipe = values(inputs)
    pictures = [(inputs / f"{number}.png").read_bytes() for number in range(len(TEXTS))]
    save(inputs / "rows", {"text": pa.array(TEXTS), "references": media(pictures)}, {}, files=2)
    runs = [make_run(tmp_path / "file", recipe)]
    recipe["train"]["train_policy"]["dataset"] = {"name": "hf", "local_dir": str(inputs / "rows")}
    runs.append(make_run(tmp_path / "rows", recipe))
    pools: list[dict[str, bytes]] = []
    for run, folder in zip(runs, ("file", "rows"), strict=True):
        assert run.prepared.references is not None
        make(run.prepared.references, tmp_path / folder)
        kept = Path(run.store_url, "dataset", "references").iterdir()
        pools.append({path.name: path.read_bytes() for path in kept})
    assert pools[0] == pools[1] == {sha256(data): data for data in pictures}
    file, rows = (run.prepared.references for run in runs)
    assert file is not None
    assert rows is not None
    assert file.fingerprint == rows.fingerprint
    assert [one.id for one in runs[0].plan.prompts] == [one.id for one in runs[1].plan.prompts]
    # Rows that were saved again since.
    other = make_run(tmp_path / "other", recipe)
    save(inputs / "rows", {"text": pa.array(TEXTS), "references": media(pictures[::-1])}, {}, files=2)
    assert other.prepared.references is not None
    with pytest.raises(DatasetError, match=r"\.arrow, bytes \d+ to \d+ has changed since the run was planned"):
        make(other.prepared.references, tmp_path / "other")


@pytest.mark.parametrize(
    ("name", "options", "diffusers"),
    [
        ("wan", {"expand_timesteps": True}, {"inference_size": [64, 32], "train_frames": 9}),
        ("wan_i2v", {}, {"inference_size": [32, 48], "train_frames": 5, "max_prompt_length": 512}),
        ("qwen_image_edit", {}, {"inference_size": [64, 32], "max_prompt_length": 400}),
        ("cosmos_predict2_5", {}, {"inference_size": [32, 48], "train_frames": 5, "guardrail": "off"}),
    ],
    ids=["wan", "wan_i2v", "qwen_image_edit", "cosmos_predict2_5"],
)
def test_other_families_run_from_the_prompt_file_to_an_evaluation(
    name: str, options: dict[str, Any], diffusers: dict[str, Any], tmp_path: Path
):
    """By FlowGRPO, whose recorded steps are replayed: in its first optimizer step no ratio differs from 1."""
    (inputs := tmp_path / "inputs").mkdir()
    recipe = values(inputs)
    recipe["policy"]["model_name_or_path"] = str(tiny_pipelines.save(name, tmp_path / "pipeline", **options))
    recipe["policy"]["diffusers"] |= diffusers
    # Cosmos has no guidance of 2: its stock pipeline counts from 1 on.
    recipe["policy"]["diffusers"]["sample"] |= {"solver": "flow_sde", "guidance_scale": 3.0}
    dataset = recipe["train"]["train_policy"]["dataset"]
    recipe["train"]["train_policy"] = {
        "type": "grpo", "mini_batch": 4, "batch_size_per_optimize": 12, "train_on": [0, 1], "dataset": dataset,
    }  # fmt: skip
    run = make_run(tmp_path, recipe)
    make(requests.policy(run), tmp_path)
    for request in run.prepared.steps().values():
        make(request, tmp_path)
    make(requests.rollout(run, 0), tmp_path)
    for request in rewards(run, run.slots.iteration(0, "rollout"), 0):
        assert make(request, tmp_path).summary["scored"] == 12
    update = make(requests.update(run, 0), tmp_path).summary
    approx_kl, grad_norm = (float(str(update[name])) for name in ("approx_kl", "grad_norm"))
    assert abs(approx_kl) < 1e-8
    assert grad_norm > 1e-4
    make(requests.export(run, 1), tmp_path)
    make(requests.evaluate(run, 1), tmp_path)
    one, another = read_samples(Artifact(input_of(run.slots.version(1, "evaluate"))))
    assert not np.array_equal(one.pixels, another.pixels)
