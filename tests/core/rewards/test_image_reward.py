"""ImageReward: the conversion of the file that its authors publish, and where long prompts are cut."""

from pathlib import Path

import pytest
import torch

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.rewards import image_reward
from cosmos_rl_core.rewards._base import Sample
from tests import tiny_scorers
from tests.test_torch_scorers import samples_of
from tests.tiny_scorers import image_reward as tiny_image_reward


def test_image_reward_is_prepared_from_its_published_names(tmp_path: Path):
    settings = tiny_scorers.settings("image_reward", tmp_path)
    torch.save(tiny_image_reward.published(), tmp_path / "ImageReward.pt")
    image_reward.prepare(tmp_path / "ImageReward.pt", tmp_path / "made")
    samples, long = samples_of("image", 2), Sample("l", "p", "red " * 40, samples_of("image", 1)[0].pixels)
    cut = Sample("c", "p", "red " * 33, long.pixels)
    one, other = (
        image_reward.Reward(image_reward.Options.model_validate(settings | {"model": str(folder)}))
        for folder in (tmp_path / "made", settings["model"])
    )
    assert one.score(samples) == other.score(samples)
    assert one.version == other.version
    assert one.score([long]) == one.score([cut])


def test_other_tensors_are_not_image_reward(tmp_path: Path):
    tensors = tiny_image_reward.published()
    torch.save(tensors | {"blip.itm_head.weight": tensors["mlp.layers.0.bias"]}, tmp_path / "other.pt")
    with pytest.raises(ConfigError, match=r"unknown tensor 'blip\.itm_head\.weight'"):
        image_reward.prepare(tmp_path / "other.pt", tmp_path / "made")
    del tensors["mlp.layers.4.bias"]
    torch.save(tensors, tmp_path / "few.pt")
    with pytest.raises(ConfigError, match=r"(?s)few\.pt.*mlp\.layers\.4\.bias"):
        image_reward.prepare(tmp_path / "few.pt", tmp_path / "made")
    assert not (tmp_path / "made").exists()
