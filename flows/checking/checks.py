"""Checks of a recipe against its model, its prompts and its rewards, and the choice of its solver."""

import difflib
import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain

from cosmos_rl_core import plugins
from cosmos_rl_core.config import early_warning
from cosmos_rl_core.config.early_warning import EarlyWarningConfig
from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.config.recipe import Recipe
from cosmos_rl_core.config.train import RewardConfig, RewardedOptions, SnapshotOptions
from cosmos_rl_core.datasets._base import Prompt
from cosmos_rl_core.errors import ArtifactError, ConfigError, CosmosRLError, Mistakes, UnavailableError, counted
from cosmos_rl_core.parallel import sequence_shares
from cosmos_rl_core.pipelines import checkpoints, directories, guidance, sizes
from cosmos_rl_core.pipelines.buckets import Size, buckets
from cosmos_rl_core.pipelines.sizes import Pictures
from cosmos_rl_core.rewards._base import LabelledReward, Reward
from cosmos_rl_core.sampling.schedule import check_flow
from cosmos_rl_core.sampling.solvers import own_levels, solver_of
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.sealed import RESTORE
from cosmos_rl_core.weights import lora
from cosmos_rl_core.weights.shapes import matrices_of, weight_shapes
from flows.checking import references
from flows.sizes import costs
from stages.artifacts.records import ROOTS

SHOWN = 5
"""Prompts that an error lists."""
Misfits = Callable[[LaunchConfig, Sequence[str]], Sequence[str]]
"""Function that returns a message for each mistake by which stages do not fit the devices."""


def stages_of(recipe: Recipe) -> list[str]:
    """Return the stages with torch that a run of this recipe may have."""
    validation = recipe.validation
    asked = {
        "policy": True,
        "embed": True,
        "encode": costs.needs_data(recipe) or (validation is not None and validation.data is not None),
        "rollout": recipe.train.train_policy.rewarded,
        "judge": any(reward.fn.facts.torch for reward in recipe.rewards),
        "update": recipe.train.train_policy.rewarded,
        "finetune": not recipe.train.train_policy.rewarded,
        "export": True,
        "validate": validation is not None and validation.data is not None,
        "evaluate": recipe.evaluates,
    }
    return [stage for stage, runs in asked.items() if runs]


def refusal(source: str, mistakes: Mistakes, damages: Sequence[str] = ()) -> CosmosRLError:
    """Return the error with every mistake. Damaged files and unreachable services are no mistakes in the recipe."""
    advice = ["fetch the model again, or another copy of these files"] if damages else []
    lines = [f"{source}:", *(f"  {mistake}" for mistake in [*mistakes, *mistakes.unreached, *damages, *advice])]
    kind = ConfigError if mistakes else ArtifactError if damages else UnavailableError
    return kind("\n".join(lines))


def check_training(recipe: Recipe, prompts: Sequence[Prompt], mistakes: Mistakes) -> None:
    """Add rewards that cannot score the prompts, and settings of sampler and algorithm that do not fit together."""
    for reward in recipe.rewards:
        mistakes.catch(check_prompts, reward, prompts)
        mistakes.catch(_check_version, reward)
    if recipe.train.train_policy.rewarded:
        mistakes.catch(lambda: _check_needs(recipe))
        mistakes.catch(_check_pairs, recipe)
    mistakes.catch(_check_dropout, recipe)


def check_model(
    recipe: Recipe,
    trained: Sequence[Prompt],
    evaluated: Sequence[Prompt],
    media: Sequence[Sequence[Prompt]],
    mistakes: Mistakes,
) -> Pictures:
    """Add mistakes: settings that the model cannot follow, and artifacts that exceed the storage budget.

    ``trained`` and ``evaluated`` are prompts; ``media`` has the captions of media, trained on and held out.
    Return the sizes of the largest references of a prompt.
    """
    path, diffusers = costs.base_path(recipe), recipe.policy.diffusers
    mistakes.catch(directories.check_runs, path)
    mistakes.catch(checkpoints.check, path)
    mistakes.catch(directories.check_guardrail, path, diffusers.guardrail)
    if diffusers.complex_human_instruction is not None:
        mistakes.catch(directories.check_takes_instruction, path)
    mistakes.catch(sizes.check_prompt_length, path, diffusers.max_prompt_length)
    mistakes.catch(guidance.check, path, diffusers)
    if recipe.validation is not None:
        scale = diffusers.sample.guidance_scale
        mistakes.catch(guidance.stock_scale, directories.spec(path), scale)
    for check in (_check_given_frames, _check_posterior, buckets_of, costs.policy_parts, _check_shared_videos):
        mistakes.catch(check, recipe)
    mistakes.catch(_check_decoded, recipe)
    pictures = mistakes.catch(references.check, recipe, trained, evaluated, media) or ()
    mistakes.catch(_check_joined_inputs, recipe)
    others = {prompt.id for prompt in chain(*media)} - {prompt.id for prompt in trained}
    embedded = costs.embedded_prompts(recipe, len(trained)) + len(others)
    size = partial(costs.embedding_bytes, pictures=pictures)
    mistakes.catch(costs.check_budget, recipe, "text embeddings", embedded, size, "take fewer prompts")
    if recipe.train.train_policy.rewarded:
        advice = "keep fewer rollouts (rollout.keep.tensors), or train on fewer steps"
        samples = ("rollouts", costs.kept_samples(recipe), costs.sample_bytes, advice)
        mistakes.catch(costs.check_budget, recipe, *samples)
    return pictures


