"""A recipe: one TOML file that says what a run is. Read closed, strict, and with all its mistakes reported at once."""

import difflib
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from pydantic import BaseModel, Field, ValidationError, ValidationInfo, model_validator

from cosmos_rl_core import shipped
from cosmos_rl_core.config import effects
from cosmos_rl_core.config.base import NOT_IDENTITY, Section
from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.config.logging import LoggingConfig
from cosmos_rl_core.config.policy import NOT_IN_LORA, PolicyConfig
from cosmos_rl_core.config.train import (
    AnyAlgorithm,
    AnyDataset,
    AnyReward,
    EmaConfig,
    OptimizerConfig,
    RewardedOptions,
)
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.importers.cosmos_rl.translation import translated


class CkptConfig(Section):
    """What is kept of the policies."""

    max_keep: int | None = Field(default=None, ge=1, json_schema_extra=NOT_IDENTITY)
    """Newest policies that keep their optimizer, slow copy and reference; older ones keep the weights and the average,
    and training cannot begin again at them. Absent keeps everything."""


class TrainConfig(OptimizerConfig, EmaConfig):
    """How the weights move."""

    ckpt: CkptConfig = Field(default=CkptConfig(), json_schema_extra=NOT_IDENTITY)
    """What is kept of the policies."""

    seed: int = Field(default=0, ge=0)
    """Every random draw of the run derives from it."""
    num_iterations: int = Field(ge=1, json_schema_extra=NOT_IDENTITY)
    """How far to go; a run can be continued by raising it."""
    staleness: int = Field(default=0, ge=0)
    """Rollout k is sampled by policy k minus this. From 1 on rollout k + 1 runs beside update k: faster, off-policy."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """What the transformer computes with in rollouts, updates and held-out losses: ``bfloat16`` is faster and coarser.
    Weights, states, losses and the sums of gradients are float32 either way; evaluations too."""
    train_batch_per_replica: int = Field(default=8, ge=1)
    """Samples of one iteration over all ranks, prompts times ``rollout.n_generation``; in SFT, of one step."""
    train_policy: AnyAlgorithm
    """The algorithm and its settings."""


class KeepConfig(Section):
    """How long the large parts of rollouts are kept. What is deleted can only be made again by generating again."""

    tensors: int | None = Field(default=None, ge=1)
    """Rollouts whose final latents and recorded steps are kept, the newest ones; absent keeps all. An update reads
    those of its own rollout only; training on a rollout once more, or scoring its latents again, needs them."""
    media: int | None = Field(default=None, ge=1)
    """Rollouts whose pictures or videos are kept, the newest ones; absent keeps all. The report shows pictures of
    these only; scoring pixels again needs them."""


class RolloutConfig(Section):
    """How many samples, and how they are cut."""

    n_generation: int = Field(default=16, ge=2)
    """Samples per prompt: the group that advantages are relative to."""
    n_generation_mini_batch: int = Field(default=8, ge=1)
    """Samples in one forward pass. Memory and speed; also the last bits."""
    samples_per_shard: int = Field(default=32, ge=1)
    """Samples in one file: the unit that a retry keeps."""
    keep: KeepConfig = Field(default=KeepConfig(), json_schema_extra=NOT_IDENTITY)
    """How many rollouts keep their tensors and their media."""
    store_budget_gb: float = Field(default=1000.0, gt=0, json_schema_extra=NOT_IDENTITY)
    """A plan whose rollouts without pictures, or whose text embeddings, would take more than this, in units of 10^9
    bytes, is refused."""


class RewardConfig(Section):
    """One reward and its part in training."""

    fn: AnyReward
    """The reward plugin and its settings."""
    weight: float = 1.0
    """Factor in the sum that trains."""
    role: Literal["train", "monitor"] = "train"
    """``monitor`` is scored and reported but never in the loss."""
    max_attempts: int = Field(default=3, ge=1)
    """Tries of a sample that cannot be scored before it is excluded."""
    max_failed_fraction: float = Field(default=0.05, ge=0, lt=1)
    """Share of excluded samples above which the stage fails."""


class ValidationConfig(Section):
    """Held-out evaluation: samples of the stock pipeline from the exported weights, and the loss on held-out media."""

    dataset: AnyDataset
    """Prompts that training never sees."""
    data: AnyDataset | None = None
    """Media that training never sees, for the diffusion loss of each policy that is judged; absent measures none."""
    n_generation: int = Field(default=8, ge=1)
    """Images per prompt, from fixed seeds."""
    seed: int = Field(default=0, ge=0)
    """The evaluation's own seed, the same for every run, so that runs can be compared."""
    freq: int = Field(default=0, ge=0)
    """Iterations between evaluations; 0 evaluates the base and the final policy only."""
    batch_size: int = Field(default=16, ge=1)
    """Samples in one call of the pipeline."""


