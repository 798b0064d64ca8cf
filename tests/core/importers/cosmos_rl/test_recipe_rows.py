"""Single settings of cosmos-rl's: what they are here, which of them nobody can know, and which are mistakes."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from cosmos_rl_core.config.train import EmaConfig, OptimizerConfig
from cosmos_rl_core.datasets import prompt_set
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.importers.translation import Entry, translate, translated
from cosmos_rl_core.training.schedules import ema_decay, lr_factor
from tests.core.importers.cosmos_rl.recipes import changed

FOLDER = Path(__file__).parents[2] / "upstream_recipes"
SD3, SANA_VIDEO, COSMOS_NFT = "stable-diffusion-3-5-medium-nft", "sana-video-nft", "cosmos-predict2-5-2b-720-nft"
SFT, DDRL, GRPO = (
    "sana-video-sft-lora",
    "cosmos-predict2-5-2b-720-reason-embedding-ddrl",
    "cosmos-predict2-5-2b-480-grpo",
)


def read(name: str, **changes: Any) -> dict[str, Any]:
    return changed(FOLDER / f"{name}.toml", **changes)


def setting(values: dict[str, Any], name: str) -> Any:
    found: Any = translate(values).values
    for part in name.split("."):
        found = found[part]
    return found


def entry(values: dict[str, Any], key: str) -> Entry:
    return next(entry for entry in translate(values).report if entry.key == key)


def test_all_unknown_keys_are_mistakes_of_one_message_each_with_the_nearest_known_one():
    values = read(
        SD3, train__optm_lrr=1e-4, policy__lora__rank=8, policy__diffusers__sample__num_step=3, rolout={"a": 1}
    )
    with pytest.raises(ConfigError) as caught:
        translated(values, "x.toml")
    lines = str(caught.value).splitlines()
    assert len(lines) == 5
    for expected in (
        "train.optm_lrr: unknown key; did you mean 'train.optm_lr'?",
        "policy.lora.rank: unknown key",
        "policy.diffusers.sample.num_step: unknown key; did you mean 'policy.diffusers.sample.num_steps'?",
        "rolout.a: unknown key",
    ):
        assert any(line.startswith(f"  {expected}") for line in lines), lines
    assert "train.optm_lrr" not in json.dumps(translate(values).values)


def test_a_callback_that_cosmos_rl_has_not_is_unknown_and_its_known_ones_are_not():
    values = read(DDRL)
    values["trainer"]["callbacks"].append({"name": "wandbb", "args": {"every_n": 1}})
    assert {found.key for found in translate(values).of("unknown")} == {
        "trainer.callbacks[wandbb].name", "trainer.callbacks[wandbb].args.every_n",
    }  # fmt: skip


def test_the_misspelt_fraction_is_read_with_a_note_unless_the_right_spelling_is_there():
    misspelt = "policy.diffusers.timestep_fraction"
    assert setting(read(SD3), "train.train_policy.timesteps_fraction") == 0.99
    assert "misspelt" in entry(read(SD3), misspelt).why
    both = read(SD3, policy__diffusers__timesteps_fraction=0.5)
    assert setting(both, "train.train_policy.timesteps_fraction") == 0.5
    assert entry(both, misspelt).verdict == "no effect here"
    neither = read(SD3, policy__diffusers__timestep_fraction=None)
    assert setting(neither, "train.train_policy.timesteps_fraction") == 1.0


@pytest.mark.parametrize("name", [SD3, DDRL])
def test_numbers_of_gpus_belong_to_the_cluster_profile(name: str):
    key = "policy.parallelism.dp_shard_size" if name == SD3 else "model_parallel.context_parallel_size"
    meaning = entry(read(name), key)
    assert (meaning.verdict, dict(meaning.settings)) == ("no effect here", {})
    setting = "dp_shard_size" if name == SD3 else "cp_size"
    assert re.search(rf"{setting} = \.\.\..* in a cluster profile", meaning.why)


@pytest.mark.parametrize(
    ("guidance", "scale"), [(0.0, 1.0), (3.0, 4.0)],
)  # fmt: skip
def test_guidance_of_rollouts_counts_from_1_here(guidance: float, scale: float):
    assert setting(read(DDRL, model__rl__guidance=guidance), "policy.diffusers.sample.guidance_scale") == scale


def test_guidance_of_a_stock_cosmos_pipeline_counts_from_1_here_too_and_sd3s_always_did():
    changes = {"policy__diffusers__sample__guidance_scale": 7.0}
    assert setting(read(COSMOS_NFT, **changes), "policy.diffusers.sample.guidance_scale") == 8.0
    assert setting(read(SD3, **changes), "policy.diffusers.sample.guidance_scale") == 7.0


@pytest.mark.parametrize(
    ("solver", "quiet", "ours"),
    [("flow", True, "euler"), ("ddim", True, "euler"), ("dpm1", True, "euler"), ("dpm2", True, "dpm2"),
     ("flow", False, "flow_sde")],
)  # fmt: skip
def test_samplers_have_other_names(solver: str, quiet: bool, ours: str):
    values = read(
        SD3, policy__diffusers__sample__solver=solver, policy__diffusers__sample__deterministic_sampling=quiet
    )
    assert setting(values, "policy.diffusers.sample.solver") == ours
    noise = entry(values, "policy.diffusers.sample.noise_level")
    assert dict(noise.settings) == ({} if quiet else {"policy.diffusers.sample.noise_level": 0.7})


def test_sana_is_sampled_as_cosmos_rl_does_whatever_is_written():
    assert setting(read(SANA_VIDEO), "policy.diffusers.sample.solver") == "dpm2"
    assert setting(read(SANA_VIDEO), "policy.diffusers.train_frames") == 81
    assert setting(read(SANA_VIDEO, policy__diffusers__train_frames=41), "policy.diffusers.train_frames") == 41
    assert setting(read(SFT), "policy.diffusers.train_frames") == 41


REFUSED = [
    (SD3, "policy.diffusers.sample.solver", "dance", "no such sampler"),
    (SD3, "policy.is_diffusers", "yes", "must be true or false"),
    (SD3, "policy.lora.init_lora_weights", "pissa", "true or gaussian"),
    (SD3, "policy.diffusers.weight_copy_decay_type", 3, "must be 0, 1 or 2"),
    (SD3, "train.param_dtype", "float16", "bfloat16 or float32"),
    (SD3, "policy.lora.lora_path", "outputs/lora", "policy.init_from names the folder"),
    (SD3, "policy.lora.modules_to_save", ["proj_out"], "adapters only"),
    (SD3, "train.resume", "outputs/x/policy", "checkpoints cannot be read"),
    (SD3, "train.train_policy.trainer_type", "grpo", "diffusion_nft"),
    (SD3, "train.train_batch_per_replica", "many", "whole number"),
    (SD3, "policy.diffusers.sample.guidance_scale", "high", "must be a number"),
    (SFT, "policy.diffusers.weighting_scheme", "mode", "logit_normal or uniform"),
    (DDRL, "model.rl.enabled", False, "configs/sft"),
    (DDRL, "model.rl.reward_config.aesthetic.enabled", True, "fails on every sample"),
    (DDRL, "optimizer.optim_type", "lion", "fusedadam or adamw"),
    (DDRL, "scheduler.f_max", [1.0, 0.5], "one cycle"),
    (DDRL, "scheduler.f_max", [0.0], "above 0"),
    (DDRL, "model.precision", "float16", "bfloat16 or float32"),
    (DDRL, "dataloader_train.video_dataloader.batch_size", 2, "set it to 1"),
]


@pytest.mark.parametrize(("name", "key", "value", "said"), REFUSED, ids=[f"{row[1]}={row[2]}" for row in REFUSED])
def test_impossible_settings_are_mistakes_that_say_what_to_do(name: str, key: str, value: Any, said: str):
    found = entry(read(name, **{key.replace(".", "__"): value}), key)
    assert found.verdict == "refused"
    assert said in found.why


@pytest.mark.parametrize(("key", "value"), [("optimizer.lr", "fast"), ("scheduler.f_min", ["low"])])
def test_a_mistake_in_the_schedule_names_its_key_on_every_line(key: str, value: Any):
    translation = translate(read(DDRL, **{key.replace(".", "__"): value}))
    assert any(entry.key == key for entry in translation.of("refused"))
    assert all(key in mistake for mistake in translation.mistakes)


def test_a_token_is_neither_shown_nor_written():
    values = read(DDRL, model__rl__reward_config__remote_reward__token="secret")
    translation = translate(values)
    assert not any("secret" in found.written for found in translation.report)
    assert "secret" not in json.dumps(translation.values)


def test_rewards_keep_their_weights_keys_bounds_and_scale():
    values = read(SD3, train__train_policy__remote_reward={
        "scale": 2.0,
        "reward_fns": [{"clip_max": 12.0, "name": "hpsv3", "weight": 0.5}, {"name": "dance_grpo", "score_key": "a+b"}],
    })  # fmt: skip
    assert translate(values).values["rewards"] == [
        {"fn": {"name": "remote", "reward_fn": "hpsv3", "clip_min": -5.0, "clip_max": 12.0, "scale": 2.0},
         "weight": 0.5},
        {"fn": {"name": "remote", "reward_fn": "dance_grpo", "clip_min": -5.0, "clip_max": 5.0, "score_key": "a+b",
                "scale": 2.0}},
    ]  # fmt: skip


def test_settings_that_only_the_user_knows_are_left_open_and_not_made_up(tmp_path: Path):
    local_rewards = read(SD3, train__train_policy__use_remote_reward=False)
    assert "rewards" not in translate(local_rewards).values
    other_prompts = read(SD3, train__train_policy__dataset__name="my/prompts")
    other_split = read(SD3, train__train_policy__dataset__split="validation")
    for values in (other_prompts, other_split):
        assert "dataset" not in translate(values).values["train"]["train_policy"]
    for values, name in ((local_rewards, "rewards"), (other_prompts, "train.train_policy.dataset")):
        assert translate(values).summary.endswith(f"; still to set: {name}")


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("name", prompt_set.SETS)
def test_the_prompt_sets_that_cosmos_rl_knows_keep_their_names(name: str, split: str):
    values = read(SD3, train__train_policy__dataset__name=name, train__train_policy__dataset__split=[split])
    dataset = translate(values).values["train"]["train_policy"]["dataset"]
    assert prompt_set.Options(**dataset) == prompt_set.Options(set=name, split=split)  # pyright: ignore[reportArgumentType]


def test_epochs_become_iterations_where_the_prompts_can_be_counted(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert translate(read(COSMOS_NFT)).summary.endswith("; still to set: train.num_iterations")
    file = tmp_path / "downloads/diffusion_nft/pickscore/train.txt"
    file.parent.mkdir(parents=True)
    file.write_text("a prompt\n" * 25433, encoding="utf-8")
    monkeypatch.setenv("COSMOS_CACHE_DIR", str(tmp_path / "downloads"))
    assert setting(read(COSMOS_NFT), "train.num_iterations") == 25433 * 12 * 10 // 576 == 5298
    assert setting(read(COSMOS_NFT, train__max_num_steps=7), "train.num_iterations") == 7


def test_epochs_of_a_folder_become_iterations_of_as_many_steps_as_cosmos_rl_saves_after(tmp_path: Path):
    for index in range(100):
        (tmp_path / f"{index}.json").touch()
    values = read(SFT, train__train_policy__dataset__local_dir=str(tmp_path), validation__enable=False)
    # 100 items on eight ranks are 12 steps an epoch: 120 in ten epochs, 4 times 30.
    assert setting(values, "train.num_iterations") == 4
    assert setting(values | {"train": values["train"] | {"epoch": 1}}, "train.train_policy.steps_per_iteration") == 12
    values = read(SFT, train__train_policy__dataset__local_dir=str(tmp_path), train__optm_warmup_steps=0.1,
                  train__optm_decay_type="cosine")  # fmt: skip
    assert setting(values, "train.optm_warmup_steps") == 12
    assert setting(values, "train.max_num_steps") == 120


@pytest.mark.parametrize(("changes", "total"), [({}, 60), ({"mu_iterations": 2}, 120)], ids=["once", "twice"])
def test_the_optimizer_steps_of_nft_are_the_parts_of_its_batches(changes: dict[str, int], total: int):
    """1152 samples on eight ranks, 48 each an optimizer step, are three in each of 20 steps; of one pass by default."""
    said = {"batch_size_per_optimize": 48} | changes
    values = read(SD3, **{f"train__train_policy__{name}": value for name, value in said.items()},
                  train__max_num_steps=20, train__optm_warmup_steps=0.1, train__optm_decay_type="cosine")  # fmt: skip
    assert setting(values, "train.max_num_steps") == total
    assert setting(values, "train.optm_warmup_steps") == total // 10


def test_the_learning_rate_rises_as_in_cosmos_rl():
    train = translate(read(DDRL)).values["train"]
    config = OptimizerConfig(**{name: held for name, held in train.items() if name in OptimizerConfig.model_fields})
    theirs = [1e-6 + (1 - 1e-6) * min(step, 50) / 50 for step in range(60)]
    assert [lr_factor(config, step) for step in range(60)] == pytest.approx(theirs, rel=1e-12)


def test_a_cycle_that_falls_is_a_decay():
    values = read(DDRL, scheduler__f_max=[0.5], scheduler__f_min=[0.1], scheduler__cycle_lengths=[1000])
    train = translate(values).values["train"]
    assert train["optm_lr"] == 0.5 * 1e-5
    assert (train["optm_decay_type"], train["max_num_steps"]) == ("linear", 1000)
    assert train["optm_min_lr_factor"] == pytest.approx(0.2)


def test_the_power_average_equals_cosmos_rls():
    train = translate(read(DDRL)).values["train"]
    config = EmaConfig(ema_enable=train["ema_enable"], ema_rate=train["ema_rate"])
    gamma = 6.937204  # of rate 0.1
    for step in (0, 1, 100, 10000):
        assert ema_decay(config, step) == pytest.approx((1 - 1 / (step + 1)) ** (gamma + 1), abs=1e-6)
    assert "ema_rate" not in translate(read(DDRL, model__ema__enabled=False)).values["train"]


def test_options_of_adapters_and_the_optimizer_mean_what_they_say():
    said = {
        "lora_dropout": 0.1,
        "use_rslora": True,
        "r_pattern": {"attn.to_q": 8, "to_k": 2},
        "alpha_pattern": {},
        "target_modules": "all-linear",
        "modules_to_save": "None",
    }
    changes = {f"policy__lora__{name}": value for name, value in said.items()}
    values = translate(read(SD3, train__optm_name="Adam", **changes)).values
    assert values["train"]["optm_name"] == "Adam"
    assert {name: values["policy"]["lora"].get(name) for name in said} == said | {"modules_to_save": None}


@pytest.mark.parametrize(("name", "key"), [(SD3, "train.param_dtype"), (GRPO, "model.precision")])
def test_the_precision_is_the_files_or_bfloat16_if_it_names_none(name: str, key: str):
    key = key.replace(".", "__")
    assert setting(read(name, **{key: "float32"}), "train.param_dtype") == "float32"
    assert setting(read(name, **{key: None}), "train.param_dtype") == "bfloat16"


def test_steps_that_are_not_finite_are_left_out_if_cosmos_rl_forces_finite_ones():
    assert setting(read(DDRL), "train.max_nonfinite_steps") == 10
    values = read(DDRL)
    for callback in values["trainer"]["callbacks"]:
        callback.get("args", {}).pop("force_finite", None)
    assert "max_nonfinite_steps" not in translate(values).values["train"]


def test_media_are_asked_for_only_where_something_reads_them():
    values = read(GRPO, model__rl__min_num_conditional_frames=0, model__rl__max_num_conditional_frames=0)
    assert "data" not in translate(values).values["train"]["train_policy"]
    assert "text_dropout" not in translate(values).values["train"]["train_policy"]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"checkpoint__model_id": "base/post-trained/x.pt"}, "nvidia/Cosmos-Predict2.5-2B@diffusers/base/post-trained"),
        ({"checkpoint__model_id": "robot/action-cond/x.pt"}, None),
        ({"checkpoint__load_path": "/my/checkpoints"}, None),
    ],
)
def test_checkpoints_are_named_as_the_pipelines_of_the_same_weights(changes: dict[str, str], name: str | None):
    translation = translate(read(DDRL, **changes))
    assert translation.values["policy"].get("model_name_or_path") == name
    assert ("still to set: policy.model_name_or_path" in translation.summary) == (name is None)


def test_the_batch_is_the_number_of_model_instances_times_what_is_accumulated():
    assert setting(read(DDRL, trainer__grad_accum_iter=2), "train.train_batch_per_replica") == 256


@pytest.mark.parametrize("value", [{}, "x", -1, math.inf, [{"name": "a"}]], ids=repr)
@pytest.mark.parametrize("name", [SD3, SFT, DDRL])
def test_the_report_comes_however_wrong_a_value_is(name: str, value: Any):
    keys = [entry.key for entry in translate(read(name)).report if entry.key and "[" not in entry.key]
    for key in keys:
        values = read(name, **{key.replace(".", "__"): value})
        assert translate(values).summary.startswith("a file of cosmos-rl")
