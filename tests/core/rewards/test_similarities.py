"""Scorers that compare embeddings of pictures, and the stock forward of transformers on the same weights."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from cosmos_rl_core import plugins
from cosmos_rl_core.rewards._base import Sample
from cosmos_rl_core.rewards._batches.exact import why_not_exact
from tests import tiny_scorers
from tests.test_torch_scorers import frames, samples_of
from tests.tiny_scorers import _clip
from tests.tiny_scorers import dino_similarity as tiny_dino

Embed = Callable[[np.ndarray], np.ndarray]


def made(name: str, settings: dict[str, Any]) -> Any:
    module = plugins.load("rewards", name)
    return module.Reward(module.Options.model_validate({"name": name, **settings}))


def pixels_by_hand(picture: np.ndarray, scaled: int, side: int) -> torch.Tensor:
    """A picture whose shorter side is ``scaled`` pixels, of that its centre, normalised."""
    image = Image.fromarray(picture)
    factor = scaled / min(image.size)
    image = image.resize((int(image.width * factor), int(image.height * factor)), Image.Resampling.BICUBIC)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    centre = np.asarray(image.crop((left, top, left + side, top + side))) / 255
    normal = (centre - OPENAI_CLIP_MEAN) / OPENAI_CLIP_STD
    return torch.tensor(normal, dtype=torch.float32, device="cpu").permute(2, 0, 1)[None]


def stock_dino(folder: str) -> Embed:
    model: Any = transformers.Dinov2Model.from_pretrained(folder).eval()

    @torch.no_grad()
    def embed(picture: np.ndarray) -> np.ndarray:
        found = model(pixels_by_hand(picture, tiny_dino.SCALED, tiny_dino.SIDE))
        # The pooled output of Dinov2Model is the token CLS.
        assert torch.equal(found.pooler_output, found.last_hidden_state[:, 0])
        return found.pooler_output[0].double().numpy()

    return embed


def stock_clip(folder: str) -> Embed:
    model: Any = transformers.CLIPModel.from_pretrained(folder).eval()

    @torch.no_grad()
    def embed(picture: np.ndarray) -> np.ndarray:
        found = model.get_image_features(pixel_values=pixels_by_hand(picture, _clip.SIDE, _clip.SIDE))
        return found.pooler_output[0].double().numpy()

    return embed


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


STOCK = {"dino_similarity": stock_dino, "clip_image_similarity": stock_clip}


def several() -> list[Sample]:
    """Images and videos with one to three references, some of which are the very pictures of others, and a clip."""
    rng = np.random.default_rng(1)
    shown = [*(frames(rng, 30 + 10 * i, 50, 1) for i in range(3)), frames(rng, 40, 50, 4)]
    numbers = [(0,), (0, 1), (2, 1, 0), (1,), (3, 2)]
    samples = samples_of("any", 5)
    return [replace(one, references=[shown[i] for i in of]) for one, of in zip(samples, numbers, strict=True)]


@pytest.mark.parametrize("name", STOCK)
def test_the_similarity_is_the_mean_cosine_of_the_stock_embeddings(name: str, tmp_path: Path):
    settings = tiny_scorers.settings(name, tmp_path)
    embed, samples = STOCK[name](settings["model"]), several()
    expected = [
        np.mean([cosine(embed(frame), embed(one)) for frame in sample.pixels for s in sample.references for one in s])
        for sample in samples
    ]
    found = made(name, settings).score(samples)
    np.testing.assert_allclose([one[name] for one in found], expected, atol=2e-6)
    assert np.ptp(expected) > 0.01
    # A picture is like itself, and a sample without references is not compared.
    same, bare = (replace(samples[0], references=some) for some in ([samples[0].pixels], []))
    first, second = made(name, settings).score([same, bare])
    assert first[name] == pytest.approx(1.0, abs=1e-12)
    assert isinstance(second, ValueError)
    assert f"prompt {bare.prompt_id} has no reference to compare with" in str(second)


@pytest.mark.parametrize("name", STOCK)
def test_a_reference_has_the_same_bits_for_all_its_samples(name: str, tmp_path: Path):
    reward, samples = made(name, tiny_scorers.settings(name, tmp_path)), several()
    copied = [replace(one, references=[shown.copy() for shown in one.references]) for one in samples]
    assert reward.score(samples) == reward.score(copied)


@pytest.mark.parametrize("name", [*STOCK, "frame_consistency"])
def test_batches_of_a_similarity_are_tested_with_references(name: str, tmp_path: Path):
    module = plugins.load("rewards", name)
    options = module.Options.model_validate({"name": name, **tiny_scorers.settings(name, tmp_path)})
    assert why_not_exact(module.Reward(options), options) is None


def test_the_consistency_is_the_mean_cosine_of_the_stock_embeddings_of_neighbours(tmp_path: Path):
    settings = tiny_scorers.settings("frame_consistency", tmp_path)
    embed, samples = stock_clip(settings["model"]), samples_of("video", 3)
    samples.append(replace(samples[0], pixels=samples[0].pixels[:2]))
    expected = [
        np.mean([cosine(embed(one), embed(other)) for one, other in zip(s.pixels[:-1], s.pixels[1:], strict=True)])
        for s in samples
    ]
    reward = made("frame_consistency", settings)
    found = [one["frame_consistency"] for one in reward.score(samples)]
    np.testing.assert_allclose(found, expected, atol=2e-6)
    assert np.ptp(expected) > 0.01
    still = replace(samples[0], pixels=np.repeat(samples[0].pixels[:1], 4, axis=0))
    assert reward.score([still])[0]["frame_consistency"] == pytest.approx(1.0, abs=1e-12)


def test_a_picture_has_no_consistency(tmp_path: Path):
    reward = made("frame_consistency", tiny_scorers.settings("frame_consistency", tmp_path))
    video, picture = samples_of("video", 1)[0], samples_of("image", 1)[0]
    scored, failed = reward.score([video, picture])
    assert [scored] == reward.score([video])
    assert isinstance(failed, ValueError)
    assert "sample s0 has 1 frame; frame_consistency compares the frames of a video" in str(failed)