def _check_joined_inputs(recipe: Recipe) -> None:
    """Raise :class:`ConfigError` for dropout of a module that gets the tokens of all samples of a batch in a row."""
    config, path = recipe.policy.lora, costs.base_path(recipe)
    joined = {*directories.spec(path).joined_inputs}
    if config is None or config.lora_dropout == 0 or not joined:
        return
    if found := sorted(joined & {*lora.adapted(config, matrices_of(weight_shapes(path)))}):
        raise ConfigError(
            f"policy.lora.lora_dropout = {config.lora_dropout:g}: {', '.join(found)} of this model gets the texts of a "
            "batch in a row, each with its own length, so no mask is one sample's; leave it out of "
            "policy.lora.target_modules, or set lora_dropout = 0"
        )


def _check_decoded(recipe: Recipe) -> None:
    """Raise :class:`ConfigError` if rollouts decode a share of their samples though something reads all pixels."""
    share, frames = recipe.rollout.decode_share, recipe.policy.diffusers.train_frames
    if share == 1 or not recipe.train.train_policy.rewarded:
        return
    setting = f"rollout.decode_share = {share:g}"
    on_pixels = [one.fn.label for one in recipe.rewards if one.fn.reads(frames) == "media"]
    if on_pixels:
        raise ConfigError(f"{setting}: {', '.join(on_pixels)} read the pixels of every sample; leave decode_share out")
    if directories.has_guardrail(costs.base_path(recipe), recipe.policy.diffusers.guardrail):
        raise ConfigError(f"{setting}: the model's guardrail checks every video; leave decode_share out")


def _check_pairs(recipe: Recipe) -> None:
    """Raise :class:`ConfigError` if forward passes would divide pairs, or if optimizer steps would have none."""
    options, needs = recipe.train.train_policy, costs.needs_of(recipe)
    if needs.unit == "sample" or not isinstance(options, RewardedOptions):
        return
    if options.tokens_per_forward is None and options.mini_batch % 2:
        raise ConfigError(
            f"train.train_policy.mini_batch = {options.mini_batch} divides a pair: {options.type} trains on two "
            "samples together; make it even"
        )
    planned, most = costs.optimizer_steps(recipe, options), costs.most_units(recipe)
    if planned > most:
        raise ConfigError(
            f"train.train_policy.batch_size_per_optimize = {options.batch_size_per_optimize} plans {planned} optimizer "
            f"steps of each rollout, which has at most {counted(most, 'pair')}; each step needs one: raise it"
        )


def _check_dropout(recipe: Recipe) -> None:
    """Raise :class:`ConfigError` for LoRA dropout with an algorithm that trains on a ratio, or with shared tokens."""
    lora, policy = recipe.policy.lora, recipe.train.train_policy
    if lora is None or lora.lora_dropout == 0:
        return
    setting = f"policy.lora.lora_dropout = {lora.lora_dropout:g}"
    if recipe.launch.cp_size > 1:
        raise ConfigError(
            f"{setting} draws one mask for all tokens of a video; with launch.cp_size = {recipe.launch.cp_size} no "
            "process has all of them. Set one of the two to its default"
        )
    if costs.needs_of(recipe).transitions:
        raise ConfigError(
            f"{setting}: {policy.type} trains on the ratio of the policy's density to the rollout's. It must be "
            "exactly 1 until weights move; dropout adds noise to it. Set it to 0"
        )


def _check_shared_videos(recipe: Recipe) -> None:
    """Raise :class:`ConfigError` if ``launch.cp_size`` processes cannot share a video of this model and size."""
    num_peers, diffusers = recipe.launch.cp_size, recipe.policy.diffusers
    if num_peers == 1:
        return
    path = costs.base_path(recipe)
    spec, transformer = directories.spec(path), directories.settings(path, "transformer")
    for size in {diffusers.inference_size: None} | dict.fromkeys(buckets_of(recipe)):
        shape = sizes.latent_shape(path, size, diffusers.train_frames)
        try:
            sequence_shares.check(spec, transformer, shape, num_peers)
        except ConfigError as error:
            raise ConfigError(f"launch.cp_size = {num_peers}: {error}") from error


