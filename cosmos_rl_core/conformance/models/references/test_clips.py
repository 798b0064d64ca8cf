"""Videos that continue clips, of every model plugin that takes clips as references, against the stock pipeline."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from cosmos_rl_core import plugins
from cosmos_rl_core.conformance.models.families import PROMPTS, SCHEDULERS, SIZE
from cosmos_rl_core.conformance.models.references.referring import ABLE, Referring, load_referring
from cosmos_rl_core.datasets._reference_pixels import CLIP_FRAMES
from cosmos_rl_core.pipelines.spec import CONDITIONAL_MASK

CONTINUING = [name for name in ABLE if plugins.load("models", name).SPEC.references.clips]
FRAMES = 13
"""Four latent frames of a VAE that makes one of each four after the first."""


@pytest.fixture(scope="module", params=CONTINUING)
def continuing(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, device: torch.device
) -> Referring:
    """Return each model plugin that takes clips, with generated media that are longer than the clips."""
    return replace(load_referring(request.param, tmp_path_factory.mktemp("clips"), device), frames=FRAMES)


def clip(frames: int) -> np.ndarray:
    """Return a clip of noise in a size that no other medium here has."""
    return np.random.default_rng(0).integers(0, 256, (frames, 40, 56, 3), dtype=np.uint8)


@pytest.mark.parametrize(("size", "guidance_scale", "num_steps"), [(SIZE, 1.0, 5), ((64, 32), 3.0, 16)])
def test_videos_that_continue_clips_are_the_stock_pipelines(
    continuing: Referring,
    size: tuple[int, int],
    guidance_scale: float,
    num_steps: int,
    monkeypatch: pytest.MonkeyPatch,
):
    """Stock gets a longer clip and reads its last frames."""
    for stock in (continuing.stock, continuing.family.stock):
        monkeypatch.setattr(stock, "scheduler", SCHEDULERS["euler"]())
    long, others = clip(CLIP_FRAMES + 3), clip(CLIP_FRAMES)[:, ::-1]
    end = long[-CLIP_FRAMES:]
    found = [continuing.sample(prompt, [end], size, guidance_scale, num_steps) for prompt in PROMPTS]
    for prompt, made in zip(PROMPTS, found, strict=True):
        expected = continuing.run_stock(prompt, [long], size, guidance_scale, num_steps)
        assert (made - expected).abs().max() < 1e-4
    for shown in (end[-1:], others):
        another = continuing.sample(PROMPTS[-1], [shown], size, guidance_scale, num_steps)
        assert torch.dist(found[-1], another) > 1e-2


def test_a_clip_gives_latent_frames_that_nothing_changes(continuing: Referring):
    """A clip gives two latent frames, a picture one."""
    given = [continuing.encoded("a", [clip(count)])[CONDITIONAL_MASK].flatten().tolist() for count in (1, CLIP_FRAMES)]
    assert given == [[1, 0, 0, 0], [1, 1, 0, 0]]
