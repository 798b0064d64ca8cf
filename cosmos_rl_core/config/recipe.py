"""A recipe: the TOML file that defines a run. Reading is strict and reports all mistakes at once."""

import difflib
import json
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from pydantic import BaseModel, Field, ValidationError, ValidationInfo, model_validator

from cosmos_rl_core import shipped
from cosmos_rl_core.config import early_warning, effects, toml
from cosmos_rl_core.config.base import NOT_IDENTITY, Section, expanded
from cosmos_rl_core.config.early_warning import EarlyWarningConfig
from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.config.policy import NOT_IN_LORA, PolicyConfig
from cosmos_rl_core.config.train import (
    AnyAlgorithm,
    EmaConfig,
    OptimizerConfig,
    RewardConfig,
    RewardedOptions,
    ValidationConfig,
)
from cosmos_rl_core.errors import ConfigError, Mistakes
from cosmos_rl_core.importers.cosmos_rl.translation import translated


class CkptConfig(Section):
    """Retention and exports of policies."""

    max_keep: int | None = Field(default=None, ge=1, json_schema_extra=NOT_IDENTITY)
    """Number of newest policies that keep optimizer, ``old`` and ``reference``. Older ones keep weights and average
    only, so that training cannot continue from them. Default: all."""
    export_every: int | None = Field(default=None, ge=1, json_schema_extra=NOT_IDENTITY)
    """Number of iterations between exports of the weights as diffusers loads them: a LoRA, or a whole pipeline.
    ``cosmos-flows export`` copies them out. The base, the final policy and those of ``validation.freq`` are always
    exported. Default: no others."""


class TrainConfig(OptimizerConfig, EmaConfig):
    """Training: length, batch, optimizer and algorithm."""

    ckpt: CkptConfig = Field(default=CkptConfig(), json_schema_extra=NOT_IDENTITY)
    """Retention and exports of policies."""

    seed: int = Field(default=0, ge=0)
    """Seed of every random draw of the run."""
    num_iterations: int = Field(ge=1, json_schema_extra=NOT_IDENTITY)
    """Number of iterations. Raise it to continue a finished run."""
    max_gpu_hours: float | None = Field(default=None, gt=0, json_schema_extra=NOT_IDENTITY)
    """Device hours after which a run stops: before the iteration that would exceed them. A rank on a CPU counts as a
    device. Raise it to continue. Default: no limit."""
    staleness: int = Field(default=0, ge=0)
    """Age of the policy that makes rollouts: rollout k uses policy k minus staleness. From 1 on, rollout k + 1 runs
    beside update k, which is faster and off-policy."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of transformer computations in rollouts, updates and held-out losses: ``bfloat16`` is faster and
    less exact. Weights, states, losses, gradient sums and evaluations are always float32."""
    train_batch_per_replica: int = Field(default=8, ge=1)
    """Number of samples of an iteration over all ranks: prompts times ``rollout.n_generation``. In SFT, of an
    optimizer step."""
    train_policy: AnyAlgorithm
    """The algorithm and its settings."""


class KeepConfig(Section):
    """Retention of the large parts of rollouts. Deleted parts can only be generated again."""

    tensors: int | None = Field(default=None, ge=1)
    """Number of newest rollouts that keep final latents and recorded steps. An update reads those of its own
    rollout only; training on a rollout again, or scoring its latents again, needs them. Default: all."""
    media: int | None = Field(default=None, ge=1)
    """Number of newest rollouts that keep pictures or videos. The report shows these only, and scoring pixels again
    needs them. Default: all."""


class RolloutConfig(Section):
    """Number of samples, and their division into batches and files."""

    n_generation: int = Field(default=16, ge=2)
    """Number of samples per prompt: the group within which advantages are relative."""
    n_generation_mini_batch: int = Field(default=8, ge=1)
    """Number of samples in one forward pass. Changes memory, speed and the last bits of results."""
    samples_per_shard: int = Field(default=32, ge=1)
    """Number of samples in one file. A retry makes incomplete files again."""
    keep: KeepConfig = Field(default=KeepConfig(), json_schema_extra=NOT_IDENTITY)
    """Number of rollouts that keep tensors and media."""
    store_budget_gb: float = Field(default=1000.0, gt=0, json_schema_extra=NOT_IDENTITY)
    """Maximum size of the planned rollouts without pictures, and of the text embeddings, in units of 10^9 bytes.
    Planning refuses to exceed it."""


class LoggingConfig(Section):
    """Destinations of a run's metrics, besides ``metrics.jsonl``, which every run writes."""

    logger: tuple[Literal["console", "wandb"], ...] = ()
    """``console`` prints every new line of metrics. ``wandb`` sends them to Weights & Biases with the account and mode
    (online, offline) from wandb's environment variables; it needs the extra ``tracking``."""
    project_name: str = Field(default="cosmos_rl", min_length=1)
    """Name of the project on wandb."""
    group_name: str | None = None
    """Group of the run on wandb. Default: no group."""
    experiment_name: str | None = None
    """Name of the run on wandb. Default: the run's id."""


