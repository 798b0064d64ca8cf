"""Weights of open_clip, converted."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from cosmos_rl_core.importers import open_clip
from cosmos_rl_core.rewards import hpsv2
from cosmos_rl_core.rewards._clip import model as clip_model
from tests.core.rewards import original_clip
from tests.test_torch_scorers import samples_of
from tests.tiny_scorers import _clip

ROOT = Path(__file__).parents[3]
WHEELS = "OPEN_CLIP_WHEELS"


@pytest.mark.slow
@torch.no_grad()
def test_a_converted_model_embeds_as_open_clip_itself(tmp_path: Path):
    """``OPEN_CLIP_WHEELS`` is a folder with wheels of open_clip_torch and torchvision, which are unpacked."""
    if WHEELS not in os.environ:
        pytest.skip(f"{WHEELS} names no folder with wheels of open_clip_torch and torchvision")
    for wheel in Path(os.environ[WHEELS]).glob("*.whl"):
        with zipfile.ZipFile(wheel) as file:
            file.extractall(tmp_path / "packages")
    path = os.pathsep.join([str(tmp_path / "packages"), str(ROOT)])
    command = [sys.executable, "-m", "tests.core.rewards.original_clip", str(tmp_path)]
    ended = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    found = np.load(tmp_path / "found.npz")
    open_clip.convert(load_file(tmp_path / "weights.safetensors"), tmp_path / "made", "weights")
    _clip.save(tmp_path / "inputs")
    loaded = clip_model.load(str(tmp_path / "made"), str(tmp_path / "inputs"), "float32")
    pictures = [hpsv2.padded(sample.pixels[0], _clip.SIDE) for sample in samples_of("image", 3)]
    np.testing.assert_allclose(loaded.images(pictures), found["pictures"], rtol=1e-4, atol=1e-5)
    tokens = torch.as_tensor(original_clip.tokens(), device="cpu")
    texts = loaded.model.get_text_features(input_ids=tokens).pooler_output.numpy()
    np.testing.assert_allclose(texts, found["texts"], rtol=1e-4, atol=1e-5)
    assert loaded.logit_scale == pytest.approx(float(found["logit_scale"]))
    assert [hpsv2.mended(text).lower() for text in original_clip.TEXTS] == found["mended"].tolist()
