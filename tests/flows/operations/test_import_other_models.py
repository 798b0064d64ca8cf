"""Recipes of other kinds of models, refused by every command."""

import tomllib
from pathlib import Path

import pytest

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.importers.translation import translated
from flows.operations.import_recipe import note, translation_of
from tests.core.importers.cosmos_rl.test_other_models import QWEN_SFT

QWEN_GRPO = """
[train]
epoch = 2
[train.train_policy]
type = "grpo"
trainer_type = "grpo"
temperature = 1.0
epsilon_low = 0.2
kl_beta = 0.0
reward_function = ["single_choice"]
[policy]
model_name_or_path = "Qwen/Qwen3-8B"
[rollout]
backend = "vllm"
n_generation = 16
"""


REASON_GRPO = QWEN_GRPO.replace("Qwen/Qwen3-8B", "nvidia/Cosmos-Reason1-7B")


VLA_EVALUATION = """
mode = "colocated"
[vla]
vla_type = "openvla-oft"
[policy]
model_name_or_path = "a/vla-model"
[policy.parallelism]
dp_shard_size = 1
[validation]
enable = true
batch_size = 8
[train.train_policy]
type = "sft"
"""


VLA_GRPO = VLA_EVALUATION.replace('type = "sft"', 'type = "grpo"\ntrainer_type = "grpo_vla"')


DISTILLATION = """
[distillation]
enable = true
[policy]
model_name_or_path = "Qwen/Qwen3-8B"
[train]
epoch = 1
"""


FILES = {
    "Qwen SFT": (QWEN_SFT, "supervised fine-tuning of another model (Qwen/Qwen2.5-7B-Instruct)"),
    "Qwen GRPO": (QWEN_GRPO, "reinforcement learning (grpo) of another model (Qwen/Qwen3-8B)"),
    "Reason GRPO": (
        REASON_GRPO,
        "reinforcement learning (grpo) of a vision-language model (nvidia/Cosmos-Reason1-7B)",
    ),
    "VLA evaluation": (VLA_EVALUATION, "a vision-language-action model (a/vla-model)"),
    "VLA GRPO": (VLA_GRPO, "a vision-language-action model (a/vla-model)"),
    "distillation": (DISTILLATION, "distillation of another model (Qwen/Qwen3-8B)"),
    "no model": ('redis = "12800"\n[train]\nepoch = 1\n', "supervised fine-tuning of another model (unnamed)"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_kind_of_model_is_refused_in_every_command(tmp_path: Path, name: str):
    text, kind = FILES[name]
    path = tmp_path / "theirs.toml"
    path.write_text(text, encoding="utf-8")
    for read in (translation_of, note, lambda path: translated(tomllib.loads(text), path)):
        with pytest.raises(ConfigError) as caught:
            read(str(path))
        assert caught.value.exit_code == 64
        message = str(caught.value)
        assert message.startswith(f"{path}: cosmos-rl reads this file as one of {kind}"), message
        assert "because policy.is_diffusers is not true" in message
        for known in ("policy.is_diffusers = true", 'type = "sft" with [custom.dataset]', "Qwen3-VL"):
            assert known in message
