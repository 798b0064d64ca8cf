"""Media with references: pictures that edits begin with, of unequal sizes, whose results are trained on."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from cosmos_rl_core import plugins, seeds
from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.errors import ConfigError, DatasetError
from cosmos_rl_core.models._base import Model
from cosmos_rl_core.models._conditioning import Conditioning, generated, stack
from cosmos_rl_core.storage.media import encode
from cosmos_rl_core.training.noise_levels import FINE_GRID, DrawKey, sft_time, training_noise
from flows.checking.references import unread
from flows.planning import requests
from flows.planning.datasets import data_of
from flows.planning.run import Run
from flows.sizes import costs
from stages.artifacts.artifact import Artifact
from stages.artifacts.slots import input_of
from stages.formats.embeddings import EMPTY, NEGATIVE, Embeddings, with_references
from stages.formats.policies import read_part
from stages.formats.references import Pictures
from stages.formats.tables import read_table
from stages.training.loading import load_model
from tests.hand_made import rewards
from tests.stages.conftest import make, make_on_ranks, make_run
from tests.stages.training.test_sharded_training import aside, require_close
from tests.stages.training.test_transitions import tensors_of

CPU, SEED = torch.device("cpu"), 7
SOURCES = [(64, 64), (64, 96), (64, 96), (64, 64)]
"""Heights and widths of the references, one an item."""
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "flux2_klein": ({}, {"inference_size": [32, 64], "max_prompt_length": 40}),
    "wan": ({"expand_timesteps": True}, {"inference_size": [32, 32], "train_frames": 5, "max_prompt_length": 40}),
    "wan_i2v": ({}, {"inference_size": [32, 32], "train_frames": 5, "max_prompt_length": 512}),
    "qwen_image_edit": ({}, {"inference_size": [32, 32], "max_prompt_length": 400}),
    "cosmos_predict2_5": (
        {},
        {"inference_size": [32, 32], "train_frames": 5, "max_prompt_length": 40, "guardrail": "off"},
    ),
}
"""Options of the tiny pipeline, and settings of the recipe."""


def media(folder: Path, diffusers: dict[str, Any], sources: list[tuple[int, int]] = SOURCES) -> dict[str, Any]:
    """Items in ``images`` or ``videos``, with captions in ``metas`` and references in ``sources``."""
    frames, size = diffusers.get("train_frames", 1), diffusers["inference_size"]
    for name in ("sources", kind := "images" if frames == 1 else "videos", "metas"):
        (folder / name).mkdir(parents=True)
    for number, source in enumerate(sources):
        draw = np.random.default_rng(number)
        Image.fromarray(draw.integers(0, 256, (*source, 3), np.uint8)).save(folder / "sources" / f"{number}.png")
        clip = draw.integers(0, 256, (frames, *size, 3), np.uint8)
        extension, data = encode(clip)
        (folder / kind / f"{number}.{extension}").write_bytes(data)
        about = {"prompt": f"edit {number}", "references": [f"sources/{number}.png"]}
        (folder / "metas" / f"{number}.json").write_text(json.dumps(about), encoding="utf-8")
    return {"name": "local", "local_dir": str(folder), "size": size, "frames": frames}


def supervised(name: str, folder: Path) -> dict[str, Any]:
    """One optimizer step on two passes over four items, and the loss of two held-out ones."""
    options, diffusers = FAMILIES[name]
    held_out = media(folder / "held", diffusers, SOURCES[1:3])
    for file in (folder / "held" / "metas").iterdir():
        file.write_text(file.read_text().replace("edit", "keep"), encoding="utf-8")
    return {
        "policy": {
            "model_name_or_path": str(tiny_pipelines.save(name, folder / "pipeline", **options)),
            "lora": {"r": 2, "lora_alpha": 4.0, "target_modules": ["to_q", "to_v"]},
            "diffusers": diffusers,
        },
        "train": {
            "seed": SEED,
            "num_iterations": 1,
            "train_batch_per_replica": 8,
            "optm_lr": 1e-3,
            "train_policy": {
                "type": "sft",
                "dataset": media(folder / "media", diffusers),
                "mini_batch": 3,
                "steps_per_iteration": 1,
                "text_dropout": 0.5,
            },
        },
        "validation": {"data": held_out, "batch_size": 2},
    }


def on_first_frames(name: str, folder: Path) -> dict[str, Any]:
    """Training on clips whose captions name no reference: their first frames are."""
    values = supervised(name, folder)
    for part in ("media", "held"):
        for file in (folder / part / "metas").iterdir():
            file.write_text(json.dumps({"prompt": f"a clip of {part}"}), encoding="utf-8")
    for dataset in (values["train"]["train_policy"]["dataset"], values["validation"]["data"]):
        dataset["first_frame"] = True
    return values


def prepared(folder: Path, values: dict[str, Any]) -> Run:
    run = make_run(folder, values)
    make(requests.policy(run), folder)
    for request in run.prepared.steps().values():
        make(request, folder)
    return run


class ByHand:
    """Conditioning and losses of items, from the files of their folder."""

    def __init__(self, run: Run, dataset: Any) -> None:
        self.run, self.folder = run, Path(dataset.local_dir)
        self.media: Any = plugins.load("datasets", "local").Media(dataset)
        self.model: Model = load_model(run.plan.model, ("text", "vae", "transformer"), CPU)
        self.length = run.recipe.policy.diffusers.max_prompt_length

    def latents(self, index: int) -> Tensor:
        return self.model.encode_media(torch.from_numpy(self.media.item(index)[0])[None])[0]

    def conditioning(self, index: int, *, text: bool = True) -> Conditioning:
        (source,) = json.loads((self.folder / "metas" / f"{index}.json").read_text())["references"]
        pictures = [np.asarray(Image.open(self.folder / source))[None]]
        shape = self.run.plan.media
        own = self.model.encode_with(self.media.prompt_of(index).text, pictures, self.length, shape.size, shape.frames)
        if text:
            return own
        read_with_text = self.run.plan.model.adapter == "qwen_image_edit"
        empty = self.model.encode_negative_with("", pictures, self.length) if read_with_text else (
            self.model.encode_negative("", self.length))  # fmt: skip
        return own.guided_by(empty)

    def error(self, x_0: Tensor, noise: Tensor, t: float, conditioning: Conditioning) -> float:
        """The mean squared error of the velocity, over frames that are not given."""
        batch = stack([conditioning], CPU)
        with torch.no_grad():
            velocity = self.model.velocity(((1 - t) * x_0 + t * noise)[None], torch.tensor([t]), batch)[0]
        errors = (velocity - (noise - x_0)).square()
        mask = generated(batch)
        return float(errors.mean() if mask is None else errors[(mask[0] == 1).expand_as(errors)].mean())


@pytest.mark.parametrize("name", FAMILIES)
def test_supervised_training_conditions_each_result_on_its_own_reference(name: str, tmp_path: Path):
    (inputs := tmp_path / "inputs").mkdir()
    run = prepared(tmp_path, supervised(name, inputs))
    assert [*run.prepared.steps()] == ["references", "embed", "encode", "embed-held-out", "encode-held-out"]
    make(requests.finetune(run, 0), tmp_path)
    by_hand = ByHand(run, run.recipe.train.train_policy.dataset)
    media_shape, density = run.plan.media, run.recipe.policy.diffusers.density
    sigmas = by_hand.model.schedule(FINE_GRID, media_shape.size, media_shape.frames).sigmas
    losses: list[float] = []
    dropped: list[bool] = []
    for epoch in (0, 1):
        for index, item in enumerate(by_hand.media.item_ids):
            x_0, key = by_hand.latents(index), DrawKey(SEED, 0, epoch, item)
            noise, t = training_noise(tuple(x_0.shape), key, 0), sft_time(sigmas, density, key)
            dropped.append(seeds.generator("text dropout", *key).random() < 0.5)
            losses.append(by_hand.error(x_0, noise, t, by_hand.conditioning(index, text=not dropped[-1])))
    assert 0 < sum(dropped) < len(dropped)
    metrics = read_table(Artifact(input_of(run.slots.policy(1))), "metrics.parquet").iloc[0]
    assert metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    before, after = (read_part(input_of(slot), "current") for slot in (run.slots.policy(0), run.slots.policy(1)))
    assert max(float((after[name] - before[name]).abs().max()) for name in before) > 1e-4


@pytest.mark.parametrize("name", ["flux2_klein", "wan"])
def test_held_out_losses_condition_each_item_on_its_own_reference(name: str, tmp_path: Path):
    (inputs := tmp_path / "inputs").mkdir()
    run = prepared(tmp_path, supervised(name, inputs))
    request = requests.validate(run, 0)
    make(request, tmp_path)
    assert run.recipe.validation is not None
    by_hand = ByHand(run, run.recipe.validation.data)
    found = read_table(Artifact(input_of(request.slot)), "losses.parquet")
    assert len(found) == 2 * len({*found["t"]})
    for item_id, group in found.groupby("item_id"):
        item = str(item_id)
        index = by_hand.media.item_ids.index(item)
        x_0, own = by_hand.latents(index), by_hand.conditioning(index)
        for level, row in enumerate(group.sort_values("t").to_dict("records")):
            noise = torch.from_numpy(seeds.normal(tuple(x_0.shape), "validation noise", request.seed, item, level))
            assert row["loss"] == pytest.approx(by_hand.error(x_0, noise, row["t"], own), rel=1e-4)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("trains", ["lora", "full"])
@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_that_share_the_weights_take_the_step_of_one(name: str, trains: str, tmp_path: Path):
    (inputs := tmp_path / "inputs").mkdir()
    values = supervised(name, inputs)
    if trains == "full":
        del values["policy"]["lora"]
    run = prepared(tmp_path, values)
    finetune = requests.finetune(run, 0)
    make(finetune, tmp_path)
    shared = aside(finetune, "shared")
    make_on_ranks(shared, tmp_path, 2, dp_shard_size=2)
    require_close(finetune, shared, {"current": 1e-5})


def test_references_that_cannot_be_used_are_named_with_their_items(tmp_path: Path):
    (inputs := tmp_path / "inputs").mkdir()
    values = supervised("flux2_klein", inputs)
    folder = inputs / "media"
    (folder / "sources" / "0.png").unlink()
    (folder / "sources" / "1.png").write_bytes(b"no picture")
    (folder / "metas" / "2.json").write_text('{"prompt": "x", "references": "sources/2.png"}', encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        make_run(tmp_path, values)
    said = str(error.value)
    assert f"0.json: no file at {folder / 'sources' / '0.png'}" in said
    assert "1.json: " in said
    assert "no picture and no clip that can be decoded" in said
    assert "2.json: expected \"references\" to be a list of paths of pictures or clips, found 'sources/2.png'" in said


def test_a_family_that_needs_references_refuses_media_without(tmp_path: Path):
    (inputs := tmp_path / "inputs").mkdir()
    values = supervised("wan_i2v", inputs)
    for file in (inputs / "media" / "metas").iterdir():
        file.write_text('{"prompt": "x"}', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"takes 1 to 1 references; 1 prompt have another number"):
        make_run(tmp_path, values)


def next_to_rewards(folder: Path, sources: list[tuple[int, int]]) -> dict[str, Any]:
    """DDRL in one optimizer step, whose prompts have the texts and references of the media."""
    values = supervised("flux2_klein", folder)
    diffusers = values["policy"]["diffusers"] | {"sample": {"num_steps": 3, "solver": "flow_sde"}}
    data = media(folder / "data", diffusers, sources)
    rows = [json.loads((folder / "data" / "metas" / f"{number}.json").read_text()) for number in range(len(sources))]
    (folder / "data" / "edits.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    del values["validation"]
    values["policy"]["diffusers"] = diffusers
    values["train"]["train_policy"] = {
        "type": "ddrl", "data_beta": 0.5, "text_dropout": 0.0, "mini_batch": 3, "train_on": [0, 1], "data": data,
        "dataset": {"name": "prompts", "path": str(folder / "data" / "edits.jsonl")},
    }  # fmt: skip
    reward = {"fn": {"name": "pixel_similarity"}}
    return values | {"rollout": {"n_generation": 2, "n_generation_mini_batch": 2}, "rewards": [reward]}


def test_a_loss_on_media_next_to_rewards_takes_the_reference_of_each_medium(tmp_path: Path):
    (inputs := tmp_path / "inputs").mkdir()
    run = prepared(tmp_path, next_to_rewards(inputs, [(64, 96)] * 4))
    make(requests.rollout(run, 0), tmp_path)
    for request in rewards(run, run.slots.iteration(0, "rollout"), 0):
        make(request, tmp_path)
    make(requests.update(run, 0), tmp_path)
    by_hand = ByHand(run, data_of(run.recipe))
    index_of = {by_hand.media.prompt_of(index).id: index for index in range(len(by_hand.media))}
    assert {*index_of} == {prompt.id for prompt in run.plan.prompts}
    losses: list[float] = []
    for about, tensors in tensors_of(run).values():
        index = index_of[about["prompt_id"]]
        x_0, own = by_hand.latents(index), by_hand.conditioning(index)
        noise = torch.from_numpy(seeds.normal(tuple(x_0.shape), about["seed"], "initial noise", 0))
        for step in tensors["steps"].tolist():
            t = min(about["sigmas"][step], 1 - 1e-9)
            # EDM's weight of the error of x_0, which is t times the error of the velocity.
            losses.append(((1 - t) ** 2 + t**2) * by_hand.error(x_0, noise, t, own))
    metrics = read_table(Artifact(input_of(run.slots.policy(1))), "metrics.parquet").iloc[0]
    assert metrics["data_loss"] == pytest.approx(np.mean(losses), rel=1e-4)


def test_a_loss_on_media_takes_references_of_one_shape(tmp_path: Path):
    (inputs := tmp_path / "inputs").mkdir()
    with pytest.raises(ConfigError, match=r"references of media in \[train.train_policy.data\] have 2 shapes"):
        make_run(tmp_path, next_to_rewards(inputs, SOURCES))


@pytest.mark.parametrize("name", ["wan", "wan_i2v", "cosmos_predict2_5"])
def test_the_first_frame_of_each_clip_can_be_its_reference(name: str, tmp_path: Path):
    (inputs := tmp_path / "inputs").mkdir()
    values = on_first_frames(name, inputs)
    run = prepared(tmp_path, values)
    assert len({*(prompt.id for prompt in run.plan.prompts)}) == len(SOURCES)
    by_hand = ByHand(run, run.recipe.train.train_policy.dataset)
    embedded = Embeddings([input_of(run.prepared.embed.slot)], [prompt.id for prompt in run.plan.prompts])
    pictures = Pictures(run.prepared.encode.slot)
    for index in range(len(by_hand.media)):
        prompt, (pixels, _) = by_hand.media.prompt_of(index), by_hand.media.item(index)
        (picture,) = pictures.of([prompt.references[0].digest])
        assert np.array_equal(picture, pixels[:1])
        own = embedded[prompt.id]
        if name != "wan_i2v":
            # The VAE is causal: the first latent frame of the clip.
            given = own["conditional_latents"][:, :1]
            assert (given - by_hand.latents(index)[:, :1]).abs().max() < 1e-5
    make(requests.finetune(run, 0), tmp_path)
    (second := tmp_path / "second").mkdir()
    other = make_run(second, values)
    medium = inputs / "media" / "videos" / "0.mkv"
    medium.write_bytes((inputs / "media" / "videos" / "1.mkv").read_bytes())
    assert other.prepared.references is not None
    with pytest.raises(DatasetError, match=r"0\.mkv, frame 0 has changed since the run was planned"):
        make(other.prepared.references, second)


def test_only_exchanged_references_change_the_fingerprint_of_latents(tmp_path: Path):
    """Encoded latents say which prompt each is of. Texts are equal here: only bytes tell the prompts apart."""
    (inputs := tmp_path / "inputs").mkdir()
    values = supervised("flux2_klein", inputs)
    for number, file in enumerate(sorted((inputs / "media" / "metas").iterdir())):
        file.write_text(json.dumps({"prompt": "edit", "references": [f"sources/{number}.png"]}), encoding="utf-8")
    first = prepared(tmp_path, values)
    sources = inputs / "media" / "sources"
    (sources / "0.png").rename(sources / "x.png")
    (sources / "1.png").rename(sources / "0.png")
    (sources / "x.png").rename(sources / "1.png")
    second = make_run(tmp_path, values, "second")
    slots = [[one.prepared.encode.slot, one.prepared.held_out.encodes[0].slot] for one in (first, second)]
    assert slots[0][0] != slots[1][0]
    assert slots[0][1] == slots[1][1]
    make(second.prepared.encode, tmp_path)
    tables = [read_table(Artifact(input_of(one.prepared.encode.slot)), "index.parquet") for one in (first, second)]
    ids = [dict(zip(table["item_id"], table["prompt_id"], strict=True)) for table in tables]
    assert (ids[0]["0"], ids[0]["1"]) == (ids[1]["1"], ids[1]["0"])
    assert [*unread(second.recipe, second.plan.prompts)] == []


def test_each_prompt_read_with_its_reference_has_a_negative_and_an_empty_one_of_its_own(tmp_path: Path):
    (inputs := tmp_path / "inputs").mkdir()
    run = prepared(tmp_path, supervised("qwen_image_edit", inputs))
    ids = [prompt.id for prompt in run.plan.prompts]
    names = [*ids, *(with_references(one, prompt) for prompt in ids for one in (NEGATIVE, EMPTY))]
    stored = Embeddings([input_of(run.prepared.embed.slot)], names)
    # The negative prompt is the empty one, read with each of four pictures.
    assert len({stored[one]["prompt_embeds"].numpy().tobytes() for one in names}) == 2 * len(ids)
    texts, references = costs.text_bytes(run.recipe), costs.reference_bytes(run.recipe, [SOURCES[0]])
    assert costs.embedding_bytes(run.recipe, [SOURCES[0]]) == 3 * texts + references


def test_frames_of_media_and_references_are_not_given_together(tmp_path: Path):
    (inputs := tmp_path / "inputs").mkdir()
    values = supervised("cosmos_predict2_5", inputs)
    values["train"]["train_policy"]["max_num_conditional_frames"] = 1
    with pytest.raises(ConfigError, match="gives frames of media, and there are references too; use only one"):
        make_run(tmp_path, values)
