"""cosmos-rl's fourteen recipes of diffusion models, read as they are. Expectations were written from its documents."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cosmos_rl_core.config import toml
from cosmos_rl_core.importers import translation
from cosmos_rl_core.importers.translation import schema_of, translate

FOLDER = Path(__file__).parents[1] / "upstream_recipes"
ROOT = Path(__file__).parents[3]
SANA_TARGETS = [f"attn{i}.{name}" for i in (1, 2) for name in ("to_q", "to_k", "to_v", "to_out.0")]
SD3_TARGETS = [
    f"attn.{name}"
    for name in ("add_k_proj", "add_q_proj", "add_v_proj", "to_add_out", "to_k", "to_out.0", "to_q", "to_v")
]
COSMOS_TARGETS = ["to_k", "to_out.0", "to_q", "to_v", "ff.net.0.proj", "ff.net.2"]
SANA, SANA_VIDEO = (
    "Efficient-Large-Model/SANA1.5_1.6B_1024px_diffusers",
    "Efficient-Large-Model/SANA-Video_2B_480p_diffusers",
)
SD3, COSMOS = "stabilityai/stable-diffusion-3.5-medium", "nvidia/Cosmos-Predict2.5-2B"
POLICY, SAMPLE, DIFFUSERS = "train.train_policy", "policy.diffusers.sample", "policy.diffusers"
CLIPPED = {"name": "remote", "clip_min": -5.0, "clip_max": 5.0}
DANCE = CLIPPED | {"reward_fn": "dance_grpo", "score_key": "overall_reward"}

NFT = {
    "policy.model_gradient_checkpointing": True,
    "policy.lora.init_lora_weights": "gaussian",
    f"{SAMPLE}.num_steps": 10,
    f"{SAMPLE}.eval_num_steps": 40,
    f"{SAMPLE}.guidance_scale": 1.0,
    f"{SAMPLE}.solver": "dpm2",
    "train.epsilon": 1e-8,
    "train.param_dtype": "bfloat16",
    "train.optm_lr": 3e-4,
    "train.optm_weight_decay": 1e-4,
    "train.optm_betas": [0.9, 0.999],
    "train.optm_grad_norm_clip": 1.0,
    "train.optm_warmup_steps": 0,
    "train.ema_enable": True,
    "train.ema_decay": 0.9,
    "train.ema_update_step_interval": 1,
    "train.ckpt.max_keep": 5,
    f"{POLICY}.type": "nft",
    f"{POLICY}.timesteps_fraction": 0.99,
    f"{POLICY}.nft_beta": 1.0,
    f"{POLICY}.weight_copy_decay_type": "linear",
    f"{POLICY}.advantage_low": -5.0,
    f"{POLICY}.advantage_high": 5.0,
    f"{POLICY}.global_std": False,
    f"{POLICY}.unbiased_std": True,
    f"{POLICY}.weight_copy_first_step": 1,
    "train.ema_first_step": 1,
    f"{POLICY}.dataset.name": "prompt_set",
    f"{POLICY}.dataset.split": "train",
    "logging.logger": ["console", "wandb"],
    "logging.project_name": "cosmos_rl",
}


def nft(model, targets, rank, alpha, length, size, frames, group, batch, prompts, kl_beta, mini_batch, fn, **more):
    return NFT | {
        "policy.model_name_or_path": model,
        "policy.lora.target_modules": targets,
        "policy.lora.r": rank,
        "policy.lora.lora_alpha": alpha,
        f"{DIFFUSERS}.max_prompt_length": length,
        f"{DIFFUSERS}.inference_size": size,
        f"{DIFFUSERS}.train_frames": frames,
        "rollout.n_generation": group,
        "train.train_batch_per_replica": batch,
        f"{POLICY}.dataset.set": prompts,
        f"{POLICY}.kl_beta": kl_beta,
        f"{POLICY}.mini_batch": mini_batch,
        "rewards": [{"fn": fn, "weight": 1.0}],
        **{f"train.{name}": value for name, value in more.items()},
    }


PICKSCORE = CLIPPED | {"reward_fn": "pickscore"}
ENDLESS = {"num_iterations": 1000, "seed": 42}


SAMPLED = {f"{DIFFUSERS}.posterior": "sample"}


def sft(model: str, size: list[int], frames: int, lr: float, epsilon: float, warmup: int, lora: Any = None) -> Any:
    adapters = dict(zip(("r", "lora_alpha", "target_modules"), lora or (), strict=False))
    return {
        "policy.model_name_or_path": model,
        "policy.model_gradient_checkpointing": True,
        **{f"policy.lora.{name}": value for name, value in adapters.items()},
        **({"policy.lora.init_lora_weights": "gaussian"} if lora else {}),
        f"{DIFFUSERS}.max_prompt_length": 300,
        f"{DIFFUSERS}.weighting_scheme": "logit_normal",
        f"{DIFFUSERS}.inference_size": size,
        f"{DIFFUSERS}.train_frames": frames,
        "train.param_dtype": "bfloat16",
        "train.optm_lr": lr,
        "train.epsilon": epsilon,
        "train.optm_warmup_steps": warmup,
        "train.optm_weight_decay": 0.01,
        "train.optm_betas": [0.9, 0.999],
        "train.optm_grad_norm_clip": 1.0,
        "train.train_batch_per_replica": 8,  # one on each of eight ranks
        "train.ckpt.max_keep": 5,
        f"{POLICY}.type": "sft",
        f"{POLICY}.mini_batch": 1,
        f"{POLICY}.steps_per_iteration": 10,  # to the next validation
        f"{SAMPLE}.eval_num_steps": 50,
        f"{SAMPLE}.guidance_scale": 4.5,
        "validation.freq": 1,
        "validation.n_generation": 1,
        "validation.dataset.name": "prompts",
        "validation.dataset.path": "local_dir",
        f"{POLICY}.dataset.name": "local",
        f"{POLICY}.dataset.local_dir": "local_validation_dir",
        f"{POLICY}.dataset.size": size,
        f"{POLICY}.dataset.frames": frames,
        "logging.logger": ["console", "wandb"],
        "logging.project_name": "cosmos_rl",
    }


def wfm(
    kind: str, name: str, size: list[int], batch: int, steps: int, train_on: list[int], media: Any, **more: Any
) -> Any:
    places = ("dataset", "data")
    return {
        "policy.model_name_or_path": f"{COSMOS}@diffusers/base/pre-trained",
        "policy.model_gradient_checkpointing": True,
        f"{DIFFUSERS}.max_prompt_length": 512,
        f"{DIFFUSERS}.inference_size": size,
        f"{DIFFUSERS}.train_frames": 93,
        f"{SAMPLE}.solver": "edm",
        f"{SAMPLE}.num_steps": steps,
        f"{SAMPLE}.guidance_scale": 1.0,
        "train.seed": 0,
        "train.num_iterations": 2001,
        "train.train_batch_per_replica": batch,
        "train.param_dtype": "bfloat16",
        "train.optm_lr": 1e-5,
        "train.optm_weight_decay": 1e-4,
        "train.optm_betas": [0.9, 0.99],
        "train.epsilon": 1e-8,
        "train.optm_grad_norm_clip": 1.0,
        "train.max_nonfinite_steps": 10,
        "train.optm_warmup_steps": 50,
        "train.optm_peak_after_warmup": True,
        "train.optm_warmup_start_factor": 1e-6,
        "train.optm_decay_type": "none",
        "train.ema_enable": True,
        "train.ema_rate": 0.1,
        f"{POLICY}.type": kind,
        f"{POLICY}.ratio_mode": "unnormalised",
        f"{POLICY}.mini_batch": 1,
        f"{POLICY}.loss_scale": 10.0,
        f"{POLICY}.clip_ratio": 1e-4,
        f"{POLICY}.train_on": train_on,
        f"{POLICY}.max_num_conditional_frames": 1,
        **{f"{POLICY}.{place}.{key}": held for place in places for key, held in media.items()},
        **{f"{POLICY}.{place}.size": size for place in places},
        **{f"{POLICY}.{place}.frames": 93 for place in places},
        "rollout.n_generation": 8,
        "rollout.n_generation_mini_batch": 1,
        "rollout.samples_per_shard": 1,
        "rewards": [{"fn": DANCE}],
        "logging.logger": ["console", "wandb"],
        "logging.project_name": "cosmos_rl_wfm",
        "logging.group_name": "official_runs_t2v",
        "logging.experiment_name": name,
    } | {key.replace("__", "."): value for key, value in more.items()}


def ddrl(name: str, **more: Any) -> Any:
    terms = {
        "kl_beta": 0.0,
        "data_beta": 0.01,
        "text_dropout": 0.2,
        "use_same_seed": False,
        "min_num_conditional_frames": 0,
    }
    media = {"name": "local", "local_dir": "path_to_your_local_dataset"}
    even = list(range(0, 20, 2))
    # 8 x 16 and 32 x 4 model instances; 720 x 1280 whatever the order it is written in.
    values = wfm("ddrl", name, [720, 1280], 128, 20, even, media, **more)
    return values | {f"{POLICY}.{key}": value for key, value in terms.items()}


def grpo(name: str, media: Any, **more: Any) -> Any:
    terms = {
        "kl_beta": 0.01, "kl_mode": "unnormalised", "data_beta": 0.0, "update_ref_every_iter": 16,
        "use_same_seed": True, "min_num_conditional_frames": 1,
    }  # fmt: skip
    values = wfm("grpo", name, [432, 768], 8, 10, list(range(8)), media, **more)
    return values | {f"{POLICY}.{key}": value for key, value in terms.items()}


FOURTEEN_B = "nvidia/Cosmos-Predict2.5-14B@diffusers/base/pre-trained"
WFM_DDRL = "cosmos-predict2-5-{}-720-reason-embedding-ddrl"
GRPO = "cosmos-predict2-5-2b-480-grpo"
SANA_LORA, SD3_LORA = (4, 4, SANA_TARGETS), (32, 64, SD3_TARGETS)
EXPECTED = {
    "sana-image-nft": nft(
        SANA, SANA_TARGETS, 4, 4, 300, [1024, 1024], 1, 24, 1152, "pickscore", 1e-4, 9, PICKSCORE, **ENDLESS
    ),
    "sana-video-nft": nft(
        SANA_VIDEO, SANA_TARGETS, 4, 4, 300, [480, 832], 81, 8, 384, "dance_grpo_t2v", 1e-4, 4, DANCE, **ENDLESS
    ),
    "stable-diffusion-3-5-medium-nft": nft(
        SD3, SD3_TARGETS, 32, 64, 128, [512, 512], 1, 24, 1152, "pickscore", 1e-4, 9, PICKSCORE, **ENDLESS
    ),
    "cosmos-predict2-5-2b-720-nft": nft(
        f"{COSMOS}@diffusers/base/post-trained", COSMOS_TARGETS, 32, 64, 512, [512, 512], 93, 12, 576, "pickscore", 1.0,
        6, DANCE,
    ),
    "sana-image-sft": sft(SANA, [1024, 1024], 1, 1e-4, 1e-5, 0),
    "sana-image-sft-lora": sft(SANA, [1024, 1024], 1, 1e-4, 1e-5, 0, SANA_LORA),
    "sana-video-sft": sft(SANA_VIDEO, [480, 832], 41, 1e-6, 1e-6, 20),
    "sana-video-sft-lora": sft(SANA_VIDEO, [480, 832], 41, 1e-6, 1e-6, 20, SANA_LORA),
    "stable-diffusion-3-5-image-sft": sft(SD3, [1024, 1024], 1, 1e-4, 1e-5, 0) | SAMPLED,
    "stable-diffusion-3-5-image-sft-lora": sft(SD3, [1024, 1024], 1, 1e-4, 1e-5, 0, SD3_LORA) | SAMPLED,
    WFM_DDRL.format("2b"): ddrl(WFM_DDRL.format("2b")),
    WFM_DDRL.format("14b"): ddrl(WFM_DDRL.format("14b"), policy__model_name_or_path=FOURTEEN_B),
    GRPO: grpo(GRPO, {"name": "local", "local_dir": "path_to_your_local_train_dataset"}),
    f"{GRPO}-mock-data": grpo(
        f"{GRPO}-mock-data", {"name": "mock"}, policy__from_scratch=True, train__num_iterations=25,
        train__optm_warmup_steps=1000,
    ),
}  # fmt: skip


def read(name: str) -> dict[str, Any]:
    return tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))


def flat(values: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(values, dict):
        for key, held in values.items():
            yield from flat(held, f"{name}.{key}".strip("."))
    else:
        yield name, values


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """A home without prompt sets."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("COSMOS_CACHE_DIR", raising=False)
    return tmp_path