class Recipe(Section):
    """Definition of a run."""

    plugins: tuple[str, ...] = Field(default=(), json_schema_extra=NOT_IDENTITY)
    """Files or folders of plugins outside the package: algorithms, rewards, datasets, models. Relative paths start
    at the recipe's folder, on the command line at the working directory. The plan pins the digests of the files."""
    policy: PolicyConfig
    """The model and its trained part."""
    train: TrainConfig
    """Length, batch, optimizer and algorithm."""
    rollout: RolloutConfig = RolloutConfig()
    """Number of samples, and their division into batches and files."""
    rewards: tuple[RewardConfig, ...] = ()
    """The rewards, each a table ``[[rewards]]``."""
    early_warning: EarlyWarningConfig | None = Field(default=None, json_schema_extra=NOT_IDENTITY)
    """Limits on the scores of rollouts, judged before each update. Default: those on statistics of pixels, marked."""
    validation: ValidationConfig | None = None
    """Held-out evaluation. Default: none."""
    launch: LaunchConfig = Field(default=LaunchConfig(), json_schema_extra=NOT_IDENTITY)
    """Processes and machines."""
    logging: LoggingConfig = Field(default=LoggingConfig(), json_schema_extra=NOT_IDENTITY)
    """Destinations of metrics."""

    @model_validator(mode="after")
    def _check(self, info: ValidationInfo) -> "Recipe":
        if mistakes := list(_mistakes(self)):
            # Alone they are no reason to look no further.
            idle = effects.without_effect(self) if info.context == _WRITTEN else ()
            raise ValueError("\n".join([*mistakes, *idle]))
        return self

    @property
    def prompts_per_iteration(self) -> int:
        """Return the number of prompts of a rollout."""
        return self.train.train_batch_per_replica // self.rollout.n_generation

    @property
    def evaluates(self) -> bool:
        """Return whether exported policies generate samples from held-out prompts."""
        return self.validation is not None and self.validation.dataset is not None


def _mistakes(recipe: Recipe) -> Iterator[str]:
    """Yield a sentence for each combination of settings that cannot work."""
    train, options, rewards = recipe.train, recipe.train.train_policy, recipe.rewards
    batch, group = train.train_batch_per_replica, recipe.rollout.n_generation
    the_batch = f"train.train_batch_per_replica = {batch}"
    the_group = f"rollout.n_generation = {group}"
    training = [reward for reward in rewards if reward.role == "train"]
    if any(reward.role != "monitor" for reward in rewards) and not options.rewarded:
        yield f"{options.type} trains on data: give its rewards role = 'monitor'"
    if isinstance(options, RewardedOptions):
        if batch % group:
            yield f"{the_batch} is not a multiple of {the_group}"
        if not training:
            yield f"{options.type} needs at least one [[rewards]] with role = 'train'"
        smallest = getattr(options, "min_group_size", 0)
        if smallest > group:
            yield f"train.train_policy.min_group_size = {smallest} drops every prompt: {the_group}"
        if (per_step := options.batch_size_per_optimize) and batch % per_step:
            divisor = f"train.train_policy.batch_size_per_optimize = {per_step}"
            yield f"{the_batch} is not a multiple of {divisor}"
    if weightless := [reward.fn.label for reward in training if reward.weight == 0]:
        yield f"rewards of weight 0 train nothing: {', '.join(weightless)}; give them role = 'monitor'"
    names = [reward.fn.label for reward in rewards]
    if recipe.validation is not None:
        yield from recipe.validation.mistakes(names, trains=bool(training))
    if recipe.early_warning is not None:
        yield from early_warning.mistakes(recipe.early_warning, {r.fn.label: r.fn.facts.scores for r in rewards})
    if len(set(names)) != len(names):
        yield f"two rewards have the same name: {', '.join(names)}"
    gates = [reward.fn.label for reward in rewards if reward.role == "gate"]
    if gates and getattr(options, "parity_advantages", False):
        yield f"train.train_policy.parity_advantages gives excluded samples a number, also those of {', '.join(gates)}"
    weights = {abs(reward.weight) for reward in training}
    if getattr(options, "reward_average", False) and len(weights) > 1:
        found = ", ".join(f"{weight:g}" for weight in sorted(weights))
        advice = "set it to false, or make the weights equal"
        yield f"rewards weigh {found}, but train.train_policy.reward_average uses signs only; {advice}"
    if recipe.policy.from_scratch and recipe.policy.lora is not None:
        yield "policy.from_scratch draws all weights anew; leave [policy.lora] out"
    if recipe.policy.from_scratch and recipe.policy.init_from is not None:
        yield "policy.from_scratch draws all weights anew, policy.init_from names trained ones; leave one of them out"
    if recipe.policy.init_mode == "stack" and recipe.policy.lora is None:
        yield "policy.init_mode = 'stack' trains a new adapter: add [policy.lora], or set it to 'continue'"
    keep, staleness = train.ckpt.max_keep, f"train.staleness = {train.staleness}"
    if keep is not None and keep <= train.staleness:
        yield f"train.ckpt.max_keep = {keep} drops policies that rollouts still need at {staleness}"
    if train.staleness:
        yield from _stale_mistakes(recipe)


