"""Settings that somebody wrote although nothing reads them beside the others. Values by default are never meant.

A section that was written out whole has set all its fields, so this is for recipes as people write them.
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
    from cosmos_rl_core.config.policy import SampleConfig
    from cosmos_rl_core.config.recipe import Recipe
    from cosmos_rl_core.config.train import AlgorithmOptions, EmaConfig, OptimizerConfig


def unread(place: str, section: Section, *names: str, why: str) -> Iterator[str]:
    """A sentence that names the fields of ``section`` that were set, if any was."""
    if given := written(section, *names):
        yield f"{', '.join(f'{place}.{name}' for name in given)} without effect: {why}"


def of_launch(launch: LaunchConfig) -> Iterator[str]:
    """Of a cluster profile or of ``[launch]``."""
    if launch.mode == "warm":
        yield from unread("launch", launch, "python", why="mode = 'warm' forks the stages from the flow's interpreter")
        yield from unread("launch", launch, "tf32", why="mode = 'warm' computes on the CPU")
    for name in ("slurm", "kubernetes"):
        if launch.launcher != name:
            yield from unread("launch", launch, name, why=f"launcher = {launch.launcher!r}")
    if max([launch.processes, *launch.stage_processes.values()]) == 1 and launch.dp_shard_size > 1:
        yield f"launch.dp_shard_size = {launch.dp_shard_size} without effect: every stage is one process"
    if launch.launcher != "local" and not launch.allocations.hold:
        why = "hold = false gives every allocation back at once"
        yield from unread(f"launch.{launch.launcher}", launch.allocations, "idle_s", why=why)


def of_optimizer(train: OptimizerConfig) -> Iterator[str]:
    """Of the learning rate's schedule."""
    if train.optm_decay_type == "none":
        decay = ("optm_decay_ratio", "optm_min_lr_factor", "max_num_steps")
        yield from unread("train", train, *decay, why="optm_decay_type = 'none'")
    if train.optm_warmup_steps == 0:
        yield from unread("train", train, "optm_warmup_start_factor", why="optm_warmup_steps = 0")


def of_average(train: EmaConfig) -> Iterator[str]:
    """Of the average of the weights."""
    if not train.ema_enable:
        yield from unread("train", train, "ema_decay", "ema_update_step_interval", why="ema_enable is not true")
    elif train.ema_rate is not None:
        yield from unread("train", train, "ema_decay", why=f"ema_rate = {train.ema_rate:g} takes its place")


def of_density(density: TimeDensity, algorithm: AlgorithmOptions) -> Iterator[str]:
    """Of the noise levels that media are trained at."""
    place = "policy.diffusers"
    term = algorithm_of(algorithm).needs.data_term
    if algorithm.rewarded and (term is None or term.as_rollout):
        yield from unread(
            place,
            density,
            *TimeDensity.model_fields,
            why=f"{algorithm.type} draws no noise level of media here; supervised training does, and a diffusion loss "
            "with use_rl_sigma_and_noise = false",
        )
    elif density.weighting_scheme == "uniform":
        yield from unread(place, density, "logit_mean", "logit_std", why="weighting_scheme = 'uniform'")


def of_sampling(sample: SampleConfig, algorithm: AlgorithmOptions, *, evaluates: bool) -> Iterator[str]:
    """Of rollouts and evaluations."""
    place = "policy.diffusers.sample"
    if not algorithm.rewarded:
        of_both = ("guidance_scale", "negative_prompt")
        of_rollouts = [name for name in SolverConfig.model_fields if name not in of_both]
        yield from unread(place, sample, *of_rollouts, why=f"{algorithm.type} makes no rollouts")
        if not evaluates:
            yield from unread(
                place, sample, "guidance_scale", why=f"{algorithm.type} makes no rollouts, nor evaluations"
            )
    elif sample.solver == "edm" and sample.s_churn == 0:
        yield from unread(place, sample, "s_noise", "s_t_min", "s_t_max", why="s_churn = 0 adds no noise")


def without_effect(recipe: Recipe) -> Iterator[str]:
    """Settings that were written and that nothing reads beside the others, each a sentence."""
    options, sample, validation = recipe.train.train_policy, recipe.policy.diffusers.sample, recipe.validation
    evaluates = validation is not None and bool(recipe.rewards)
    yield from of_launch(recipe.launch)
    yield from of_optimizer(recipe.train)
    yield from of_average(recipe.train)
    yield from (f"train.train_policy.{sentence}" for sentence in options.without_effect())
    yield from of_density(recipe.policy.diffusers, options)
    yield from of_sampling(sample, options, evaluates=evaluates)
    if not options.rewarded:
        names = ("n_generation", "n_generation_mini_batch")
        yield from unread("rollout", recipe.rollout, *names, why=f"{options.type} makes no rollouts")
        if not evaluates:
            yield from unread("rollout", recipe.rollout, "samples_per_shard", why="no samples are made")
    for reward in recipe.rewards:
        if reward.role == "monitor":
            yield from unread(f"rewards ({reward.fn.label})", reward, "weight", why="role = 'monitor' trains nothing")
    if validation is not None and not evaluates:
        why = "without [[rewards]], of role 'monitor' in supervised training, no held-out samples are made"
        yield from unread("validation", validation, "n_generation", why=why)
        if validation.data is None:
            yield from unread("validation", validation, "seed", "batch_size", why=f"{why}, and data names no media")