def buckets_of(recipe: Recipe) -> tuple[Size, ...]:
    """Return the sizes that media are cut to, each to the nearest; empty if all have one size.

    Raises :class:`ConfigError` for sizes that the model cannot train on, and for media of rollouts.
    """
    policy, validation = recipe.train.train_policy, recipe.validation
    media = [policy.dataset, getattr(policy, "data", None), validation and validation.data]
    cut = [isinstance(options, SnapshotOptions) and options.crop == "buckets" for options in media]
    if cut[1]:
        raise ConfigError(
            f"train.train_policy.data: crop = 'buckets' gives media of several sizes, and rollouts of {policy.type} "
            "have one, inference_size; set it to 'centre'"
        )
    diffusers = recipe.policy.diffusers
    return buckets(costs.base_path(recipe), diffusers.inference_size, diffusers.train_frames) if any(cut) else ()


def _check_given_frames(recipe: Recipe) -> None:
    """Raise :class:`ConfigError` for more given frames than the model takes, or if none remain to generate."""
    most, frames = recipe.train.train_policy.given_frames[1], recipe.policy.diffusers.train_frames
    if most == 0:
        return
    path = costs.base_path(recipe)
    setting = f"train.train_policy.max_num_conditional_frames = {most}"
    if most > (able := directories.spec(path).max_given_frames):
        takes = f"{directories.pipeline_class(path)} takes {f'at most {able}' if able else 'no'}"
        raise ConfigError(f"{setting}: {takes} given latent frames; lower it")
    _, total, _, _ = sizes.latent_shape(path, recipe.policy.diffusers.inference_size, frames)
    if most >= total:
        raise ConfigError(
            f"{setting} leaves none of {total} latent frames (train_frames = {frames}) to generate; lower it, or raise "
            "policy.diffusers.train_frames"
        )


def _check_posterior(recipe: Recipe) -> None:
    """Raise :class:`ConfigError` if latents are to be sampled from a posterior, which the model's VAE does not have."""
    if recipe.policy.diffusers.posterior == "mode":
        return
    path = costs.base_path(recipe)
    known, vae = directories.spec(path).vaes, directories.settings(path, "vae").get("_class_name", "none")
    if vae not in known or not known[vae].posterior:
        raise ConfigError(
            f"policy.diffusers.posterior = 'sample': {vae}, the VAE of this model, has no posterior; set it to 'mode'"
        )


def _check_version(reward: RewardConfig) -> None:
    """Raise :class:`ConfigError` if a reward's files are missing, its version is no string, or it may not train."""
    kind = plugins.load("rewards", reward.fn.name)
    with plugins.errors_of("rewards", reward.fn.name):
        plugin = kind.Reward(reward.fn)
        if not isinstance(plugin.version, str):
            raise ConfigError(f"{reward.fn.label}: version must be a string, found {plugin.version!r}")
        _agreement(reward, plugin)


def check_prompts(reward: RewardConfig, prompts: Sequence[Prompt]) -> None:
    """Raise :class:`ConfigError` for a reward that cannot score some of the prompts."""
    kind = plugins.load("rewards", reward.fn.name)
    with plugins.errors_of("rewards", reward.fn.name):
        plugin = kind.Reward(reward.fn)
        answers = {prompt.id: plugin.check_prompt(prompt) for prompt in prompts}
    if reasons := [f"prompt {name}: {why}" for name, why in answers.items() if why is not None]:
        more = f" (and {len(reasons) - SHOWN} more)" if len(reasons) > SHOWN else ""
        shown = "; ".join(reasons[:SHOWN])
        raise ConfigError(f"{reward.fn.label} cannot score {counted(len(reasons), 'prompt')}: {shown}{more}")


def agreements(recipe: Recipe) -> list[str]:
    """Return how far the judges that train agree with labels of people, a line each."""
    found = {
        one.fn.label: _agreement(one, plugins.load("rewards", one.fn.name).Reward(one.fn)) for one in recipe.rewards
    }
    return [f"{label}: {line}" for label, line in found.items() if line]


def _agreement(reward: RewardConfig, plugin: Reward) -> str:
    """Return how far a reward that trains agrees with labels; "" for any other.

    Raises :class:`ConfigError` if it must be compared with labels first.
    """
    return plugin.agreement() if reward.role == "train" and isinstance(plugin, LabelledReward) else ""


def _check_needs(recipe: Recipe) -> None:
    costs.needs_of(recipe).check(recipe.policy.diffusers.sample.rollout, recipe.train.num_iterations)


