"""Options whose value in an imported recipe is cosmos-rl's: the numbers of both, each computed by hand."""

import json
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn

from cosmos_rl_core import plugins
from cosmos_rl_core.config.train import EmaConfig, OptimizerConfig
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.importers.translation import translate
from cosmos_rl_core.recipes.reading import check
from cosmos_rl_core.training.optimizer import make_optimizer, optimizer_step
from cosmos_rl_core.training.schedules import ema_decay, lr_factor
from tests.core.importers.cosmos_rl.test_recipe_rows import DDRL, SD3, read, setting

SD3_SFT = "stable-diffusion-3-5-image-sft"
CPU = torch.device("cpu")


def nft(**options: Any) -> Any:
    plugin: Any = plugins.load("algorithms", "nft")
    values = {"type": "nft", "dataset": {"name": "ocr"}, "global_std": False} | options
    return plugin.Algorithm(plugin.Options.model_validate_json(json.dumps(values), strict=True))


def translated_optimizer(values: dict[str, Any]) -> OptimizerConfig:
    train = translate(values).values["train"]
    return OptimizerConfig(**{name: held for name, held in train.items() if name in OptimizerConfig.model_fields})


# ---- advantages


@pytest.mark.parametrize(
    ("rewards", "population", "sample"),
    [
        ([1.0, 3.0], 0.9999, 0.707057),
        ([0.0] * 12 + [1.0] * 12, 0.9998, 0.978753),
    ],
)
def test_a_services_rewards_are_divided_by_the_sample_deviation(rewards: list[float], population: float, sample: float):
    """The best advantage: 1 / (1 + 1e-4) and 1 / (sqrt(2) + 1e-4); .5 over .5 and over .5 sqrt(24 / 23), + 1e-4."""
    samples = pd.DataFrame({"sample_id": map(str, range(len(rewards))), "prompt_id": "a", "reward": rewards})
    samples["valid"] = True
    for unbiased, expected in ((False, population), (True, sample)):
        advantages = nft(unbiased_std=unbiased).advantages(samples)["advantage"]
        assert advantages.max() == pytest.approx(expected, abs=1e-6)
        assert advantages.min() == pytest.approx(-expected, abs=1e-6)


def test_imported_nft_takes_the_sample_deviation_where_a_service_scores():
    assert setting(read(SD3), "train.train_policy.unbiased_std") is True
    elsewhere = translate(read(SD3, train__train_policy__use_remote_reward=False)).values
    assert "unbiased_std" not in elsewhere["train"]["train_policy"]


# ---- schedules


def test_warm_up_and_decay_of_the_wfm_mode_are_cosmos_rls():
    """10 steps from .2 of the peak up, 40 down to .1: .2, .6, 1, .1 + .9 x 20 / 40 = .55, .1 + .9 / 40, .1, .1."""
    values = read(
        DDRL, scheduler__f_start=[0.2], scheduler__f_min=[0.1], scheduler__warm_up_steps=[10],
        scheduler__cycle_lengths=[50],
    )  # fmt: skip
    config = translated_optimizer(values)
    assert config.optm_peak_after_warmup
    found = [lr_factor(config, step) for step in (0, 5, 10, 30, 49, 50, 60)]
    assert found == pytest.approx([0.2, 0.6, 1, 0.55, 0.1225, 0.1, 0.1])
    ours = config.model_copy(update={"optm_peak_after_warmup": False})
    assert [lr_factor(ours, step) for step in (0, 5, 9, 10)] == pytest.approx([0.2, 0.2 + 0.8 * 5 / 9, 1, 1])


def test_the_cosine_of_the_wfm_mode_is_cosmos_rls_too():
    """Half way through the decay it is half way down, and at a quarter of it (1 + cos(pi / 4)) / 2 = .853553."""
    values = read(
        DDRL, scheduler__scheduler_type="lambda_warmpup_cos", scheduler__f_min=[0.0], scheduler__warm_up_steps=[10],
        scheduler__cycle_lengths=[50],
    )  # fmt: skip
    config = translated_optimizer(values)
    assert [lr_factor(config, step) for step in (10, 20, 30, 50)] == pytest.approx([1, 0.853553, 0.5, 0], abs=1e-6)


def test_a_peak_after_no_warm_up_is_refused_and_not_imported():
    with pytest.raises(ValueError, match="optm_peak_after_warmup = true needs optm_warmup_steps above 0"):
        OptimizerConfig(optm_peak_after_warmup=True)
    config = translated_optimizer(read(DDRL, scheduler__warm_up_steps=[0]))
    assert (config.optm_warmup_steps, config.optm_peak_after_warmup) == (0, False)


# ---- clocks


def test_imported_nft_counts_the_steps_of_the_average_from_1():
    """2/11, 3/12, 4/13 instead of 1/10, 2/11, 3/12; both end at the cap."""
    train = translate(read(SD3)).values["train"]
    fields: dict[str, Any] = {name: train[name] for name in ("ema_enable", "ema_decay", "ema_first_step")}
    found = [ema_decay(EmaConfig(**fields), step) for step in (0, 1, 2, 500)]
    assert found == pytest.approx([2 / 11, 0.25, 4 / 13, 0.9])
    fields["ema_first_step"] = 0
    found = [ema_decay(EmaConfig(**fields), step) for step in (0, 1, 2, 500)]
    assert found == pytest.approx([0.1, 2 / 11, 0.25, 0.9])


