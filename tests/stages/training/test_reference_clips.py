"""Clips that prompts refer to: training and evaluations that continue them, next to pictures."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from cosmos_rl_core import seeds
from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.rewards import pixel_similarity
from cosmos_rl_core.rewards._base import Sample
from cosmos_rl_core.storage.media import encode
from cosmos_rl_core.training.noise_levels import FINE_GRID, DrawKey, sft_time, training_noise
from flows.planning import requests
from flows.planning.run import Run
from stages.artifacts.artifact import Artifact
from stages.artifacts.slots import input_of
from stages.formats.embeddings import Embeddings
from stages.formats.samples import read_samples
from stages.formats.tables import read_table
from stages.training.loading import load_stock
from tests.hand_made import rewards
from tests.stages.conftest import make, make_run
from tests.stages.training.test_reference_media import CPU, FAMILIES, SEED, ByHand, media, prepared, supervised

FRAMES, STEPS, SCALE, LENGTH = 13, 3, 3.0, 40
COSMOS = FAMILIES["cosmos_predict2_5"][1] | {"train_frames": FRAMES}


def noise(seed: int, frames: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (frames, 48, 64, 3), dtype=np.uint8)


def clip_of(folder: Path, name: str, seed: int, frames: int = 8) -> str:
    extension, data = encode(noise(seed, frames))
    (folder / f"{name}.{extension}").write_bytes(data)
    return f"{name}.{extension}"


def continued(folder: Path) -> dict[str, Any]:
    """Supervised training on four clips: two continue other clips, two a picture."""
    values = supervised("cosmos_predict2_5", folder)
    values["policy"]["diffusers"] = COSMOS | {"sample": {"eval_num_steps": STEPS, "guidance_scale": SCALE}}
    values["train"]["train_policy"]["dataset"] = media(folder / "longer", COSMOS)
    for number in (0, 2):
        shown = clip_of(folder / "longer" / "sources", str(number), 10 + number)
        about = {"prompt": f"edit {number}", "references": [f"sources/{shown}"]}
        (folder / "longer" / "metas" / f"{number}.json").write_text(json.dumps(about), encoding="utf-8")
    rows = [{"prompt": "go on", "references": [clip_of(folder, "a", 3)]}, {"prompt": "turn", "references": ["b.png"]}]
    Image.fromarray(noise(4, 1)[0]).save(folder / "b.png")
    (folder / "held.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    dataset = {"name": "prompts", "path": str(folder / "held.jsonl")}
    values["validation"] = {"dataset": dataset, "n_generation": 2, "batch_size": 2}
    return values | {"rewards": [{"role": "monitor", "fn": {"name": "jpeg"}}]}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Such a run with its evaluation of the base, whose scores are by how near samples are to what they continue."""
    folder = tmp_path_factory.mktemp("clips")
    (inputs := folder / "inputs").mkdir()
    reward = {"role": "monitor", "fn": {"name": "pixel_similarity", "frames": "first"}}
    run = prepared(folder, continued(inputs) | {"rewards": [reward]})
    make(requests.export(run, 0), folder)
    make(requests.evaluate(run, 0), folder)
    return run


class ClipsByHand(ByHand):
    """With the last five frames of a clip as reference."""

    def conditioning(self, index: int, *, text: bool = True) -> Any:
        (source,) = json.loads((self.folder / "metas" / f"{index}.json").read_text())["references"]
        if source.endswith(".png"):
            return super().conditioning(index, text=text)
        shape = self.run.plan.media
        shown = [noise(10 + index, 8)[-5:]]
        own = self.model.encode_with(self.media.prompt_of(index).text, shown, LENGTH, shape.size, shape.frames)
        return own if text else own.guided_by(self.model.encode_negative("", self.length))


