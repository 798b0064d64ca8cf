"""Recipes of vision-language models: settings that cannot work together."""

from pathlib import Path

import pytest

from cosmos_rl_core.errors import ConfigError
from tests.flows.vlm.test_vlm_plan import model, plan, values

__all__ = ["model", "values"]


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("launch.processes=3", "train_batch_per_replica = 4 is not a multiple of the 3 ranks of vlm_finetune"),
        ("launch.cp_size=2", "cp_size = 2"),
        ("train.train_policy.row_length=32", "row_length = 32 is below train.train_policy.model_max_length = 64"),
        ("train.train_policy.weights={other = 1.0}", "weights has other, and datasets has mine"),
        ("train.train_policy.max_length=9", "unknown key"),
        ("validation.parsers={mine = '(.)'}", "parsers without effect: max_new_tokens = 0"),
        ("policy.trains=['tower']", "policy.trains.0"),
        ("policy.lora={r = 2, lora_dropout = 0.1}", "lora_dropout = 0.1: VLMs are trained without dropout"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path: Path, values, setting: str, said: str):
    with pytest.raises(ConfigError) as caught:
        plan(tmp_path, values, overrides=[setting])
    assert said in str(caught.value)
