"""What all models have in common: sizes and numbers of frames that none of them can make, and guidance.

What every model plugin has to do is tested in test_every_model_conforms.py.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.conformance.models.adapters import load_model
from cosmos_rl_core.conformance.models.families import CPU
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.models._base import Model, guided_velocity
from cosmos_rl_core.models._conditioning import Conditioning, Entries


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {"sd3": str(tiny_pipelines.save("sd3", root / "sd3")), "wan": str(tiny_pipelines.save("wan", root / "wan"))}


def load(folder: Path | str, *components: str) -> Any:
    return load_model(folder, components, CPU)


def test_impossible_sizes_and_frames_are_refused_by_name(folders):
    image, video = load(folders["sd3"]), load(folders["wan"])
    for model, multiple in ((image, 8), (video, 16)):
        with pytest.raises(ConfigError, match=rf"multiples of {multiple} pixels for this model"):
            model.latent_shape((36, 33), 1)
    with pytest.raises(ConfigError, match="train_frames = 3: this model makes images"):
        image.latent_shape((32, 32), 3)
    with pytest.raises(ConfigError, match="train_frames = 3 must be 1 plus a multiple of 4"):
        video.latent_shape((32, 32), 3)
    with pytest.raises(ConfigError, match=r"are \[1, 16, 4\] tokens .* at most \[1, 8, 8\]"):
        image.latent_shape((128, 32), 1)


class Line(Model):
    """A model whose velocity is its text, 1 more for each unit of time where an entry is shared."""

    def __init__(self, unguided: Tensor | None = None) -> None:
        self.below = unguided

    def velocity(self, x_t: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        shift = conditioning["shared"] * t.view(-1, 1) if "shared" in conditioning else 0
        return 0 * x_t + conditioning["text"] + shift

    def unguided(self, t: Tensor) -> Tensor | None:
        return None if self.below is None else t < self.below

    def encode_media(self, pixels: Tensor) -> Tensor:
        return pixels

    def decode(self, latents: Tensor) -> Tensor:
        return latents

    def _encode_prompt(self, prompt: str, max_prompt_length: int) -> Entries:
        return {"text": column(len(prompt))}


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=CPU).view(-1, 1)


def test_guidance_goes_on_from_the_negative_prediction_past_the_positive_one():
    x, t = torch.zeros(2, 3, device=CPU), torch.tensor([0.25, 0.5], device=CPU)
    text = Conditioning({"text": column(1, 2)}, {"shared": column(8, 8)})
    negative = Conditioning({"text": column(-1, 4)})
    assert guided_velocity(Line(), x, t, text, None, 1.0)[:, 0].tolist() == [3, 6]
    # Both predictions have the shared entries: -1 + 2 + 3 * (1 - -1) and 4 + 4 + 3 * (2 - 4).
    assert guided_velocity(Line(), x, t, text, negative, 3.0)[:, 0].tolist() == [7, 2]
    below = torch.tensor(0.3, device=CPU)
    assert guided_velocity(Line(below), x, t, text, negative, 3.0)[:, 0].tolist() == [3, 2]
    with pytest.raises(ValueError, match=r"guidance_scale = 3\.0 needs negative conditioning"):
        guided_velocity(Line(), x, t, text, None, 3.0)


@pytest.mark.parametrize(("trains", "slope"), [(True, -2.0), (False, 0.0)])
def test_the_negative_prediction_has_a_gradient_only_where_it_trains(trains: bool, slope: float):
    positive, negative = (column(1).requires_grad_() for _ in range(2))
    text, other = (Conditioning({"text": one}) for one in (positive, negative))
    x, t = torch.zeros(1, 1, device=CPU), torch.ones(1, device=CPU)
    guided_velocity(Line(), x, t, text, other, 3.0, trains_unconditional=trains).sum().backward()
    assert positive.grad is not None
    assert float(positive.grad) == 3
    assert (0.0 if negative.grad is None else float(negative.grad)) == slope