def with_solver(recipe: Recipe) -> Recipe:
    """Return the recipe with the name of its solver.

    Raises :class:`ConfigError` if the scheduler of the pipeline has no noise levels of a flow, if the recipe names no
    solver and none here equals the scheduler, or if the scheduler's settings make it differ from the solver.
    """
    sample = recipe.policy.diffusers.sample
    path = costs.base_path(recipe)
    scheduler, settings = directories.scheduler(path)
    spec = directories.spec(path)
    told = {
        "by_size": spec.shift is not None,
        "always": spec.always_shifts,
        "given": spec.stock_sigmas(sample.num_steps, settings),
    }
    if not recipe.train.train_policy.rewarded:
        # Without rollouts the solver changes nothing; a fixed name keeps the identity of these runs.
        check_flow(scheduler, settings, **told)
        return _named(recipe, sample.solver or "euler")
    if not own_levels(sample.solver):
        check_flow(scheduler, settings, **told)
    return _named(recipe, solver_of(sample.solver, scheduler, settings))


def _named(recipe: Recipe, solver: str) -> Recipe:
    policy, diffusers = recipe.policy, recipe.policy.diffusers
    sample = diffusers.sample.model_copy(update={"solver": solver})
    diffusers = diffusers.model_copy(update={"sample": sample})
    return recipe.model_copy(update={"policy": policy.model_copy(update={"diffusers": diffusers})})


def with_pinned_files(recipe: Recipe) -> Recipe:
    """Return the recipe with the digests of the files that its algorithm reads.

    Raises :class:`ConfigError` if they cannot be used.
    """
    pinned = recipe.train.train_policy.pinned()
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"train_policy": pinned})})


def early_warning_of(recipe: Recipe) -> EarlyWarningConfig | None:
    """Return the limits with the default ones; None for supervised training, which makes no rollouts."""
    if not recipe.train.train_policy.rewarded:
        return None
    return early_warning.with_defaults(recipe.early_warning, recipe.policy.diffusers.train_frames)


def nothing_to_size(model: str) -> str:
    """Return the sentence for a base model that is not here, with how to get its config files."""
    command = directories.download_command(model)
    hint = f"; config files are enough for a plan: {command} --include '*.json'" if command else ""
    return f"the model is not here, so sizes and memory cannot be planned{hint}"


def misnamed(run_id: str) -> list[str]:
    """Return a message if a text cannot be the name of a run; else an empty list."""
    is_name = re.fullmatch(r"[.-]*\w[\w.-]*", run_id) is not None
    return [] if is_name else [f"run id {run_id!r} must be letters, digits, '-', '_' and '.'"]


LONGEST_ID, ENDING = 100, 9
"""Most characters of a run's name, and characters of the dash and the digest at the end of a default name."""


def unfit(name: str, *, is_whole: bool) -> list[str]:
    """Return a message if a new run cannot have a name, or a default name with this beginning; else an empty list."""
    if mistakes := misnamed(name):
        return mistakes
    most = LONGEST_ID if is_whole else LONGEST_ID - ENDING
    if not name.isascii() or len(name) > most:
        found = f"run id {name!r} must have at most {most} characters, and no letters but a to z and A to Z"
        return [found if is_whole else f"{found}; name another with --run-id"]
    # A part of a path with one of these names would pass for the folder of all runs, or of all datasets.
    return [f"run id {name!r} is the name of a folder in every store; name another"] if name in ROOTS else []


BEFORE_A_PLAN = {".probe", "lease"}
"""Folders of a run that may exist before its plan."""
LISTED = 10
"""Runs that an error lists."""


def no_plan(root: str, run_id: str, url: str) -> CosmosRLError:
    """Return the error for a run of the store ``root`` without a plan at ``url``.

    It is an :class:`ArtifactError` if the run has other files, else a :class:`ConfigError` that lists the runs.
    """
    runs = store.join(root, "runs")
    if others := {one for one in store.names(store.join(runs, run_id)) - BEFORE_A_PLAN if not store.is_temporary(one)}:
        return ArtifactError(f"{url} is missing, but there is {min(others)}; {RESTORE}")
    found = sorted(store.names(runs) - {run_id})
    more = f" and {len(found) - LISTED} more" if len(found) > LISTED else ""
    known = f"it has {', '.join(found[:LISTED])}{more}" if found else "it has no run at all"
    hint = "name another --store, or start it with `cosmos-flows run`"
    if close := difflib.get_close_matches(run_id, found, n=1):
        hint = f"did you mean {close[0]!r}?"
    return ConfigError(f"there is no run {run_id!r} in the store {root}; {known}; {hint}")
