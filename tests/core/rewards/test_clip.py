"""Scorers by CLIP models, compared with transformers' own forward on the same weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file

from cosmos_rl_core import plugins
from cosmos_rl_core.errors import ArtifactError, ConfigError
from cosmos_rl_core.rewards._base import Sample
from tests.test_torch_scorers import samples_of
from tests.tiny_scorers import _clip

MEAN, DEVIATION = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clip")
    _clip.save(folder)
    return folder


def scorer(name: str, **settings: Any) -> Any:
    module = plugins.load("rewards", name)
    return module.Reward(module.Options.model_validate({"name": name, **settings}))


def pixels_by_hand(frame: np.ndarray, side: int) -> torch.Tensor:
    """A frame as CLIP takes it: its shorter side scaled to ``side``, its centre, normalised."""
    image = Image.fromarray(frame)
    scale = side / min(image.size)
    image = image.resize((int(image.width * scale), int(image.height * scale)), Image.Resampling.BICUBIC)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    centre = np.asarray(image.crop((left, top, left + side, top + side))) / 255
    return torch.tensor((centre - MEAN) / DEVIATION, dtype=torch.float32, device="cpu").permute(2, 0, 1)


def stock_cosines(folder: Path, samples: list[Sample]) -> list[float]:
    model: Any = transformers.CLIPModel.from_pretrained(folder).eval()
    tokenizer = transformers.CLIPTokenizer.from_pretrained(folder)
    found: list[float] = []
    for sample in samples:
        tokens = tokenizer([sample.prompt], return_tensors="pt", truncation=True, max_length=77)
        pixels = torch.stack([pixels_by_hand(frame, _clip.SIDE) for frame in sample.pixels])
        with torch.no_grad():
            cosines = model(pixel_values=pixels, **tokens).logits_per_image / model.logit_scale.exp()
        found.append(float(cosines.mean()))
    return found


def test_clip_score_is_the_cosine_of_the_stock_forward(clip: Path):
    samples = [*samples_of("image", 4), *samples_of("video", 2)]
    found = scorer("clip_score", model=str(clip)).score(samples)
    np.testing.assert_allclose([one["clip_score"] for one in found], stock_cosines(clip, samples), atol=2e-6)


def test_text_beyond_the_models_positions_is_cut(clip: Path):
    picture = samples_of("image", 1)[0].pixels
    long = [Sample("s", "p", "a dog " * 40 + end, picture) for end in ("", "red")]
    first, second = scorer("clip_score", model=str(clip)).score(long)
    assert first == second
    assert [first["clip_score"]] == pytest.approx(stock_cosines(clip, long[:1]), abs=2e-6)


def changed(folder: Path, target: Path, change: Callable[[Path], None]) -> Path:
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    change(target)
    return target


def test_other_weights_or_another_tokenizer_are_another_version(clip: Path, tmp_path: Path):
    def shift(folder: Path) -> None:
        model: Any = transformers.CLIPModel.from_pretrained(folder)
        model.logit_scale.data += 1
        model.save_pretrained(folder)

    def trim(folder: Path) -> None:
        file = folder / "tokenizer.json"
        file.write_text(file.read_text() + " ")

    folders = [clip]
    for i, change in enumerate((shift, trim)):
        (tmp_path / str(i)).mkdir()
        folders.append(changed(clip, tmp_path / str(i), change))
    assert len({scorer("clip_score", model=str(folder)).version for folder in folders}) == 3


def test_a_folder_that_lacks_files_says_which(clip: Path, tmp_path: Path):
    changed(clip, tmp_path, lambda folder: (folder / "preprocessor_config.json").unlink())
    with pytest.raises(ConfigError, match=r"needs .*preprocessor_config\.json; fetch it"):
        _ = scorer("clip_score", model=str(tmp_path)).version
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no model\.safetensors"):
        _ = scorer("clip_score", model=str(tmp_path)).version


def test_missing_weights_are_never_drawn_at_random(clip: Path, tmp_path: Path):
    def drop(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        del tensors["visual_projection.weight"]
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    changed(clip, tmp_path, drop)
    with pytest.raises(ArtifactError, match=r"lack 1 weight: visual_projection\.weight"):
        scorer("clip_score", model=str(tmp_path)).score(samples_of("image", 1))


def test_a_processor_of_another_size_is_refused(clip: Path, tmp_path: Path):
    transformers.CLIPImageProcessorPil(crop_size={"height": 16, "width": 16}).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="makes images of 16 x 16, the model"):
        scorer("clip_score", model=str(clip), processor=str(tmp_path)).score(samples_of("image", 1))
