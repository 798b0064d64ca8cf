"""Shapes of weights by config.json alone, against the real classes and the published numbers of parameters."""

import math
from typing import Any

import pytest
import torch
import transformers

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.vlms.qwen_vl import PROCESSORS
from tests.core.vlms import tiny
from tests.core.vlms.cases import ARCHITECTURES, QWEN3, QWEN25
from tests.core.vlms.published import PUBLISHED


def shapes(architecture: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    weights = PROCESSORS[architecture].weights
    assert weights is not None
    return weights.of(config)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_names_and_shapes_match_the_real_class(architecture: str, tied: bool):
    config = tiny.config(architecture) | {"tie_word_embeddings": tied}
    cls = getattr(transformers, architecture)
    with torch.device("meta"):
        model = cls(cls.config_class(**config))
    real = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    found = shapes(architecture, config)
    assert found == real
    assert sum(map(math.prod, found.values())) == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("size", PUBLISHED)
def test_the_numbers_of_parameters_are_the_published_ones(size: str):
    config, parameters = PUBLISHED[size]
    assert sum(map(math.prod, shapes(QWEN3, config).values())) == parameters


def test_a_file_of_an_earlier_version_gives_the_same_shapes():
    config = tiny.config(QWEN25)
    earlier = {**config, **config["text_config"]}
    del earlier["text_config"]
    assert shapes(QWEN25, earlier) == shapes(QWEN25, config)


def test_a_missing_number_is_named():
    config = tiny.config(QWEN3)
    del config["vision_config"]["depth"]
    with pytest.raises(ConfigError, match="depth of vision_config is None, expected a whole number"):
        shapes(QWEN3, config)
