"""Files of cosmos-rl for training that is not done here are refused, and what they are for is said."""

import tomllib

import pytest

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.importers.translation import schema_of, translate

QWEN_SFT = """
redis = "12800"
[train]
resume = false
epoch = 1
output_dir = "./outputs/qwen"
optm_lr = 1e-6
train_batch_per_replica = 32
[train.train_policy]
type = "sft"
conversation_column_name = "conversation"
mini_batch = 4
dataset = { name = "a/dataset", subset = "default", split = "train" }
[policy]
model_name_or_path = "Qwen/Qwen2.5-7B-Instruct"
model_max_length = 4096
[policy.parallelism]
tp_size = 1
dp_shard_size = 4
"""


def test_a_file_that_names_another_kind_itself_is_refused_too():
    values = tomllib.loads(QWEN_SFT)
    values["policy"]["is_diffusers"] = False
    with pytest.raises(ConfigError, match=r"of another model .*, because policy.is_diffusers is not true"):
        translate(values)


def test_a_diffusion_model_that_forgot_to_say_so_is_told_what_to_write():
    values = tomllib.loads(QWEN_SFT)
    values["policy"]["diffusers"] = {"is_video": True}
    with pytest.raises(ConfigError, match=r"set policy.is_diffusers = true"):
        translate(values)
    values["policy"]["is_diffusers"] = True
    assert schema_of(values) == "diffusers"
    assert translate(values).values["train"]["train_policy"]["type"] == "sft"