def _stale_mistakes(recipe: Recipe) -> Iterator[str]:
    train, staleness = recipe.train, f"train.staleness = {recipe.train.staleness}"
    gpus = recipe.launch.stage_gpus
    update, rollout = set(gpus.get("update", ())), set(gpus.get("rollout", ()))
    if not train.train_policy.rewarded:
        yield f"{staleness}: {train.train_policy.type} makes no rollouts"
    if update & rollout or bool(update) != bool(rollout):
        found = f"found update {sorted(update)}, rollout {sorted(rollout)}"
        expected = "give both GPUs of their own in launch.stage_gpus"
        yield f"{staleness} runs rollout beside update: {expected}, {found}"
    if train.staleness >= train.num_iterations:
        num_iterations = f"train.num_iterations = {train.num_iterations}"
        yield f"{staleness} samples every rollout of {num_iterations} from the base policy; use 1 or 2"


Values = dict[str, Any]
"""Plain values of a TOML file."""
_WRITTEN = "written by a person"
"""Validation context of recipes from TOML, whose set fields are those that a person wrote."""


def read_values(
    path: str, overrides: Sequence[str] = (), cluster: str | None = None, mistakes: Mistakes | None = None
) -> Values:
    """Return the plain values of a TOML recipe with overrides ``a.b.c=value`` (TOML values; bare words are strings).

    Files of cosmos-rl are translated first. ``cluster`` is a TOML file whose ``[launch]`` replaces the recipe's. Raises
    :class:`ConfigError` if the file is missing or not TOML, or if a key of cosmos-rl cannot be translated. What is
    wrong with overrides, with ``cluster`` and with values beyond the limits of TOML files is added to ``mistakes``, so
    that others can be found beside it; without ``mistakes`` it raises, too.
    """
    file = shipped.path_of(path, "recipe")
    values = translated(read_toml(file, shipped.EXAMPLE, mistakes), path)
    return with_changes(values, file, overrides, cluster, mistakes)


def with_changes(
    values: Values, file: Path, overrides: Sequence[str], cluster: str | None, mistakes: Mistakes | None = None
) -> Values:
    """Return the values of ``file`` with overrides and a cluster profile. Plugins and recipes get absolute paths.

    Raises, or adds to ``mistakes``, like :func:`read_values`.
    """
    _place_files(values, file.parent)
    found = Mistakes()
    if cluster is not None:
        values |= found.catch(_profile, cluster) or {}
    for override in overrides:
        found.catch(_apply, values, override)
    if mistakes is not None:
        mistakes.extend(found)
    elif found:
        raise ConfigError("\n".join(found))
    _place_files(values, Path.cwd())
    return values


def _place_files(values: Values, folder: Path) -> None:
    """Resolve relative paths of plugins and recipes against ``folder``. Other values are left for validation."""
    for key in ("plugins", "recipes"):
        if isinstance(paths := values.get(key), list):
            inside = [isinstance(at, str) and not at.startswith(shipped.PREFIX) for at in paths]
            values[key] = [str(folder / expanded(at)) if there else at for at, there in zip(paths, inside, strict=True)]


def launch_of(cluster: str) -> LaunchConfig:
    """Read a cluster profile. Raises :class:`ConfigError` if the file is missing or not valid."""
    launch = validated(LaunchConfig, _profile(cluster)["launch"], cluster)
    if mistakes := list(effects.of_launch(launch)):
        raise ConfigError("\n  ".join([f"{cluster}:", *mistakes]))
    return launch


def _profile(cluster: str) -> Values:
    file = shipped.path_of(cluster, "cluster profile")
    profile = read_toml(file, "deployments/clusters/local.toml")
    if profile.keys() != {"launch"}:
        raise ConfigError(f"{cluster} must hold the table [launch] only, found {sorted(profile)}")
    return profile