class Recipe(Section):
    """What a run is."""

    plugins: tuple[str, ...] = Field(default=(), json_schema_extra=NOT_IDENTITY)
    """Files or folders of plugins that lie outside the package: algorithms, rewards, datasets, models. A relative path
    begins at the recipe's folder, on the command line at the working directory. The plan pins the files' digests."""
    policy: PolicyConfig
    train: TrainConfig
    rollout: RolloutConfig = RolloutConfig()
    rewards: tuple[RewardConfig, ...] = ()
    validation: ValidationConfig | None = None
    launch: LaunchConfig = Field(default=LaunchConfig(), json_schema_extra=NOT_IDENTITY)
    logging: LoggingConfig = Field(default=LoggingConfig(), json_schema_extra=NOT_IDENTITY)

    @model_validator(mode="after")
    def _check(self, info: ValidationInfo) -> "Recipe":
        mistakes = list(_mistakes(self))
        if info.context == _WRITTEN:
            mistakes += effects.without_effect(self)
        if mistakes:
            raise ValueError("\n".join(mistakes))
        return self

    @property
    def prompts_per_iteration(self) -> int:
        """Prompts of one rollout."""
        return self.train.train_batch_per_replica // self.rollout.n_generation


def _mistakes(recipe: Recipe) -> Iterator[str]:
    """Yield a sentence for each combination of settings that cannot work."""
    train, options, rewards = recipe.train, recipe.train.train_policy, recipe.rewards
    batch, group = train.train_batch_per_replica, recipe.rollout.n_generation
    training = [reward for reward in rewards if reward.role == "train"]
    if training and not options.rewarded:
        yield f"{options.type} trains on data: give its rewards role = 'monitor'"
    if isinstance(options, RewardedOptions):
        if batch % group:
            yield f"train.train_batch_per_replica = {batch} is not a multiple of rollout.n_generation = {group}"
        if not training:
            yield f"{options.type} needs at least one [[rewards]] with role = 'train'"
        smallest = getattr(options, "min_group_size", 0)
        if smallest > group:
            yield f"train.train_policy.min_group_size = {smallest} drops every prompt: rollout.n_generation = {group}"
        if (per_step := options.batch_size_per_optimize) and batch % per_step:
            divisor = f"train.train_policy.batch_size_per_optimize = {per_step}"
            yield f"train.train_batch_per_replica = {batch} is not a multiple of {divisor}"
    if weightless := [reward.fn.label for reward in training if reward.weight == 0]:
        yield f"rewards of weight 0 train nothing: {', '.join(weightless)}; give them role = 'monitor'"
    names = [reward.fn.label for reward in rewards]
    if len(set(names)) != len(names):
        yield f"two rewards have the same name: {', '.join(names)}"
    weights = {abs(reward.weight) for reward in training}
    if getattr(options, "reward_average", False) and len(weights) > 1:
        yield (
            f"rewards weigh {', '.join(f'{w:g}' for w in sorted(weights))}, but train.train_policy.reward_average uses "
            "only the signs; set it to false, or make the weights equal"
        )
    if recipe.policy.from_scratch and recipe.policy.lora is not None:
        yield "policy.from_scratch draws all weights anew; leave [policy.lora] out"
    if train.ckpt.max_keep is not None and train.ckpt.max_keep <= train.staleness:
        yield (
            f"train.ckpt.max_keep = {train.ckpt.max_keep} drops policies that rollouts still need at "
            f"train.staleness = {train.staleness}"
        )
    if train.staleness:
        yield from _stale_mistakes(recipe)


def _stale_mistakes(recipe: Recipe) -> Iterator[str]:
    train, staleness = recipe.train, f"train.staleness = {recipe.train.staleness}"
    update, rollout = (set(recipe.launch.stage_gpus.get(stage, ())) for stage in ("update", "rollout"))
    if not train.train_policy.rewarded:
        yield f"{staleness}: {train.train_policy.type} makes no rollouts"
    if update & rollout or bool(update) != bool(rollout):
        yield (
            f"{staleness} runs rollout beside update: give both GPUs of their own in launch.stage_gpus, found update "
            f"{sorted(update)}, rollout {sorted(rollout)}"
        )
    if train.staleness >= train.num_iterations:
        yield (
            f"{staleness} samples every rollout of train.num_iterations = {train.num_iterations} from the base policy; "
            "1 or 2 are usual"
        )