def test_there_are_expectations_of_every_recipe():
    assert {path.stem for path in FOLDER.glob("*.toml")} == EXPECTED.keys()
    assert len(EXPECTED) == 14


@pytest.mark.parametrize("name", EXPECTED)
def test_a_recipe_has_the_values_that_the_documents_say(name: str, home: Path):
    translation = translate(read(name))
    assert translation.mistakes == []
    assert dict(flat(translation.values)) == EXPECTED[name]


@pytest.mark.parametrize("name", EXPECTED)
def test_every_key_of_a_recipe_is_reported_once_with_a_reason_or_a_setting(name: str):
    translation = translate(read(name))
    said = [entry for entry in translation.report if entry.said]
    assert len({entry.key for entry in said}) == len(said) == len(list(leaves(read(name))))
    assert all(entry.why or entry.settings for entry in translation.report)
    assert all(not entry.settings for entry in translation.of("no effect here"))


def leaves(values: Any) -> Iterator[Any]:
    if isinstance(values, dict) or (isinstance(values, list) and values and isinstance(values[0], dict)):
        for held in values.values() if isinstance(values, dict) else values:
            yield from leaves(held)
    else:
        yield values


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs").rglob("*.toml")), ids=lambda path: str(path.relative_to(ROOT))
)
def test_our_own_recipes_are_not_taken_for_cosmos_rls_and_survive_being_written(path: Path):
    values = tomllib.loads(path.read_text(encoding="utf-8"))
    assert schema_of(values) is None
    assert translation.translated(values, str(path)) is values
    assert tomllib.loads(toml.dumps(values)) == values


@pytest.mark.parametrize(("name", "schema"), [("sana-video-sft", "diffusers"), (GRPO, "wfm")])
def test_the_tables_of_a_file_tell_its_schema(name: str, schema: str):
    assert schema_of(read(name)) == schema


@pytest.mark.parametrize(
    "value",
    [
        {"a": '\x7f "quoted" \\ \n é 😀', "b.c": {"d": [1, 2.5, True, float("inf")]}, "e": {}},
        {"rows": [{"x": {"y": [{"z": "w"}]}}, {"x": 1}], "long": ["word" * 10] * 10},
    ],
)
def test_written_toml_reads_back(value: dict[str, Any]):
    assert tomllib.loads(toml.dumps(value)) == value
