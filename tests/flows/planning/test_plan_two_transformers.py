"""Plans of Wan 2.2 A14B, which has two transformers and is refused by its config files, before weights are fetched."""

import json
import shutil
from pathlib import Path

import pytest

from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.errors import ConfigError
from flows.planning.plan import Settings, plan_of


def test_experts_for_high_and_low_noise_are_refused_with_the_bases_to_take(recipe, tmp_path: Path):
    folder = tiny_pipelines.save("wan", tmp_path / "a14b")
    shutil.copytree(folder / "transformer", folder / "transformer_2")
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    index |= {"boundary_ratio": 0.875, "transformer_2": index["transformer"]}
    (folder / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    for weights in folder.rglob("*.safetensors"):
        weights.unlink()
    path = recipe(("package:tiny-sd3", str(folder)))
    with pytest.raises(ConfigError) as raised:
        plan_of(Settings(path, str(tmp_path / "store")), without_weights=True)
    message = str(raised.value)
    assert "has boundary_ratio = 0.875, so it is a Wan 2.2 A14B, of two transformers, experts for high and" in message
    assert "one transformer is trained here, so take Wan 2.2 TI2V 5B (Wan-AI/Wan2.2-TI2V-5B-Diffusers)" in message
    assert "or Wan 2.1, such as Wan-AI/Wan2.1-T2V-1.3B-Diffusers" in message
    assert "missing" not in message
    assert "fetch the model again" not in message
