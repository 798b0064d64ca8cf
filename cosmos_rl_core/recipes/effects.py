"""Settings that a person wrote although nothing reads them, given the other settings. Defaults never count.

Use it for recipes and cluster profiles only: in a section that a program wrote in full, every field counts as set.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cosmos_rl_core.algorithms._base import algorithm_of
from cosmos_rl_core.config.base import Section, written
from cosmos_rl_core.config.policy import SolverConfig, TimeDensity
from cosmos_rl_core.sampling.solvers import readers
from cosmos_rl_core.weights.parts import REFERENCE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from cosmos_rl_core.config.launch import LaunchConfig
    from cosmos_rl_core.config.recipe import Recipe

Row = tuple[str, Section, bool, str, str]
"""Place of a section; the section; whether nothing reads the fields; names of the fields, with spaces; the reason."""
_OF_ROLLOUTS = " ".join(name for name in SolverConfig.model_fields if name != "guidance_scale")


def without_effect(recipe: Recipe) -> Iterator[str]:
    """Yield a sentence for each group of settings that a recipe sets and nothing reads."""
    yield from of_launch(recipe.launch)
    options = recipe.train.train_policy
    yield from (f"train.train_policy.{sentence}" for sentence in options.without_effect())
    for rows in (_of_init, _of_training, _of_levels, _of_sampling, _of_rewards):
        yield from _sentences(rows(recipe))


def has_losses_on_media(recipe: Recipe) -> bool:
    """Return whether anything computes a diffusion loss on media: training, alone or with rewards, or validation."""
    options, validation = recipe.train.train_policy, recipe.validation
    trains = not options.rewarded or algorithm_of(options).needs.data_term is not None
    return trains or (validation is not None and validation.data is not None)


def of_launch(launch: LaunchConfig) -> Iterator[str]:
    """Yield a sentence for each group of settings of ``[launch]`` that were written and that nothing reads."""
    yield from _sentences(_of_launch(launch))
    if launch.most_ranks == 1 and launch.dp_shard_size > 1:
        yield f"launch.dp_shard_size = {launch.dp_shard_size} without effect: every stage is one process"


def _sentences(rows: Iterable[Row]) -> Iterator[str]:
    for place, section, holds, names, why in rows:
        # Looked up in every row, also an idle one, so that a renamed field fails any test that reads a recipe.
        given = written(section, *names.split())
        if holds and given:
            yield f"{', '.join(f'{place}.{name}' for name in given)} without effect: {why}"


def _of_launch(launch: LaunchConfig) -> Iterator[Row]:
    warm, why = launch.mode == "warm", "mode = 'warm' starts the stages by the flow's interpreter"
    yield "launch", launch, warm, "python", why
    yield "launch", launch, warm and launch.device == "cpu", "tf32", "device = 'cpu' computes on the CPU"
    yield "launch", launch, not warm, "resident_gb", "mode = 'cold' keeps no process"
    other = f"launcher = {launch.launcher!r}"
    yield "launch", launch, launch.launcher != "ray", "ray", other
    yield "launch", launch, launch.launcher == "local", "slurm", other
    yield "launch", launch, launch.launcher != "ray", "kubernetes", other
    for name, settings in {"": launch.slurm, **launch.slurm.stages}.items():
        place = f"launch.slurm.stages.{name}" if name else "launch.slurm"
        on_ray, of_job = launch.launcher == "ray", "partition time_limit_min options"
        yield place, settings, on_ray, "nodes gpus_per_node cpus_per_node srun_options", "launch.ray has the nodes"
        yield place, settings, not on_ray and bool(name), of_job, "all stages share one job"
    yield "launch.slurm", launch.slurm, launch.launcher == "ray", "work_dir", "Ray carries what stages need"


def _of_init(recipe: Recipe) -> Iterator[Row]:
    policy, options = recipe.policy, recipe.train.train_policy
    alone = policy.init_from is None
    yield "policy", policy, alone, "init_mode init_alpha reference", "there is no init_from"
    needs = algorithm_of(options).needs
    unread = not alone and REFERENCE not in (needs.behaviour, *needs.roles)
    yield "policy", policy, unread, "reference", f"{options.type} compares with no reference here"


def _of_training(recipe: Recipe) -> Iterator[Row]:
    train, why = recipe.train, "optm_decay_type = 'none'"
    decay = "optm_decay_ratio optm_min_lr_factor max_num_steps"
    average = "ema_decay ema_update_step_interval ema_rate ema_first_step"
    yield "train", train, train.optm_decay_type == "none", decay, why
    cold = train.optm_warmup_steps == 0
    yield "train", train, cold, "optm_warmup_start_factor", "optm_warmup_steps = 0"
    yield "train", train, not train.ema_enable, average, "ema_enable is not true"
    replaced = train.ema_enable and train.ema_rate is not None
    yield "train", train, replaced, "ema_decay", "ema_rate replaces it"


def _of_levels(recipe: Recipe) -> Iterator[Row]:
    """Yield rows about the noise levels at which media are trained."""
    density, options = recipe.policy.diffusers, recipe.train.train_policy
    term = algorithm_of(options).needs.data_term
    no_media = options.rewarded and (term is None or term.as_rollout)
    why = (
        f"{options.type} draws no noise level of media here; supervised training does, and a diffusion loss with "
        "use_rl_sigma_and_noise = false"
    )
    yield "policy.diffusers", density, no_media, " ".join(TimeDensity.model_fields), why
    no_samples = options.rewarded and term is None
    why_mode = f"{options.type} trains on no media here; given frames use the mode"
    yield "policy.diffusers", density, no_samples, "posterior", why_mode
    why_guidance = "nothing here is a loss on media"
    yield "policy.diffusers", density, not has_losses_on_media(recipe), "supervised_guidance_scale", why_guidance
    uniform, why = density.weighting_scheme == "uniform", "weighting_scheme = 'uniform'"
    yield "policy.diffusers", density, uniform and not no_media, "logit_mean logit_std", why


def _of_sampling(recipe: Recipe) -> Iterator[Row]:
    options, sample = recipe.train.train_policy, recipe.policy.diffusers.sample
    place, supervised = "policy.diffusers.sample", not options.rewarded
    why, no_samples = f"{options.type} makes no rollouts", supervised and not recipe.evaluates
    yield place, sample, supervised, _OF_ROLLOUTS, why
    yield place, sample, no_samples, "guidance_scale", f"{why}, nor evaluations"
    yield "policy.diffusers", recipe.policy.diffusers, no_samples, "cfg_normalization cfg_truncation", why
    noiseless = options.rewarded and sample.solver == "edm" and sample.s_churn == 0
    yield place, sample, noiseless, "s_noise s_t_min s_t_max", "s_churn = 0 adds no noise"
    by = "the pipeline's own solver" if sample.solver is None else f"solver = {sample.solver!r}"
    by_readers: dict[tuple[str, ...], list[str]] = {}
    for setting, names in readers().items():
        by_readers.setdefault(names, []).append(setting)
    for names, settings in by_readers.items():
        is_other = options.rewarded and sample.solver not in names
        told = f"{' and '.join(names)} {'does' if len(names) == 1 else 'do'}"
        yield place, sample, is_other, " ".join(settings), f"{by} does not read it; {told}"
    yield "rollout", recipe.rollout, supervised, "n_generation n_generation_mini_batch", why
    yield "rollout", recipe.rollout, no_samples, "samples_per_shard", "no samples are made"


def _of_rewards(recipe: Recipe) -> Iterator[Row]:
    """Yield rows about rewards and held-out evaluation."""
    none = "there are no samples to score: supervised training makes none, and validation.dataset names no prompts"
    for reward in recipe.rewards:
        place, why = f"rewards ({reward.fn.label})", f"role = {reward.role!r} adds nothing to the sum that trains"
        yield place, reward, reward.role != "train", "weight", why
        yield place, reward, reward.role != "gate", "max_gated_fraction", "only role = 'gate' holds samples back"
        yield place, reward, not (recipe.train.train_policy.rewarded or recipe.evaluates), "fn", none
        idle = not recipe.train.train_policy.rewarded
        yield place, reward, reward.overlap and idle, "overlap", "supervised training makes no rollouts"
    if (warning := recipe.early_warning) is not None and not recipe.train.train_policy.rewarded:
        yield "early_warning", warning, True, "on_trip limits", "supervised training makes no rollouts"
    if (validation := recipe.validation) is not None and not recipe.evaluates:
        why = "no held-out samples are made, because validation.dataset names no prompts"
        yield "validation", validation, True, "n_generation", why