def test_supervised_clips_are_trained_on_after_the_frames_they_continue(run: Run, tmp_path: Path):
    """In one micro-batch: two given latent frames of the clips, one of the pictures."""
    make(requests.finetune(run, 0), tmp_path)
    by_hand = ClipsByHand(run, run.recipe.train.train_policy.dataset)
    ids = [by_hand.media.prompt_of(index).id for index in range(4)]
    stored = Embeddings([input_of(run.prepared.embed.slot)], ids)
    assert [int(stored[one]["conditional_mask"].sum()) for one in ids] == [2, 1, 2, 1]
    sigmas = by_hand.model.schedule(FINE_GRID, run.plan.media.size, FRAMES).sigmas
    losses: list[float] = []
    for epoch in (0, 1):
        for index, item in enumerate(by_hand.media.item_ids):
            x_0, key = by_hand.latents(index), DrawKey(SEED, 0, epoch, item)
            drawn, t = (
                training_noise(tuple(x_0.shape), key, 0),
                sft_time(sigmas, run.recipe.policy.diffusers.density, key),
            )
            dropped = seeds.generator("text dropout", *key).random() < 0.5
            losses.append(by_hand.error(x_0, drawn, t, by_hand.conditioning(index, text=not dropped)))
    metrics = read_table(Artifact(input_of(run.slots.policy(1))), "metrics.parquet").iloc[0]
    assert metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-4)


def require_stock_evaluation(run: Run) -> None:
    """The first policy is the base. Each prompt has its own clip or picture."""
    stock = load_stock(run.plan.model, run.plan.model.path, "float32", CPU, references=True)
    shown = {"go on": noise(3, 8), "turn": noise(4, 1)}
    for stored in read_samples(Artifact(input_of(run.slots.version(0, "evaluate")))):
        frames = shown[stored.row["prompt"]]
        draw = torch.Generator(CPU).manual_seed(seeds.derive(stored.row["seed"], "evaluation"))
        expected = stock(
            prompt=[stored.row["prompt"]],
            video=[Image.fromarray(frame) for frame in frames],
            num_latent_conditional_frames=2 if len(frames) > 1 else 1,
            guidance_scale=SCALE - 1,
            num_inference_steps=STEPS,
            max_sequence_length=LENGTH,
            generator=[draw],
            num_frames=FRAMES,
            height=32,
            width=32,
            output_type="np",
        ).frames[0]
        assert np.abs(stored.pixels.astype(float) - 255 * expected).max() <= 1


def test_evaluations_continue_the_clip_of_each_prompt(run: Run):
    require_stock_evaluation(run)


def test_evaluations_continue_clips_also_if_training_gives_frames_of_media(tmp_path: Path):
    (inputs := tmp_path / "inputs").mkdir()
    values = continued(inputs)
    values["train"]["train_policy"]["max_num_conditional_frames"] = 2
    for file in (inputs / "longer" / "metas").iterdir():
        file.write_text(json.dumps({"prompt": file.stem}), encoding="utf-8")
    other = prepared(tmp_path, values)
    make(requests.export(other, 0), tmp_path)
    make(requests.evaluate(other, 0), tmp_path)
    require_stock_evaluation(other)


def test_clips_are_refused_for_models_that_cannot_continue_them(tmp_path: Path):
    (inputs := tmp_path / "inputs").mkdir()
    values = continued(inputs)
    short = values | {"policy": values["policy"] | {"diffusers": COSMOS | {"train_frames": 5}}}
    short["train"] = values["train"] | {"train_policy": values["train"]["train_policy"] | {"dataset": media(
        inputs / "short", COSMOS | {"train_frames": 5})}}  # fmt: skip
    with pytest.raises(
        ConfigError, match="train_frames = 5: a clip gives the first 5 frames, which leaves none to gen"
    ):
        make_run(tmp_path, short)
    values["policy"]["model_name_or_path"] = str(tiny_pipelines.save("wan", inputs / "wan", expand_timesteps=True))
    del values["policy"]["diffusers"]["guardrail"]
    with pytest.raises(ConfigError, match=r"0\.mkv is a clip; WanPipeline takes pictures as references"):
        make_run(tmp_path, values)


def test_rewards_get_the_frames_that_a_sample_continues(run: Run, tmp_path: Path):
    evaluation = requests.evaluate(run, 0)
    (scored,) = rewards(run, evaluation.slot, 0)
    make(scored, tmp_path)
    table = read_table(Artifact(input_of(scored.slot)), "scores.parquet")
    score_of = dict(zip(table["sample_id"], table["score"], strict=True))
    reward = pixel_similarity.Reward(pixel_similarity.Options(frames="first"))
    for stored in read_samples(Artifact(input_of(evaluation.slot))):
        shown = noise(3, 8)[-5:] if stored.row["prompt"] == "go on" else noise(4, 1)
        (expected,) = reward.score([Sample("s", "p", "", stored.pixels, references=(shown,))])
        assert isinstance(expected, dict)
        assert score_of[stored.sample_id] == pytest.approx(expected["pixel_similarity"], abs=1e-6)