def test_an_interval_counts_from_the_first_step_like_the_average():
    """cosmos-rl averages after its steps 2, 5, 8, which are our 1, 4, 7."""
    config = EmaConfig(ema_enable=True, ema_first_step=1, ema_update_step_interval=3)
    assert [step for step in range(9) if ema_decay(config, step) is not None] == [1, 4, 7]
    assert ema_decay(config, 1) == pytest.approx(3 / 12)


@pytest.mark.parametrize(
    ("number", "kind", "expected"),
    [
        (1, "linear", {0: 0.001, 99: 0.1, 498: 0.499, 499: 0.5, 900: 0.5}),
        (2, "delayed", {0: 0, 74: 0, 75: 0.0075, 99: 0.1875, 208: 0.999}),
    ],
)
def test_imported_nft_counts_the_iterations_of_the_old_copy_from_1(number: int, kind: str, expected: dict[int, float]):
    values = read(SD3, policy__diffusers__weight_copy_decay_type=number)
    assert setting(values, "train.train_policy.weight_copy_decay_type") == kind
    first = setting(values, "train.train_policy.weight_copy_first_step")
    theirs = nft(weight_copy_decay_type=kind, weight_copy_first_step=first)
    ours = nft(weight_copy_decay_type=kind)
    for iteration, decay in expected.items():
        assert theirs.options.old_decay(iteration) == ours.options.old_decay(iteration + 1) == pytest.approx(decay)
    assert ours.options.old_decay(0) == 0


def test_a_first_step_without_effect_is_neither_imported_nor_accepted():
    values = read(SD3, policy__diffusers__weight_copy_decay_type=0, train__ema_enable=False)
    train = translate(values).values["train"]
    assert "ema_first_step" not in train
    assert "weight_copy_first_step" not in train["train_policy"]
    with pytest.raises(ValueError, match="weight_copy_decay_type = 'none' is always 0"):
        nft(weight_copy_decay_type="none", weight_copy_first_step=1)
    recipe = translate(read(SD3)).values
    recipe["train"]["ema_enable"] = False
    with pytest.raises(ConfigError, match=r"train\.ema_first_step without effect: ema_enable is not true"):
        check(recipe, "x.toml")


# ---- supervised steps


def test_supervised_clips_and_epsilons_are_scaled_to_mean_gradients():
    """cosmos-rl adds the gradients of a rank's 6 / 2 micro-batches: a clip of 1 there is one of a third here."""
    values = read(SD3_SFT, train__train_batch_per_replica=6, train__train_policy__mini_batch=2)
    config = translated_optimizer(values)
    assert config.optm_grad_norm_clip == pytest.approx(1 / 3)
    assert config.epsilon == pytest.approx(1e-5 / 3)
    assert config.optm_weight_decay == 0.01
    assert translated_optimizer(values | {"train": values["train"] | {"optm_name": "Adam"}}).optm_weight_decay == (
        pytest.approx(0.01 / 3)
    )
    # A file that says neither has cosmos-rl's clip of 1, and its two samples a micro-batch.
    silent = read(SD3_SFT, train__train_batch_per_replica=7, train__optm_grad_norm_clip=None)
    del silent["train"]["train_policy"]["mini_batch"]
    assert translated_optimizer(silent).optm_grad_norm_clip == 1 / 4
    assert translated_optimizer(read(SD3_SFT)).optm_grad_norm_clip == 1.0
    assert translated_optimizer(read(SD3)).optm_grad_norm_clip == 1.0


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
@pytest.mark.parametrize("size", [0.01, 0.4])
def test_steps_on_the_mean_then_equal_steps_on_the_sum(name: str, size: float):
    """Gradients below the clip and above it; an epsilon that counts."""
    changes: dict[str, Any] = {"train_batch_per_replica": 3, "optm_name": name, "epsilon": 0.01}
    values = read(
        SD3_SFT, train__train_policy__mini_batch=1, **{f"train__{key}": held for key, held in changes.items()}
    )
    config = translated_optimizer(values)

    def stepped(factor: float, clip: float, epsilon: float, decay: float) -> list[float]:
        weight = nn.Parameter(torch.tensor([1.0, -2.0], device=CPU))
        optimizer = make_optimizer(
            {"w": weight}, betas=(0.9, 0.999), eps=epsilon, weight_decay=decay, name=config.optm_name
        )
        for step in range(3):
            weight.grad = factor * size * torch.tensor([1.0 + step, -0.5], device=CPU)
            optimizer_step(optimizer, {"w": weight}, lr=0.1, max_norm=clip, group=None)
        return weight.tolist()

    theirs = stepped(3.0, 1.0, 0.01, 0.01)
    ours = stepped(1.0, config.optm_grad_norm_clip, config.epsilon, config.optm_weight_decay)
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert stepped(1.0, 1.0, 0.01, 0.01) != pytest.approx(theirs, rel=1e-3)
