"""Rollouts that decode a share of their samples, and the precision of the VAE."""

from pathlib import Path
from typing import Any
from weakref import ReferenceType, ref

import numpy as np
import pytest
import torch

from cosmos_rl_core.config.shared import Decoding
from cosmos_rl_core.models.sd3.model import StableDiffusion3
from cosmos_rl_core.sampling.rollout import sample
from flows.planning import requests
from flows.planning.run import Run
from stages.artifacts.artifact import Artifact
from stages.artifacts.request import Request
from stages.artifacts.slots import input_of
from stages.contracts import TENSORS, Rollout
from stages.formats.samples import read_samples, unit_name
from stages.generating.plans import is_decoded, planned
from tests.stages.conftest import make, make_run
from tests.stages.every_stage import recipe

NFT = {"type": "nft", "batch_size_per_optimize": 4, "timesteps_fraction": 0.5, "dataset": {"name": "ocr"}}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run up to its first rollout: two prompts of four samples, in units of four."""
    folder = tmp_path_factory.mktemp("decoding")
    run = make_run(folder, recipe(NFT, lora={"r": 2, "target_modules": ["to_q"]}))
    for request in (requests.policy(run), run.prepared.embed):
        make(request, folder)
    make(requests.rollout(run, 0), folder)
    return run


def rollout(run: Run, folder: Path, decoding: Decoding, name: str = "share") -> Request:
    """The first rollout of the run with other pictures."""
    request = requests.rollout(run, 0)
    config = request.settings(Rollout).model_copy(update={"decoding": decoding})
    return request.model_copy(update={"slot": f"{folder}/{name}", "config": config})


def pictures(request: Request) -> dict[str, np.ndarray]:
    stored = read_samples(Artifact(input_of(request.slot)))
    return {sample.sample_id: sample.pixels.astype("int16") for sample in stored if sample.has_media}


def test_a_share_depends_on_the_seed_of_a_sample_alone(run: Run):
    plans = planned(requests.rollout(run, 0))
    assert all(is_decoded(plan, 1.0) and not is_decoded(plan, 0.0) for plan in plans)
    few, many = ({plan.seed for plan in plans if is_decoded(plan, share)} for share in (0.3, 0.7))
    assert few <= many


def test_a_tile_is_freed_before_the_next_one_is_sampled(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made: list[ReferenceType[Any]] = []
    alive: list[int] = []

    def noted(*given: Any, **named: Any) -> Any:
        alive.append(sum(one() is not None for one in made))
        trajectory = sample(*given, **named)
        made.append(ref(trajectory))
        return trajectory

    monkeypatch.setattr("stages.rollout.sample", noted)
    make(rollout(run, tmp_path, Decoding(), "tiles"), tmp_path)
    assert alive == [0, 0]


def test_the_vae_has_a_precision_of_its_own(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Seen inside the VAE; the latents keep their bits, and TF32 is forbidden again afterwards."""
    seen: list[tuple[Any, ...]] = []
    decode_all = StableDiffusion3.decode

    def noted(self: StableDiffusion3, latents: torch.Tensor) -> torch.Tensor:
        def note(module: Any, given: Any, output: torch.Tensor) -> None:
            seen.append((output.dtype, torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32))

        hook = self._vae.decoder.conv_in.register_forward_hook(note)
        try:
            return decode_all(self, latents)
        finally:
            hook.remove()

    monkeypatch.setattr(StableDiffusion3, "decode", noted)
    made: list[Request] = []
    for name, decoding in {
        "float32": Decoding(),
        "bfloat16": Decoding(dtype="bfloat16"),
        "tf32": Decoding(tf32=True),
    }.items():
        made.append(rollout(run, tmp_path, decoding, name))
        make(made[-1], tmp_path)
    assert list(dict.fromkeys(seen)) == [
        (torch.float32, False, False),
        (torch.bfloat16, False, False),
        (torch.float32, True, True),
    ]
    exact, half, _ = map(pictures, made)
    gap = np.mean([np.abs(half[name] - exact[name]).mean() for name in exact])
    assert 0 < gap < 2
    contents = {Artifact(input_of(one.slot)).read(unit_name(TENSORS, 0)) for one in made}
    assert len(contents) == 1
