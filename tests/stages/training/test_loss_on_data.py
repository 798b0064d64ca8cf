"""The diffusion loss on data next to the policy gradient, against the same loss computed by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from cosmos_rl_core import seeds
from cosmos_rl_core.errors import ArtifactError, ConfigError
from cosmos_rl_core.models._conditioning import stack
from cosmos_rl_core.models.sd3 import model as sd3
from cosmos_rl_core.pipelines.directories import resolve_path
from cosmos_rl_core.training.noise_levels import DrawKey, sft_time, training_noise
from flows.planning import requests
from flows.planning.run import Run
from stages.artifacts.artifact import Artifact
from stages.artifacts.slots import input_of
from stages.formats.embeddings import NEGATIVE, Embeddings
from stages.formats.latents import Latents
from stages.formats.policies import read_part
from stages.formats.samples import key_of
from tests.stages.conftest import make
from tests.stages.training.test_transitions import LORA, SDE, iterate, recipe, started, table_of, tensors_of

CPU = torch.device("cpu")
CAPTIONS = {"one": 'a "b" c', "two": 'a "d" e'}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One picture for each of two prompts."""
    path = tmp_path / "media"
    for name in ("images", "metas"):
        (path / name).mkdir(parents=True)
    for number, (stem, caption) in enumerate(CAPTIONS.items()):
        pixels = np.random.default_rng(number).integers(0, 256, (32, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path / "images" / f"{stem}.png")
        (path / "metas" / f"{stem}.txt").write_text(caption, encoding="utf-8")
    return path


def ddrl(folder: Path, prompt_dir: str, lora: dict[str, Any] | None = LORA, **options: Any) -> dict[str, Any]:
    data = {"name": "local", "local_dir": str(folder), "size": [32, 64]}
    chosen = {"type": "ddrl", "data_beta": 0.5, "text_dropout": 0.0, "batch_size_per_optimize": 8, "data": data}
    return recipe(SDE, lora, **(chosen | {"dataset": {"name": "ocr", "local_dir": prompt_dir}} | options))


def data_run(values: dict[str, Any], tmp_path: Path) -> Run:
    run = started(tmp_path, values)
    make(run.prepared.encode, tmp_path)
    return run


class ByHand:
    """What the diffusion loss of the base model should be."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.model = sd3.load(resolve_path("package:tiny-sd3"), ("transformer",), CPU)
        self.latents = Latents([input_of(run.prepared.encode.slot)])
        index = self.latents.index
        self.item_of: dict[str, str] = dict(zip(index["prompt_id"], index["item_id"], strict=True))
        self.conditioning = Embeddings([input_of(run.prepared.embed.slot)], [*self.item_of, NEGATIVE])

    @torch.no_grad()
    def loss(self, prompt_id: str, t: float, noise: torch.Tensor, *, text: bool = True) -> float:
        """EDM's weight of the error of x_0, in its own variables: sigma, x_0 + sigma noise."""
        x_0 = self.latents[self.item_of[prompt_id]].double()
        sigma = t / (1 - t)
        x_sigma = x_0 + sigma * noise.double()
        x_t = ((1 - t) * x_sigma).float()[None]
        conditioning = stack([self.conditioning[prompt_id if text else NEGATIVE]], CPU)
        velocity = self.model.velocity(x_t, torch.tensor([t], dtype=torch.float32, device=CPU), conditioning)
        estimate = x_t.double() - t * velocity.double()
        return float(((1 + sigma**2) / sigma**2 * (x_0 - estimate[0]) ** 2).mean())


@pytest.mark.parametrize("lora", [LORA, pytest.param(None, marks=pytest.mark.slow)], ids=["lora", "full"])
def test_each_trained_step_takes_the_data_of_its_prompt_at_its_own_noise(
    lora: dict[str, Any] | None, folder: Path, prompt_dir: str, tmp_path: Path
):
    run = data_run(ddrl(folder, prompt_dir, lora), tmp_path)
    metrics = table_of(iterate(run, tmp_path), "metrics.parquet")
    by_hand = ByHand(run)
    # The base's last level is 1 - 1e-3 at most in this grid: sigma stays finite.
    losses = []
    for about, tensors in tensors_of(run).values():
        noise = torch.from_numpy(seeds.normal(tuple(tensors["latents"].shape), about["seed"], "initial noise", 0))
        for step in tensors["steps"].tolist():
            t = about["sigmas"][step]
            losses.append(by_hand.loss(about["prompt_id"], min(t, 1 - 1e-9), noise))
    assert metrics["data_loss"].iloc[0] == pytest.approx(np.mean(losses), rel=1e-4)
    expected = 10 * (metrics["policy_loss"].iloc[0] + 0.5 * metrics["data_loss"].iloc[0])
    assert metrics["loss"].iloc[0] == pytest.approx(expected, rel=1e-5)
    before, after = (read_part(input_of(slot), "current") for slot in (run.slots.policy(0), run.slots.policy(1)))
    moved = {name: float((after[name] - before[name]).abs().max()) for name in before}
    # The first step of AdamW is the learning rate long wherever there is a gradient. None is where B is 0 still, and in
    # the last block's queries of texts, whose attention SD3 throws away.
    still = ("lora_A",) if lora else ("3.attn.add_q_proj", "3.attn.norm_added_q")
    assert {name for name, distance in moved.items() if distance < 5e-4} == {
        name for name in before if any(part in name for part in still)
    }


@pytest.mark.slow
def test_the_data_term_may_be_on_the_first_step_only_with_supervised_levels(
    folder: Path, prompt_dir: str, tmp_path: Path
):
    values = ddrl(folder, prompt_dir, data_on_first_only=True, use_rl_sigma_and_noise=False, text_dropout=1.0)
    run = data_run(values, tmp_path)
    metrics = table_of(iterate(run, tmp_path), "metrics.parquet")
    by_hand = ByHand(run)
    scheduler = by_hand.model.scheduler
    scheduler.set_timesteps(1000)
    sigmas = tuple(float(sigma) for sigma in scheduler.sigmas)
    losses = []
    for sample_id, (about, tensors) in tensors_of(run).items():
        key = DrawKey(0, 0, 0, f"{key_of(0, sample_id)}/0")
        noise = training_noise(tuple(tensors["latents"].shape), key, 0)
        t = sft_time(sigmas, run.recipe.policy.diffusers.density, key)
        losses.append(by_hand.loss(about["prompt_id"], min(t, 1 - 1e-9), noise, text=False))
    # The mean is over the steps that have a loss on data, which are half of all. The largest has the same unit.
    assert metrics["data_loss"].iloc[0] == pytest.approx(np.mean(losses), rel=1e-4)
    assert metrics["data_loss_max"].iloc[0] == pytest.approx(max(losses), rel=1e-4)
    expected = 10 * (metrics["policy_loss"].iloc[0] + 0.5 * metrics["data_loss"].iloc[0] / 2)
    assert metrics["loss"].iloc[0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_prompts_without_data_of_their_own_take_any_item(folder: Path, prompt_dir: str, tmp_path: Path):
    for stem in CAPTIONS:
        (folder / "metas" / f"{stem}.txt").write_text(f"another {stem}", encoding="utf-8")
    run = data_run(ddrl(folder, prompt_dir), tmp_path)
    assert table_of(iterate(run, tmp_path), "metrics.parquet")["data_loss"].iloc[0] > 0


def test_a_weight_on_data_without_data_is_refused(folder: Path, prompt_dir: str, tmp_path: Path):
    with pytest.raises(ConfigError, match="term on media, with weight data_beta: name the media in"):
        started(tmp_path, ddrl(folder, prompt_dir, data=None))


def test_the_update_depends_on_the_data_and_checks_what_it_reads_of_it(folder: Path, prompt_dir: str, tmp_path: Path):
    run = data_run(ddrl(folder, prompt_dir), tmp_path)
    iterate(run, tmp_path)
    data = input_of(run.prepared.encode.slot)
    assert requests.update(run, 0).one("data").content == data.content

    (shard,) = (entry for name, entry in Artifact(data).manifest.files.items() if name.startswith("latents/"))
    Path(data.url, shard.path).write_bytes(bytes(shard.size))
    with pytest.raises(ArtifactError, match="is not what was committed"):
        make(requests.update(run, 0).model_copy(update={"slot": f"{requests.update(run, 0).slot}-damaged"}), tmp_path)