_WRITTEN = "written by a person"
"""Context of a validation in which the fields that are set are those that somebody set."""


def read_values(path: str, overrides: list[str] | None = None, cluster: str | None = None) -> dict[str, Any]:
    """The plain values of a TOML recipe, after overrides ``a.b.c=value`` (values as in TOML; bare words are strings).

    A file of cosmos-rl is translated first. ``cluster`` is a TOML file whose ``[launch]`` takes the place of the
    recipe's. Raises :class:`ConfigError` if a file is not there or is not TOML, or if a key of cosmos-rl's has no
    meaning here.
    """
    values = translated(read_toml(file := shipped.path_of(path, "recipe"), shipped.EXAMPLE), path)
    _place_plugins(values, file.parent)
    if cluster is not None:
        values |= _profile(cluster)
    for override in overrides or []:
        _apply(values, override)
    _place_plugins(values, Path.cwd())
    return values


def _place_plugins(values: dict[str, Any], folder: Path) -> None:
    """Make the relative paths of plugins begin at ``folder``. Values of another type are left to be refused."""
    if isinstance(paths := values.get("plugins"), list):
        values["plugins"] = [str(folder / path) if isinstance(path, str) else path for path in paths]


def launch_of(cluster: str) -> LaunchConfig:
    """What a cluster's TOML file says. Raises :class:`ConfigError` if it is not there or not valid."""
    launch = _validated(LaunchConfig, _profile(cluster)["launch"], cluster)
    if mistakes := list(effects.of_launch(launch)):
        raise ConfigError("\n  ".join([f"{cluster}:", *mistakes]))
    return launch


def _profile(cluster: str) -> dict[str, Any]:
    profile = read_toml(shipped.path_of(cluster, "cluster profile"), "deployments/clusters/local.toml")
    if profile.keys() != {"launch"}:
        raise ConfigError(f"{cluster} must have the table [launch] and nothing else, found {sorted(profile)}")
    return profile


def read_toml(path: str | Path, example: str) -> dict[str, Any]:
    """The tables of a TOML file. Raises :class:`ConfigError`, which names an ``example``, if there is none."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"no file at {path}; expected a TOML file such as {example}")
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error


def check(values: dict[str, Any], source: str) -> Recipe:
    """Build the recipe from plain values, strictly typed; all mistakes in one :class:`ConfigError`."""
    return _validated(Recipe, values, source)


_S = TypeVar("_S", bound=Section)


def _validated(model: type[_S], values: Any, source: str) -> _S:
    try:
        # Through JSON, whose strict mode also accepts arrays for tuples and whole numbers for floats.
        return model.model_validate_json(json.dumps(values, default=str), strict=True, context=_WRITTEN)
    except ValidationError as error:
        mistakes = [line for item in error.errors() for line in _line(item, model).splitlines()]
        raise ConfigError("\n  ".join([f"{source}:", *mistakes])) from error


def _line(item: Any, model: type[BaseModel]) -> str:
    where = ".".join(str(part) for part in item["loc"] if part != "[key]")
    if item["type"] == "extra_forbidden":
        return f"{where}: unknown key{_hint(item['loc'], model)}"
    message = item["msg"].removeprefix("Value error, ")
    found = "" if item["type"] in {"missing", "value_error"} else f" (found {item['input']!r})"
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
    "num_rollout": "it is rollout.n_generation here, whatever the number of GPUs",
    "sample_steps": "it is policy.diffusers.sample.num_steps here",
    "guidance": "it is policy.diffusers.sample.guidance_scale here, which is 1 + guidance",
    "reward_config": "each reward is a [[rewards]] table here; adv_clip_min and adv_clip_max are the algorithm's",
    **{name: f"it is policy.diffusers.sample.{name} here" for name in _OF_SAMPLER},
    **NOT_IN_LORA,
    "rank_pattern": "it is policy.lora.r_pattern here, as in cosmos-rl",
}
"""Where cosmos-rl's settings are, of those that have another place or none."""


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
    return [annotation, *(section for child in annotation.__subclasses__() for section in _sections(child))]


def _apply(values: dict[str, Any], override: str) -> None:
    path, separator, text = override.partition("=")
    keys = path.strip().split(".")
    if not separator or not all(keys):
        raise ConfigError(f"cannot read override {override!r}; expected section.key=value")
    table = values
    for key in keys[:-1]:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise ConfigError(f"override {override!r}: {key} is not a table")
    try:
        table[keys[-1]] = tomllib.loads(f"value = {text.strip()}")["value"]
    except tomllib.TOMLDecodeError:  # a bare word
        table[keys[-1]] = text.strip()
