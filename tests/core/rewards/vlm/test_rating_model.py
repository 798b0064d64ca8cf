"""Models that rate by layers of their own: their types, and the weights that they are read from."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cosmos_rl_core.errors import ArtifactError, ConfigError
from cosmos_rl_core.rewards._base import Sample
from cosmos_rl_core.rewards._vlm import rating_model
from cosmos_rl_core.rewards.hpsv3 import TOKEN, prepare
from tests.core.rewards.test_hpsv3 import folder, reward_of
from tests.core.vlms.cases import pixels
from tests.tiny_scorers import hpsv3

__all__ = ["folder"]


def test_the_layers_stay_in_float32_when_the_model_is_in_bfloat16(folder: Path):
    scorer = rating_model.load(
        rating_model.HPSv3Model, [TOKEN], str(folder / "prepared"), torch.device("cpu"), torch.bfloat16, {}
    )
    types = {name.partition(".")[0]: tensor.dtype for name, tensor in scorer.model.named_parameters()}
    assert types == {"model": torch.bfloat16, "rm_head": torch.float32}
    (found,) = reward_of(folder, param_dtype="bfloat16").score([Sample("s", "p", "a dog", pixels(1, 20, 30))])
    (exact,) = reward_of(folder).score([Sample("s", "p", "a dog", pixels(1, 20, 30))])
    assert isinstance(found, dict)
    assert isinstance(exact, dict)
    assert found["hpsv3"] == pytest.approx(exact["hpsv3"], abs=0.2)


def test_weights_by_todays_names_and_settings_of_a_base_without_tables_are_taken_too(folder: Path, tmp_path: Path):
    hpsv3.published(tmp_path / "published")
    settings = tmp_path / "published" / "base" / "config.json"
    nested = json.loads(settings.read_text(encoding="utf-8"))
    settings.write_text(json.dumps({**nested.pop("text_config"), **nested}), encoding="utf-8")
    file = tmp_path / "published" / "HPSv3.safetensors"
    names = {hpsv3.older(name): name for name in load_file(tmp_path / "published" / "base" / "model.safetensors")}
    save_file({names.get(name, name): tensor for name, tensor in load_file(file).items()}, file)
    prepare(tmp_path / "published", tmp_path / "prepared")
    ours, others = (load_file(path / "prepared" / "model.safetensors") for path in (tmp_path, folder))
    assert ours.keys() == others.keys()
    assert all(torch.equal(tensor, others[name]) for name, tensor in ours.items())
    sample = Sample("s", "p", "a dog", pixels(1, 20, 30))
    assert reward_of(tmp_path).score([sample]) == reward_of(folder).score([sample])


def test_weights_without_the_layers_are_refused_by_name(tmp_path: Path):
    hpsv3.published(tmp_path / "published")
    file = tmp_path / "published" / "HPSv3.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if not name.startswith("rm_head.5")}, file)
    prepare(tmp_path / "published", tmp_path / "prepared")
    with pytest.raises(ArtifactError, match=r"lack 2 weights: rm_head\.5\.bias, rm_head\.5\.weight"):
        reward_of(tmp_path).score([Sample("s", "p", "a dog", pixels(1, 20, 30))])
    save_file({"lm_head.weight": torch.zeros(1)}, file)
    with pytest.raises(ConfigError, match=r"no model\.language_model\.embed_tokens\.weight"):
        prepare(tmp_path / "published", tmp_path / "other")
    assert json.loads((tmp_path / "prepared" / "config.json").read_text())["architectures"] == ["Qwen2VLRewardModelBT"]
