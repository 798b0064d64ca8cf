"""Settings that a person wrote although nothing reads them, given the other settings. Defaults never count.

For recipes and cluster profiles only: a section that was written out whole has set all its fields.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cosmos_rl_core.algorithms._base import algorithm_of
from cosmos_rl_core.config.base import written
from cosmos_rl_core.config.policy import SolverConfig, TimeDensity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cosmos_rl_core.config.base import Section
    from cosmos_rl_core.config.launch import LaunchConfig
    from cosmos_rl_core.config.recipe import Recipe

_OF_ROLLOUTS = " ".join(name for name in SolverConfig.model_fields if name != "guidance_scale")


def unread(place: str, section: Section, *rows: tuple[bool, str, str]) -> Iterator[str]:
    """Yield a sentence for each row that holds and whose fields were set: condition, fields of ``section``, reason."""
    for holds, names, why in rows:
        if holds and (given := written(section, *names.split())):
            yield f"{', '.join(f'{place}.{name}' for name in given)} without effect: {why}"


def without_effect(recipe: Recipe) -> Iterator[str]:
    """Yield a sentence for each group of settings of a recipe that were written and that nothing reads."""
    yield from of_launch(recipe.launch)
    options = recipe.train.train_policy
    yield from (f"train.train_policy.{sentence}" for sentence in options.without_effect())
    for of in (_of_training, _of_levels, _of_sampling, _of_rewards):
        yield from of(recipe)


def of_launch(launch: LaunchConfig) -> Iterator[str]:
    """Yield a sentence for each group of settings of ``[launch]`` that were written and that nothing reads."""
    warm, other = launch.mode == "warm", f"launcher = {launch.launcher!r}"
    yield from unread(
        "launch",
        launch,
        (warm, "python", "mode = 'warm' forks the stages from the flow's interpreter"),
        (warm, "tf32", "mode = 'warm' computes on the CPU"),
        (launch.launcher != "slurm", "slurm", other),
        (launch.launcher != "kubernetes", "kubernetes", other),
    )
    if max([launch.processes, *launch.stage_processes.values()]) == 1 and launch.dp_shard_size > 1:
        yield f"launch.dp_shard_size = {launch.dp_shard_size} without effect: every stage is one process"
    if launch.launcher != "local":
        allocations = launch.allocations
        never_idle = (not allocations.hold, "idle_s", "hold = false ends allocations at once")
        yield from unread(f"launch.{launch.launcher}", allocations, never_idle)


def _of_training(recipe: Recipe) -> Iterator[str]:
    train = recipe.train
    decay = "optm_decay_ratio optm_min_lr_factor max_num_steps"
    average = "ema_decay ema_update_step_interval ema_rate ema_first_step"
    yield from unread(
        "train",
        train,
        (train.optm_decay_type == "none", decay, "optm_decay_type = 'none'"),
        (train.optm_warmup_steps == 0, "optm_warmup_start_factor", "optm_warmup_steps = 0"),
        (not train.ema_enable, average, "ema_enable is not true"),
        (train.ema_enable and train.ema_rate is not None, "ema_decay", "ema_rate replaces it"),
    )


def _of_levels(recipe: Recipe) -> Iterator[str]:
    """Yield sentences on the noise levels that media are trained at."""
    density, options = recipe.policy.diffusers, recipe.train.train_policy
    term = algorithm_of(options).needs.data_term
    no_media = options.rewarded and (term is None or term.as_rollout)
    uniform = not no_media and density.weighting_scheme == "uniform"
    why = (
        f"{options.type} draws no noise level of media here; supervised training does, and a diffusion loss with "
        "use_rl_sigma_and_noise = false"
    )
    yield from unread(
        "policy.diffusers",
        density,
        (no_media, " ".join(TimeDensity.model_fields), why),
        (uniform, "logit_mean logit_std", "weighting_scheme = 'uniform'"),
    )


def _of_sampling(recipe: Recipe) -> Iterator[str]:
    options, sample = recipe.train.train_policy, recipe.policy.diffusers.sample
    supervised, why = not options.rewarded, f"{options.type} makes no rollouts"
    no_samples = supervised and not _evaluates(recipe)
    noiseless = options.rewarded and sample.solver == "edm" and sample.s_churn == 0
    yield from unread(
        "policy.diffusers.sample",
        sample,
        (supervised, _OF_ROLLOUTS, why),
        (no_samples, "guidance_scale", f"{why}, nor evaluations"),
        (noiseless, "s_noise s_t_min s_t_max", "s_churn = 0 adds no noise"),
    )
    yield from unread(
        "rollout",
        recipe.rollout,
        (supervised, "n_generation n_generation_mini_batch", why),
        (no_samples, "samples_per_shard", "no samples are made"),
    )


def _of_rewards(recipe: Recipe) -> Iterator[str]:
    """Yield sentences on rewards and on held-out evaluation."""
    for reward in recipe.rewards:
        monitored = (reward.role == "monitor", "weight", "role = 'monitor' trains nothing")
        yield from unread(f"rewards ({reward.fn.label})", reward, monitored)
    if (validation := recipe.validation) is not None and not _evaluates(recipe):
        why = "without [[rewards]], of role 'monitor' in supervised training, no held-out samples are made"
        no_data = (validation.data is None, "seed batch_size", f"{why}, and data names no media")
        yield from unread("validation", validation, (True, "n_generation", why), no_data)


def _evaluates(recipe: Recipe) -> bool:
    return recipe.validation is not None and bool(recipe.rewards)