def read_toml(path: str | Path, example: str, mistakes: Mistakes | None = None) -> Values:
    """Read a TOML file. Raises :class:`ConfigError`, which names ``example``, if it is missing or not TOML.

    Values beyond the limits are cut and added to ``mistakes``; without it they raise, too.
    """
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"no file at {path}; expected a TOML file such as {example}")
    try:
        values = toml.parsed(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    if beyond := toml.cut_to_limits(values):
        message = f"{path}: {toml.beyond_limits(beyond)}"
        if mistakes is None:
            raise ConfigError(message)
        mistakes.append(message)
    return values


def check(values: Values, source: str) -> Recipe:
    """Build a recipe from plain values, strictly typed. Raises one :class:`ConfigError` with all mistakes."""
    recipe, idle = checked(values, source)
    if idle:
        raise ConfigError("\n  ".join([f"{source}:", *idle]))
    return recipe


def checked(values: Values, source: str) -> tuple[Recipe, list[str]]:
    """Build a recipe like :func:`check`, and return it with a sentence for each mistake that stops no further check."""
    recipe = validated(Recipe, values, source)
    return recipe, list(effects.without_effect(recipe))


_S = TypeVar("_S", bound=Section)


def validated(model: type[_S], values: Any, source: str) -> _S:
    """Build a section from plain values, strictly typed. Raises one :class:`ConfigError` with all mistakes."""
    try:
        # Through JSON, whose strict mode also accepts arrays for tuples and whole numbers for floats.
        text = json.dumps(values, default=str)
        return model.model_validate_json(text, strict=True, context=_WRITTEN)
    except ValidationError as error:
        mistakes = [line for item in error.errors() for line in _line(item, model).splitlines()]
        raise ConfigError("\n  ".join([f"{source}:", *mistakes])) from error


def _line(item: Any, model: type[BaseModel]) -> str:
    where = ".".join(str(part) for part in item["loc"] if part != "[key]")
    if item["type"] == "extra_forbidden":
        return f"{where}: unknown key{_hint(item['loc'], model)}"
    message = item["msg"].removeprefix("Value error, ")
    found = "" if item["type"] in {"missing", "value_error"} else f" (found {toml.shortened(item['input'])})"
    return f"{where}: {message}{found}".removeprefix(": ")


def _hint(location: tuple[Any, ...], model: type[BaseModel]) -> str:
    name, known = str(location[-1]), _known_fields(location, model)
    if name in MOVED:
        return f"; {MOVED[name]}"
    if close := difflib.get_close_matches(name, known, n=1):
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(known)}" if known else ""


_OF_SAMPLER = ("solver_option", "s_churn", "s_noise", "s_t_min", "s_t_max")
MOVED = {
    "enabled": "the algorithm is train.train_policy.type",
    "num_rollout": "it is rollout.n_generation here, with any number of GPUs",
    "sample_steps": "it is policy.diffusers.sample.num_steps here",
    "guidance": "it is policy.diffusers.sample.guidance_scale here, which is 1 + guidance",
    "reward_config": "each reward is a [[rewards]] table; the algorithm has adv_clip_min and adv_clip_max",
    **{name: f"it is policy.diffusers.sample.{name} here" for name in _OF_SAMPLER},
    **NOT_IN_LORA,
    "rank_pattern": "it is policy.lora.r_pattern here, as in cosmos-rl",
}
"""Messages for settings of cosmos-rl that have another name here, or no counterpart."""


def _known_fields(location: tuple[Any, ...], model: type[BaseModel]) -> list[str]:
    """Return the fields of the table that holds ``location``, over all plugins if the table is a plugin's."""
    models = [model]
    for part in location[:-1]:
        if isinstance(part, str):
            fields = [known.model_fields[part] for known in models if part in known.model_fields]
            models = [section for field in fields for section in _sections(field.annotation)]
    return sorted({name for known in models for name in known.model_fields})


def _sections(annotation: Any) -> list[type[BaseModel]]:
    if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return [section for argument in get_args(annotation) for section in _sections(argument)]
    below = [section for child in annotation.__subclasses__() for section in _sections(child)]
    return [annotation, *below]


def _apply(values: Values, override: str) -> None:
    path, separator, text = override.partition("=")
    keys = path.strip().split(".")
    if not separator or not all(keys) or len(keys) > toml.MAX_DEPTH:
        raise ConfigError(f"cannot read override {toml.shortened(override)}; expected section.key=value")
    try:
        value = toml.parsed(f"value = {text.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()  # a bare word
    except ValueError as error:
        raise ConfigError(f"override {toml.shortened(override)}: {error}") from error
    if beyond := toml.cut_to_limits({path.strip(): value}):
        raise ConfigError(f"override {toml.shortened(override)}: {toml.beyond_limits(beyond)}")
    table = values
    for key in keys[:-1]:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise ConfigError(f"override {toml.shortened(override)}: {key} is not a table")
    table[keys[-1]] = value
